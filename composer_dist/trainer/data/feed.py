"""The batches of a dataloader, agreed upon by all ranks.

Before each batch every rank tells all others, in one small all-reduce, whether it has one and how
large it is. So all ranks take the same number of steps and microbatches, whatever their dataloaders
hold: a rank that has run out takes part with its last batch at weight 0 until all have run out, and
no sample is lost or counted twice. The same message carries whatever else must be equal everywhere:
rank 0's clock, a request to stop, and the failure of a dataloader.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from composer_dist import _torch
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.trainer.data.loader import DistributedDataLoader, length_of
from composer_dist.trainer.data.order import stream_order
from composer_dist.trainer.data.position import Reading
from composer_dist.trainer.data.streaming import StreamingDataLoader
from composer_dist.users_code import warn
from composer_dist.wording import ranks_named


@dataclass(frozen=True)
class Size:
    """What a rank's batch contributes."""

    samples: int = 0
    tokens: int = 0
    weight: float = 0.0
    """Terms that the loss averages over."""


@dataclass(frozen=True)
class Fed:
    """One batch of this rank, and what all ranks know about theirs."""

    batch: Any
    filler: bool
    """This rank has run out: the batch is an old one and does not count."""
    weight: float
    """This rank's terms in the loss, 0 for a filler."""
    mean_weight: float
    """Terms in the loss per rank."""
    most: int
    """The samples of the largest batch of any rank."""
    samples: int
    """Of all ranks together, ranks with the same data counted once."""
    tokens: int
    seconds: float
    """Rank 0's clock when it had its batch."""
    alarmed: bool = False
    """Whether any rank raised the alarm, before it fetched its batch."""
    may_change: bool = False
    """Whether any rank may change its batch before it trains on it, and so its size."""


class _Status(IntEnum):
    """Whether a rank has a batch."""

    HAS = 0
    OUT = 1
    NEVER = 2
    FAILED = 3
    BARE = 4
    """It has run out and has no batch to repeat, because the pass began in another process."""


class Feed:
    """One pass over this rank's dataloader, in step with the other ranks.

    Args:
        replicas: how many ranks have different data; None means all.
        place: where the pass starts, as `place` returned it, perhaps in another process; None: at the start.
        most: the most batches in the pass; None means all.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        label: str,
        measure: Callable[[Any], Size],
        clock: Callable[[], float] = lambda: 0.0,
        replicas: int | None = None,
        place: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> None:
        self._label, self._most = label, most
        self._measure = measure
        self._clock = clock
        self._world, _ = process_group.world_and_rank()
        self._share = (replicas or self._world) / self._world
        self.dataloader = dataloader
        # The ranks of other dataloaders have streams of their own.
        ours = isinstance(dataloader, DistributedDataLoader | StreamingDataLoader)
        self._order = stream_order(dataloader.dataset) if ours else None  # type: ignore[attr-defined]
        with Agreement().together(f"opening the {label} dataloader") if place else nullcontext():
            self._reading = Reading(dataloader, place, replicas)
        self._last: Any = self._reading.skipped
        self._held: Fed | None = None
        self._count = self._reading.batches
        self._behind = 0
        """Batches since the first rank ran out."""
        self.ended = False
        """Whether all ranks have run out."""
        self.stopped = False
        """Whether a rank asked to stop, at the last `next`; a batch is kept for the next call."""
        self.alarmed = False
        """Whether a rank raised the alarm, at the last fetch, which may have found the end."""
        self.length: int | None = None
        """The most batches that any rank has, where all know it; from the first `next` on."""

    def next(self, stop: bool = False, alarm: bool = False, may_change: bool = False) -> Fed | None:
        """The next batch; None if all ranks have run out (`ended`), or any asks to `stop`."""
        if self._held is None:
            self._held, self.stopped = self._agree(stop, alarm, may_change)
            self.ended = self._held is None
        else:
            self.stopped = process_group.any_rank(stop)
            alarmed = self._held.alarmed or process_group.any_rank(alarm)
            may_change = self._held.may_change or process_group.any_rank(may_change)
            self._held = replace(self._held, alarmed=alarmed, may_change=may_change)
        if self.stopped:
            return None
        fed, self._held = self._held, None
        return fed

    def hold(self, fed: Fed | None) -> None:
        """Have one process, whose Ctrl-C no other rank sees elsewhere, get this batch at its next `next`."""
        self._held = fed if self._world == 1 else None

    def place(self) -> dict[str, Any]:
        """Where the next batch is, for another process to start there; every rank asks."""
        return self._reading.place_of_all(self._holds)

    def end(self) -> dict[str, Any] | None:
        """Where the next pass starts, if that depends on this one, which is over; every rank asks."""
        return self._reading.end_of_all()

    def generators(self) -> dict[str, Any]:
        """The host's generators before a batch that was read but not returned; {} if there is none."""
        return self._reading.generators(self._holds)

    @property
    def _holds(self) -> bool:
        return self._held is not None and not self._held.filler

    def _agree(self, stop: bool, alarm: bool, may_change: bool) -> tuple[Fed | None, bool]:
        status, batch, size, error = self._fetch()
        length = length_of(self.dataloader, self._most)
        row = [status, -1 if length is None else length, stop, alarm, may_change, self._clock()]
        row += [size.samples, size.tokens, size.weight, self._order or 0]
        columns = zip(*process_group.rows_of_ranks(row).tolist(), strict=True)
        statuses, lengths, stops, alarms, changes, clocks, samples, tokens, weights, orders = columns
        if len({*orders}) > 1:
            raise ParallelismValueError(
                f"The ranks shuffle the {self._label} stream in different orders, so some samples would be "
                "lost and others repeated. Pass the same seed to its shuffle() on all ranks."
            )
        self.alarmed = any(alarms)
        if _Status.FAILED in statuses:
            if self._world == 1 and error is not None:
                raise error
            Agreement().reach(f"fetching a batch of {self._label}", None, error=error)
        if _Status.HAS not in statuses and self._count:
            return None, any(stops)  # the end
        self._check_all_have_some(statuses)
        if _Status.NEVER in statuses:
            lent = process_group.broadcast(batch, src=statuses.index(_Status.HAS))
            if status is _Status.NEVER:
                batch = self._last = lent
        if _Status.BARE in statuses:
            with Agreement().together(f"fetching a batch of {self._label}"):
                if status is _Status.BARE:
                    batch = self._last = self._reading.filler()
        self._count += 1
        self.length = None if -1 in lengths else int(max(lengths))
        fed = Fed(
            batch=batch,
            filler=status is not _Status.HAS,
            weight=size.weight,
            mean_weight=sum(weights) / self._world,
            most=int(max(samples)),
            samples=round(sum(samples) * self._share),
            tokens=round(sum(tokens) * self._share),
            seconds=clocks[0],
            alarmed=self.alarmed,
            may_change=any(changes),
        )
        return fed, any(stops)

    def _fetch(self) -> tuple[_Status, Any, Size, Exception | None]:
        if self._most is not None and self._count >= self._most:
            return self._out()
        try:
            batch = next(self._reading)
        except StopIteration as error:
            if _torch.raised_by_samples(error):
                return _Status.FAILED, None, Size(), self._stopped_by_samples(error)
            return self._out()
        except Exception as error:  # any error must be reported to the other ranks
            return _Status.FAILED, None, Size(), error
        try:
            size = self._measure(batch)
        except Exception as error:
            return _Status.FAILED, None, Size(), error
        if self._world > 1:
            self._last = batch
        return _Status.HAS, batch, size, None

    def _out(self) -> tuple[_Status, Any, Size, None]:
        status = _Status.OUT if self._count else _Status.NEVER
        if status is _Status.OUT and self._last is None:
            status = _Status.BARE
        return status, self._last, Size(), None

    def _stopped_by_samples(self, error: StopIteration) -> Exception:
        kind = type(getattr(self.dataloader, "dataset", None)).__name__
        failure = ParallelismRuntimeError(
            f"The {self._label} dataset ({kind}) or its collate_fn raised StopIteration, which a DataLoader "
            "takes for the end of the data. Raise another error, or return a sample."
        )
        failure.__cause__ = error
        return failure

    def _check_all_have_some(self, statuses: tuple[float, ...]) -> None:
        without = [rank for rank, status in enumerate(statuses) if status != _Status.HAS]
        # An evaluation may have fewer samples than there are ranks.
        if _Status.NEVER in statuses and (self._label == "train" or _Status.HAS not in statuses):
            raise ParallelismValueError(
                f"The {self._label} dataloader is empty on {_spell(without, self._world)}; every "
                "rank needs at least one batch. (A generator can be read only once.)"
            )
        self._behind += bool(without)
        if self._behind == 2:  # one batch less happens if samples do not divide evenly
            warn(
                f"The {self._label} dataloader of {_spell(without, self._world)} ended after "
                f"{self._count - 1} batches, before the others. Until all have ended, it repeats its last "
                "batch at weight 0: results are exact, but its time is wasted."
            )


def _spell(ranks: list[int], world: int) -> str:
    if len(ranks) == world:
        return "every rank" if world > 1 else "the only rank"
    return ranks_named(ranks)
