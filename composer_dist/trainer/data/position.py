"""A pass over a dataloader that knows its position, and can start at one.

There are three kinds. A `DistributedDataLoader` has one position for all ranks. Other dataloaders with a
`state_dict`, such as torchdata's, have one on each rank. The batches of any other dataloader are counted and
read again, with the generators as they were when the pass began, so that a sampler shuffles alike.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismValueError
from composer_dist.random_states import host_states, set_aside, set_host_states
from composer_dist.trainer.data.loader import DistributedDataLoader, length_of
from composer_dist.trainer.data.randomness import from_plain, to_plain
from composer_dist.trainer.signals import spare_workers

_ANY_WORLD, _ITS_OWN, _COUNTED = "any world", "its own", "counted"


class Reading:
    """The batches of one pass, from a `place` that `place_of_all` returned, or from the beginning.

    A place that `end_of_all` returned is the beginning of the next pass.

    Args:
        replicas: how many ranks have different data; None means all.
    """

    def __init__(
        self, dataloader: Iterable[Any], place: Mapping[str, Any] | None = None, replicas: int | None = None
    ) -> None:
        self._dataloader: Any = dataloader
        self._replicas = replicas or process_group.world_and_rank()[0]
        spare_workers(dataloader)
        self._kind = _kind(dataloader)
        self._sizes = _sizes_of(dataloader)
        self._generators = {} if self._kind == _ANY_WORLD else host_states()
        self._began: dict[str, Any] = {}
        self.batches = 0
        """Batches of this rank, including those before `place`."""
        self.skipped: Any = None
        """The last batch before `place`, if that was read again."""
        self._start: Any = None
        """The state that the loader continues with, until its first batch: streams load it only then."""
        self._ended = False
        if place is None or place.get("over"):
            if place is not None:
                with set_aside():
                    self._end_again(place)
            if self._kind == _COUNTED:
                self._began = to_plain(self._generators) | {_OWN: _own_states(dataloader)}
            self._iterator = iter(dataloader)
        else:
            with set_aside():
                self._go_to(_mine(place, self._kind, type(dataloader).__name__, self._replicas))
        self._state = self._state_now()

    def __next__(self) -> Any:
        """The next batch."""
        if not self._ended:
            self._state = self._state_now()
        if self._kind != _ANY_WORLD:  # whose batches draw nothing from the process's generators
            self._generators = host_states()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._start = None
        self.batches += 1
        return batch

    def filler(self) -> Any:
        """The first batch of the epoch; the pass and the generators stay where they are.

        Raises:
            ParallelismValueError: there is none.
        """
        nothing, state = object(), self._present_state()
        with set_aside():
            batch = next(iter(self._dataloader), nothing)
            self._continue_at(state)
        if batch is nothing:
            raise ParallelismValueError(
                f"The {type(self._dataloader).__name__} is empty; every rank needs at least one batch."
            )
        return batch

    def place(self, last: bool) -> dict[str, Any]:
        """This rank's position: after its last batch, or before it if that is held back (`last`)."""
        state = self._state if last else self._present_state()
        return {"batches": self.batches - last, "state": state, **self._sizes}

    def generators(self, last: bool) -> dict[str, Any]:
        """The host's generators at that position, if reading has moved them."""
        return self._generators if last else {}

    def place_of_all(self, last: bool) -> dict[str, Any]:
        """What a checkpoint holds; every rank asks."""
        ranks = process_group.gather_objects(self.place(last))
        if self._kind == _ANY_WORLD:  # a rank without a share of the last batch is behind the others
            ranks = [max(ranks, key=lambda place: place["batches"])]
        return {"kind": self._kind, "ranks": ranks, "replicas": self._replicas}

    def end_of_all(self) -> dict[str, Any] | None:
        """What a checkpoint holds after the pass; None if the next one does not depend on this one.

        Every rank asks.
        """
        if self._kind == _ANY_WORLD or (self._kind == _ITS_OWN and hasattr(self._dataloader, "set_epoch")):
            return None
        if self._kind == _COUNTED:
            generators = _own_generators(self._dataloader)
            if not process_group.any_rank(bool(generators)):
                return None
            streams = isinstance(getattr(self._dataloader, "dataset", None), IterableDataset)
            if not self._ended and generators and not streams:
                with set_aside(), suppress(Exception):  # a sampler may draw once more when it finds the end
                    next(self._iterator, None)
            self._state = self._began = self._began | {_OWN: _own_states(self._dataloader)}
        return self.place_of_all(False) | {"over": True}

    def _end_again(self, place: Mapping[str, Any]) -> None:
        """Ends the pass of `end_of_all` again, if this is such a dataloader on as many ranks."""
        world, rank = process_group.world_and_rank()
        there = len(place["ranks"]), place.get("replicas", self._replicas)
        if place["kind"] != self._kind or there != (world, self._replicas):
            return
        state = place["ranks"][rank]["state"]
        if self._kind == _COUNTED:
            _set_own(self._dataloader, state[_OWN])
        else:
            self._dataloader.load_state_dict(state)
            next(iter(self._dataloader), None)

    def _present_state(self) -> Any:
        # A loader whose pass has ended may start over, so the state is the one before it noticed the end.
        return self._state if self._ended else self._state_now()

    def _state_now(self) -> Any:
        if self._kind == _COUNTED:
            return self._began
        return self._dataloader.state_dict() if self._start is None else self._start

    def _continue_at(self, state: Any) -> None:
        self._dataloader.load_state_dict(state)
        self._iterator, self._start = iter(self._dataloader), state

    def _go_to(self, place: Mapping[str, Any]) -> None:
        self.batches, state = place["batches"], place["state"]
        if self._kind != _COUNTED:
            self._continue_at(state)
            return
        if self.batches:
            self._check("batch_size", place)
        self._began = state
        set_host_states(from_plain(state))
        _set_own(self._dataloader, state.get(_OWN, []))  # checkpoints of earlier versions have none
        self._iterator = iter(self._dataloader)
        found = 0
        for batch in islice(self._iterator, self.batches):
            self.skipped, found = batch, found + 1
        if found < self.batches:
            raise ParallelismValueError(
                f"The {type(self._dataloader).__name__} has {found} batches, but {self.batches} were read "
                f"when the checkpoint was saved. {_REMEDY}"
            )
        for name in self._sizes if self.batches else ():
            self._check(name, place)

    def _check(self, name: str, place: Mapping[str, Any]) -> None:
        """Refuses a place among batches of another size or number, which has another meaning here."""
        now = self._sizes[name]
        if (saved := place.get(name)) not in (None, now):  # earlier versions saved fewer sizes
            raise ParallelismValueError(
                f"The {type(self._dataloader).__name__}'s {name} is {now}, but the checkpoint, whose "
                f"position counts batches, was saved with {saved}. {_REMEDY}"
            )


_REMEDY = (
    "Restore the data, or restart the epoch with load_ignore_keys=['data'] (in YAML "
    "resume.load_ignore_keys); a DistributedDataLoader resumes on any number of ranks."
)


def _sizes_of(dataloader: Any) -> dict[str, int | None]:
    """What the batches depend on, of a dataloader that says it as torch's does."""
    holders = dataloader, getattr(dataloader, "batch_sampler", None)
    dataset: Any = getattr(dataloader, "dataset", None)
    streams = isinstance(dataset, IterableDataset)  # of which each worker has a part
    sizes = (getattr(holder, "batch_size", None) for holder in holders)
    return {
        "batch_size": next((size for size in sizes if isinstance(size, int)), None),
        "length": length_of(dataloader),
        "samples": None if streams else length_of(dataset),
        "num_workers": getattr(dataloader, "num_workers", None) if streams else None,
    }


_OWN = "own"
"""The key of the states of a dataloader's generators among those of the host's."""


def _own_states(dataloader: Any) -> list[torch.Tensor]:
    """The states of the generators that were given to a dataloader or to its samplers."""
    return [generator.get_state() for generator in _own_generators(dataloader)]


def _set_own(dataloader: Any, states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_own_generators(dataloader), states, strict=False):
        generator.set_state(state.cpu())


def _own_generators(dataloader: Any) -> list[torch.Generator]:
    batches = getattr(dataloader, "batch_sampler", None)
    holders = dataloader, getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None)
    found = (getattr(holder, "generator", None) for holder in holders)
    return [*dict.fromkeys(one for one in found if isinstance(one, torch.Generator))]


def apart(dataloader: Any, training: object) -> Any:
    """What to evaluate on in addition to `training`: the dataloader, or one like it if it is the same.

    Raises:
        ParallelismValueError: it is the same, and a second pass over it would disturb the first one.
    """
    if dataloader is not training:
        return dataloader
    if isinstance(dataloader, DistributedDataLoader) and (other := dataloader.apart()) is not None:
        return other
    if _kind(dataloader) != _COUNTED or getattr(dataloader, "persistent_workers", False):
        raise ParallelismValueError(
            f"The {type(dataloader).__name__} to evaluate on is the one that is trained on, and it gives one "
            "pass at a time. Pass a second one of the same dataset."
        )
    return dataloader


def check_position(dataloader: Any, place: Mapping[str, Any]) -> None:
    """Goes to the position that a checkpoint holds, if it is one for all ranks.

    Raises:
        ParallelismValueError: it has no meaning in this dataloader.
    """
    if _kind(dataloader) != _ANY_WORLD or place.get("over"):
        return
    name = type(dataloader).__name__
    dataloader.load_state_dict(_mine(place, _ANY_WORLD, name, 1)["state"])


def _kind(dataloader: object) -> str:
    if isinstance(dataloader, DistributedDataLoader):
        return _ANY_WORLD
    stateful = callable(getattr(dataloader, "state_dict", None)) and hasattr(dataloader, "load_state_dict")
    return _ITS_OWN if stateful else _COUNTED


def _mine(place: Mapping[str, Any], kind: str, name: str, replicas: int) -> Mapping[str, Any]:
    """This rank's position, where `replicas` ranks have different data."""
    if place["kind"] != kind:
        raise ParallelismValueError(
            f"The checkpoint's position has no meaning in a {name}: another dataloader was in use. {_REMEDY}"
        )
    ranks = place["ranks"]
    if kind == _ANY_WORLD:
        first: Mapping[str, Any] = ranks[0]
        return first
    world, rank = process_group.world_and_rank()
    if len(ranks) != world:
        raise ParallelismValueError(
            f"The checkpoint has positions of {len(ranks)} ranks in their {name}, but there are {world} "
            f"now. {_REMEDY}"
        )
    if (then := place.get("replicas", replicas)) != replicas:  # earlier versions saved none
        raise ParallelismValueError(
            f"The checkpoint has positions of {then} ranks with different data in their {name}, but the mesh "
            f"has {replicas} now. {_REMEDY}"
        )
    mine: Mapping[str, Any] = ranks[rank]
    return mine
