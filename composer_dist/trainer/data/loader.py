"""A dataloader whose order depends on the seed and the epoch alone, and that resumes anywhere.

It wraps a plain torch DataLoader. It adds the order (order.py), the position in it, which is one number for
all ranks, and the randomness of a batch, which is a function of its position.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakMethod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from composer_dist.config.launched import launched_ranks
from composer_dist.distributed.mesh.mesh import sampler_kwargs
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.random_states import derived_seed
from composer_dist.trainer.data.fetching import FetchBatch, Request, StreamBatches
from composer_dist.trainer.data.order import (
    batches_left,
    epoch_order,
    global_batches,
    share,
    stream_facts,
    streams_in,
)
from composer_dist.trainer.signals import spare_workers


class OtherDataError(ParallelismValueError):
    """A position in other data than this."""


class DistributedDataLoader:
    """This rank's batches of a dataset that all ranks read together.

    No sample is skipped or read twice in an epoch, on any number of ranks, also after resuming on another
    number of ranks. Give it to the Trainer, which places it, or place it with `mesh`.

    Args:
        dataset: anything with `__getitem__` and `__len__` (a torch or Hugging Face dataset, a list),
            or an iterable: then every rank reads the whole stream and keeps its own samples.
        batch_size: samples of one rank's batch.
        global_batch_size: samples of all ranks together, instead; independent of the number of ranks.
        shuffle: a new order in each epoch; an iterable dataset must shuffle itself, by `set_epoch`.
        seed: of the order, and of what the dataset and `collate_fn` draw from Python's, numpy's and
            torch's generators, whatever `num_workers` is.
        drop_last: leave out the last global batch if it is smaller.
        mesh: says which ranks have the same data, by `sampler_kwargs`.
        collate_fn: samples to a batch, torch's by default.
        options: go to torch's DataLoader: `num_workers`, `pin_memory`, `prefetch_factor`, ... For a dataset
            with `set_epoch`, `persistent_workers` persist to the end of an epoch.

    Raises:
        ParallelismValueError: not exactly one of the two sizes; an option that cannot work here.
        ParallelismTypeError: the dataset can be neither indexed nor iterated.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        mesh: DeviceMesh | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.batch_size = positive("batch_size", batch_size)
        self.global_batch_size = positive("global_batch_size", global_batch_size)
        if (batch_size is None) == (global_batch_size is None):
            raise ParallelismValueError("Pass either batch_size or global_batch_size.")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.collate_fn = collate_fn or default_collate
        self.num_replicas: int | None = None
        """Ranks with different data; None before the loader is placed."""
        self.rank: int | None = None
        self._length = sample_count(dataset)
        _check(dataset, shuffle, options)
        self._options = options
        self._epoch = 0
        self._start = 0
        """Samples of this epoch, of all ranks, that were read before the pass."""
        self._batches_before = 0
        self._batches = 0
        """Batches that this pass has given."""
        self._ended = False
        self._loader: DataLoader[Any] | None = None
        if mesh is not None:
            self._place(**sampler_kwargs(mesh))

    def placed(self, num_replicas: int, rank: int) -> Self:
        """This loader, for one rank of several; itself, if it is that one already.

        Raises:
            ParallelismValueError: there are more ranks than samples in a global batch.
        """
        if self.num_replicas is not None:
            return self  # the Trainer compares
        other = copy.copy(self)
        other._place(num_replicas, rank)
        return other

    def apart(self) -> Self | None:
        """A loader of the same batches with a position of its own; None if the dataset is a stream."""
        if self._length is None:
            return None
        other = copy.copy(self)
        other._loader = None
        other._rewind()
        return other

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; calls the dataset's own `set_epoch`, if it has one."""
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)
            self._loader = None  # persistent workers have copies of the dataset, which do not change
        self._epoch = epoch
        self._rewind()

    def _rewind(self) -> None:
        self._ended = False
        self._start, self._batches_before, self._batches = 0, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch: equal on all ranks, valid for any number of ranks."""
        samples = self._start + self._batches * self._size
        batches = self._batches_before + self._batches
        if self._length is not None:
            ended = self._ended  # this rank may have had no share of the last batch
            samples = self._length if ended else min(samples, self._length)
            batches = len(self) if ended else batches
        return {
            "epoch": self._epoch,
            "samples": samples,
            "batches": batches,
            "data": {
                "length": self._length,
                "shuffle": self.shuffle,
                "seed": self.seed,
                "packing": getattr(self.dataset, "packing", None),
                **stream_facts(self.dataset),
                # Streams that shuffle, like those of `datasets`, use another order in a worker.
                "num_workers": self._options.get("num_workers", 0) if self._length is None else None,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position that `state_dict` returned.

        Raises:
            OtherDataError: the data differ, so the position has no meaning.
        """
        now = self.state_dict()["data"]
        then = now | state["data"]  # earlier versions saved less
        changed = [f"{name} was {then[name]}, is now {now[name]}" for name in now if then[name] != now[name]]
        if changed:
            raise OtherDataError(
                f"The data differ from the checkpoint's ({'; '.join(changed)}), so the samples already seen "
                "are unknown. Restore the data (a stream's shuffle() needs a seed), or restart the epoch "
                "with load_ignore_keys=['data'] (in YAML resume: {load_ignore_keys: [data]})."
            )
        self.set_epoch(state["epoch"])
        self._start, self._batches_before = state["samples"], state["batches"]

    def __len__(self) -> int:
        """Batches of an epoch, of the rank that has the most; TypeError where that is not known.

        Raises:
            ParallelismTypeError: the batches depend on how many ranks have different data.
        """
        if self._length is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length.")
        ranks = max(process_group.world_and_rank()[0], launched_ranks())
        if self.num_replicas is None and self.global_batch_size is None and ranks > 1:
            raise ParallelismTypeError(
                f"How many of the {ranks} ranks have different data? The number of batches of batch_size="
                f"{self.batch_size} each depends on it. Use global_batch_size, pass mesh= to the "
                "DistributedDataLoader, or ask the Trainer's state.train_dataloader."
            )
        return self._batches_before + batches_left(self._start, self._length, self._size, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """A pass from the present position to the end of the epoch; the next one starts at the beginning."""
        if self.num_replicas is None:
            world, _ = process_group.world_and_rank()
            if world > 1:
                raise ParallelismValueError(
                    f"Which of the {world} ranks have the same data? Pass mesh= to the "
                    "DistributedDataLoader, or give it to the Trainer."
                )
            self._place(1, 0)
        if self._batches or self._ended:
            self._rewind()  # the dataset, which another loader may read too, stays in its epoch
        return self._count(self._open())

    def _count(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch
        self._ended = True

    def _open(self) -> DataLoader[Any]:
        """The torch DataLoader of this pass."""
        # A generator of its own, so that opening a pass draws nothing from the process's.
        options = {"collate_fn": _as_it_is, "generator": torch.Generator(), **self._options}
        if self._length is None:
            stream = StreamBatches(
                dataset=self.dataset,
                collate=self.collate_fn,
                size=self._size,
                start=self._start,
                drop_last=self.drop_last,
                seed=derived_seed("stream", self.seed, self._epoch),
                **self._part,
            )
            loader = DataLoader(stream, batch_size=None, **options)
            spare_workers(loader)
            return loader
        if self._loader is None:  # else the same one again: its workers may persist
            fetch = FetchBatch(self.dataset, self.collate_fn)
            self._loader = DataLoader(
                fetch, batch_size=None, sampler=_Requests(WeakMethod(self._requests)), **options
            )
            spare_workers(self._loader)
        return self._loader

    def _requests(self) -> Iterator[Request]:
        """What this rank fetches in this pass, if the dataset has a length."""
        assert self._length is not None
        order = epoch_order(self._length, self.shuffle, self.seed, self._epoch)
        for first, end in global_batches(self._start, self._length, self._size, self.drop_last):
            mine = slice(*share(first, end, **self._part))
            if indices := [int(index) for index in order[mine]]:
                yield derived_seed("batch", self.seed, self._epoch, mine.start), indices

    @property
    def _part(self) -> dict[str, int]:
        assert self.num_replicas is not None
        assert self.rank is not None
        return {"num_replicas": self.num_replicas, "rank": self.rank}

    @property
    def _size(self) -> int:
        """Samples of a batch of all ranks."""
        return self.global_batch_size or (self.batch_size or 0) * (self.num_replicas or 1)

    def _place(self, num_replicas: int, rank: int) -> None:
        if self._size < num_replicas and self.global_batch_size:
            raise ParallelismValueError(
                f"global_batch_size={self.global_batch_size} (in YAML data.batch_size) leaves some of "
                f"the {num_replicas} data-parallel ranks without samples; it must be at least their number."
            )
        self.num_replicas, self.rank, self._loader = num_replicas, rank, None


@dataclass(eq=False)
class _Requests(Sampler[Request]):
    """What each pass of a loader fetches.

    It does not keep the loader: the garbage collector would stop persistent workers after 5 seconds only.
    """

    of_pass: WeakMethod[Callable[[], Iterator[Request]]]

    def __iter__(self) -> Iterator[Request]:
        requests = self.of_pass()
        assert requests is not None  # it is the loader that iterates
        return requests()


def _as_it_is(batch: Any) -> Any:
    return batch


def _check(dataset: Any, shuffle: bool, options: Mapping[str, Any]) -> None:
    """Refuses what would lose samples, or their order."""
    if wrong := [name for name in ("sampler", "batch_sampler", "generator") if name in options]:
        raise ParallelismValueError(
            f"{', '.join(wrong)}: a DistributedDataLoader makes its own order from shuffle and seed. For "
            "another order use torch's DataLoader and DistributedSampler(dataset, **sampler_kwargs(mesh))."
        )
    if sample_count(dataset) is not None:
        return
    if not isinstance(dataset, Iterable):
        raise ParallelismTypeError(
            f"{type(dataset).__name__} is not a dataset: it has neither __getitem__ and __len__ nor __iter__."
        )
    if isinstance(dataset, Iterator):
        raise ParallelismTypeError(
            f"A {type(dataset).__name__} can be read only once; pass an object whose __iter__ starts over."
        )
    if is_split(dataset):
        raise ParallelismValueError(
            "The stream is already split by split_dataset_by_node. A DistributedDataLoader splits it "
            "again, and samples would be lost: give it the whole stream, or use a StreamingDataLoader."
        )
    if shuffle:
        raise ParallelismValueError(
            f"A {type(dataset).__name__} has no length, so its samples cannot be shuffled here. Shuffle "
            "inside the dataset, by the epoch that its set_epoch(epoch) receives."
        )
    if options.get("num_workers", 0) > 1 or options.get("persistent_workers"):
        raise ParallelismValueError(
            "A stream has one order, so one worker reads it: pass num_workers=0 or 1, without "
            "persistent_workers, which would not learn of the next epoch."
        )


def is_split(dataset: Any) -> bool | None:
    """Whether a stream of `datasets` has only one rank's samples; None for anything else."""
    split = [getattr(stream, "_distributed", None) for stream in streams_in(dataset)]
    return any(getattr(one, "world_size", 1) > 1 for one in split) if split else None


def sample_count(dataset: Any) -> int | None:
    """The number of samples of a dataset that can be indexed; None for a stream."""
    if isinstance(dataset, IterableDataset):  # torch's has a __getitem__, which only raises
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    return len(dataset)


def length_of(dataloader: Iterable[Any], most: int | None = None) -> int | None:
    """The number of batches of a dataloader, where it knows it, but not more than `most`."""
    try:
        length = len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # DataLoader over an IterableDataset without a length
        return None
    return length if most is None else min(length, most)


def positive(name: str, size: int | None) -> int | None:
    """The size, if it is a positive number of samples or None; else a ParallelismValueError."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ParallelismValueError(f"{name} must be a positive number of samples, not {size!r}.")
    return size
