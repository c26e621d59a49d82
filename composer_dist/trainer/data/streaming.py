"""A dataloader of streams that are split by rank and worker, and that continues where it was.

Each rank has its own position, so a run resumes on the same number of ranks. Nothing is read again, except
for what `datasets` reads of the present file. A stream with a shuffle buffer is read up to its position.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, default_collate

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.random_states import derived_seed, set_aside
from composer_dist.trainer.data.loader import positive
from composer_dist.trainer.data.order import parts_of, stream_facts
from composer_dist.trainer.signals import spare_workers


class StreamingDataLoader:
    """This rank's batches of its own part of a stream.

    A stream of `datasets` is split by its files (`num_shards`), if their number is a multiple of the ranks';
    otherwise each rank reads all of them and keeps its samples. Workers divide a rank's files.
    Give it to the Trainer, which places it. It needs torchdata.

    Args:
        stream: an iterable data set of `datasets`, a `PackedStream` of one, or any iterable with
            `split(num_replicas, rank)`, and with `state_dict` and `load_state_dict` if it is to resume.
        batch_size: samples of one rank's batch.
        global_batch_size: samples of all ranks together, instead; a multiple of their number.
        collate_fn: samples to a batch, torch's by default.
        drop_last: leave out a last batch that is smaller.
        options: go to torchdata's StatefulDataLoader: `num_workers`, `pin_memory`, `prefetch_factor`, ...

    Raises:
        ParallelismValueError: not exactly one of the two sizes, or it is not a multiple of the ranks.
        ParallelismTypeError: the stream cannot be split, or not among several workers.
    """

    def __init__(
        self,
        stream: Any,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ParallelismValueError("Pass either batch_size or global_batch_size.")
        check_splits(stream)
        _check_divides(stream, options.get("num_workers", 0))
        self.dataset = stream
        self.batch_size = positive("batch_size", batch_size)
        self.global_batch_size = positive("global_batch_size", global_batch_size)
        self.collate_fn = collate_fn or default_collate
        self.drop_last = drop_last
        self.num_replicas: int | None = None
        """Ranks with different data; None before the loader is placed."""
        self.rank: int | None = None
        self._options = options
        self._epoch = 0
        self._state: Any = None
        self._loader: Any = None

    def placed(self, num_replicas: int, rank: int) -> Self:
        """This loader, for one rank of several; itself, if it is that one already.

        Raises:
            ParallelismValueError: a global batch cannot be divided by the ranks.
        """
        if self.num_replicas is not None:
            return self  # the Trainer compares
        if self.global_batch_size and self.global_batch_size % num_replicas:
            raise ParallelismValueError(
                f"global_batch_size={self.global_batch_size} must be a multiple of the {num_replicas} "
                "data-parallel ranks, which each read their own part of a stream."
            )
        other = copy.copy(self)
        other.dataset = split(self.dataset, num_replicas, rank)
        other.num_replicas, other.rank = num_replicas, rank
        return other

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; calls the stream's own `set_epoch`, if it has one."""
        self._epoch, self._state, self._loader = epoch, None, None
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)
        rewind(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """This rank's position after its last batch."""
        state = self._state if self._loader is None else self._loader.state_dict()
        workers = self._options.get("num_workers", 0)
        state = {"epoch": self._epoch, "loader": state, "num_workers": workers}
        return state | {"packing": self._packing, **stream_facts(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position that `state_dict` returned.

        Raises:
            ParallelismValueError: there was another number of workers, which divide the files otherwise, or
                the stream was packed in another way.
        """
        workers = self._options.get("num_workers", 0)
        if state["num_workers"] != workers:
            raise ParallelismValueError(
                f"The checkpoint's position is that of {state['num_workers']} workers, but num_workers is "
                f"{workers}. Restore it, or restart the epoch with load_ignore_keys=['data'] (in YAML "
                "resume.load_ignore_keys)."
            )
        now = {"packing": self._packing, **stream_facts(self.dataset)}
        changed = [name for name in now if state.get(name, now[name]) != now[name]]  # older ones have none
        if changed:
            differ = "; ".join(f"{name} was {state[name]}, is now {now[name]}" for name in changed)
            raise ParallelismValueError(
                f"The checkpoint's position is in another stream ({differ}). Restore it (shuffle() needs "
                "a seed), or restart the epoch with load_ignore_keys=['data'] (in YAML "
                "resume.load_ignore_keys)."
            )
        self.set_epoch(state["epoch"])
        self._state = state["loader"]

    def __iter__(self) -> Iterator[Any]:
        """A pass from the present position to the end of the epoch; the next one starts at the beginning."""
        if self._loader is not None:
            self.set_epoch(self._epoch)
        self._loader, self._state = self._open(self._state), None
        return iter(self._loader)

    @property
    def _packing(self) -> Any:
        """What a position in the stream depends on; blocks that are cut begin anywhere in a document."""
        packing = getattr(self.dataset, "packing", None)
        return {"how": "cut"} if packing and packing["how"] == "cut" else packing

    def _open(self, state: Any) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        size = self.batch_size or (self.global_batch_size or 1) // (self.num_replicas or 1)
        # A generator of its own, so that opening a pass draws nothing from the process's; it seeds workers.
        seed = derived_seed("workers", torch.initial_seed(), self._epoch, self.rank)
        options = {"generator": torch.Generator().manual_seed(seed), **self._options}
        stream = with_position(self.dataset)
        if hasattr(stream, "_ex_iterable") or not isinstance(stream, IterableDataset):
            stream = _Pass(stream, own=hasattr(stream, "load_state_dict"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
            loader = StatefulDataLoader(
                stream, size, collate_fn=self.collate_fn, drop_last=self.drop_last, **options
            )
        spare_workers(loader)
        if state is not None:
            loader.load_state_dict(state)
        return loader


def split(stream: Any, num_replicas: int, rank: int) -> Any:
    """One rank's part of a stream, as it says itself or as `datasets` splits its own.

    Raises:
        ParallelismTypeError: it cannot be split.
    """
    if num_replicas > 1:
        check_splits(stream)
    if callable(own := getattr(stream, "split", None)):
        return own(num_replicas, rank)
    if not hasattr(stream, "_ex_iterable"):
        return stream
    from datasets.distributed import split_dataset_by_node

    part: Any = split_dataset_by_node(stream, rank, num_replicas)
    # Streams that are made from one, as by take and skip, share its parts, which keep the position of a pass.
    held = vars(part)
    held["_ex_iterable"] = _copied(held["_ex_iterable"])
    return part


def _copied(part: Any) -> Any:
    """A part of a stream of `datasets` with copies of those that it reads."""
    other = copy.copy(part)
    if hasattr(part, "ex_iterable"):
        other.ex_iterable = _copied(part.ex_iterable)
    if hasattr(part, "ex_iterables"):
        other.ex_iterables = [_copied(one) for one in part.ex_iterables]
    return other


def rewind(stream: Any) -> None:
    """Lets a stream of `datasets` start its next pass at the beginning, not at an earlier position."""
    if hasattr(stream, "_ex_iterable"):
        stream.load_state_dict(None)


def with_position(stream: Any) -> Any:
    """The stream, for one pass; counted, if the position of `datasets` lacks what a shuffle buffer holds."""
    return _Pass(stream) if _has_shuffle_buffer(stream) else stream


@dataclass(eq=False)
class _Pass(IterableDataset[Any]):
    """One pass over a stream.

    Its position is a number of samples, up to which the stream is read again, or the stream's own. That is
    known only once a sample has been read: until then it is the one that was loaded, or the start.
    """

    stream: Any
    samples: int = 0
    own: bool = False
    """Whether the position is the stream's own; so are those in older checkpoints."""
    _loaded: Any = None

    def __post_init__(self) -> None:
        self._loaded = _START

    def state_dict(self) -> Any:
        if not self.own:
            return {"samples": self.samples}
        return self.stream.state_dict() if self._loaded is None else self._loaded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own = self.own or "samples" not in state
        if not self.own:
            self.samples = state["samples"]
        elif state != _START:
            self._loaded = state
            self.stream.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.stream)
        with set_aside():
            for _ in islice(stream, self.samples):
                pass
        for sample in stream:
            self._loaded = None
            self.samples += not self.own
            yield sample


_START = {"start": True}
"""The position of a pass that has not begun."""


def _has_shuffle_buffer(stream: Any) -> bool:
    """Whether a part of a stream of `datasets` shuffles in a buffer."""
    if not hasattr(stream, "_ex_iterable"):
        return False
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    return any(isinstance(part, BufferShuffledExamplesIterable) for part in parts_of(stream))


def _check_divides(stream: Any, workers: int) -> None:
    """Raises if each of several workers would read all of a stream."""
    inner = getattr(stream, "documents", stream)  # of a PackedStream
    if workers > 1 and not isinstance(inner, IterableDataset):
        raise ParallelismTypeError(
            f"Nothing says which of {workers} workers reads what of a {type(inner).__name__}, so each would "
            "read all of it. Pass num_workers=0 or 1, a stream of `datasets`, or an IterableDataset that "
            "divides itself by get_worker_info()."
        )


def check_splits(stream: Any) -> None:
    """Raises if nothing says how to split a stream.

    Raises:
        ParallelismTypeError: names its class.
    """
    if callable(getattr(stream, "split", None)) or hasattr(stream, "_ex_iterable"):
        return
    raise ParallelismTypeError(
        f"A {type(stream).__name__} is not a stream of `datasets` and has no split(num_replicas, rank), so "
        "nothing says which rank reads what. A DistributedDataLoader takes any iterable data set: every rank "
        "reads all of it."
    )
