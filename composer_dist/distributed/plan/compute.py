"""How long a step takes: what operators compute, and the collectives that this does not hide."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from composer_dist.distributed.feature_plan import Rank, StepEvent, Transfer
from composer_dist.distributed.plan.communication import transfers
from composer_dist.distributed.plan.decisions import Decisions
from composer_dist.distributed.plan.text import table
from composer_dist.distributed.plan.topology import Topology
from composer_dist.distributed.plan.work import Device

HOW = {
    **dict.fromkeys(("forward", "backward", "recomputed", "units"), "traced"),
    **dict.fromkeys(("compute_seconds", "exposed_seconds", "seconds", "mfu"), "modeled"),
}
"""How each number is got."""


@dataclass(frozen=True, kw_only=True)
class ComputeEstimate:
    """What one rank computes in a step, and how long the step takes at least.

    FLOPs are those of matrix products, convolutions and attention; attention counts as if it had no causal
    mask.
    """

    how: ClassVar[Mapping[str, str]] = HOW
    """How each number was got: it is "traced" or "modeled"."""
    forward: int
    """FLOPs."""
    backward: int
    """FLOPs without recomputation."""
    recomputed: int
    """FLOPs."""
    units: Mapping[str, int] = field(repr=False)
    """All FLOPs of each unit, "" being the root."""
    compute_seconds: float
    """Each operator takes its FLOPs or its bytes of memory by the device's rate."""
    exposed_seconds: float
    """What the device waits for collectives."""
    peak: float
    """FLOP/s of the device, in the dtype in which most is computed."""

    @property
    def seconds(self) -> float:
        """Of a step, without the optimizer's and without what the host adds."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs without recomputation by those possible in the time of a step."""
        return (self.forward + self.backward) / (self.seconds * self.peak) if self.seconds else 0.0

    def __str__(self) -> str:
        flops = {key: getattr(self, key) for key in ("forward", "backward", "recomputed")}
        rows = [(f"{key}, TFLOPs", f"{number / 1e12:.3f}", HOW[key]) for key, number in flops.items()]
        rows += [
            ("compute, ms", f"{self.compute_seconds * 1000:.3f}", HOW["compute_seconds"]),
            ("waiting for collectives, ms", f"{self.exposed_seconds * 1000:.3f}", HOW["exposed_seconds"]),
            ("step, ms", f"{self.seconds * 1000:.3f}", HOW["seconds"]),
            ("MFU", f"{self.mfu:.1%}", HOW["mfu"]),
        ]
        return table("", {"step of one rank": "left", "": "right", "how": "left"}, rows)


def estimate_compute(
    plan: Decisions, rank: Rank, events: Iterable[StepEvent], topology: Topology, device: Device
) -> ComputeEstimate:
    """See `ParallelPlan.compute`."""
    flops: Counter[str] = Counter()
    units: Counter[str] = Counter()
    dtypes: Counter[float] = Counter()
    clock, busy = _Clock(), 0.0
    for event, sent in transfers(plan, rank, events):
        if (work := event.work) is not None:
            flops["recomputed" if work.recomputed else event.phase] += work.flops
            units[event.unit] += work.flops
            dtypes[device.flops.get(work.dtype, min(device.flops.values()))] += work.flops
            busy += device.seconds(work)
            clock.compute(device.seconds(work))
        late = [one for one, _ in sent if one.collective == "all_gather" and not one.early]
        if event.moment == "before backward":
            clock.begin(waits=False)
        for early in (False, True):
            for one, stride in sent:
                if one.early == early:
                    seconds = topology.seconds(one.collective, one.nbytes, one.ranks, stride)
                    clock.send(one, seconds, waits=event.moment == "send")
            if not early and event.moment in ("before forward", "before backward"):
                clock.begin(waits=bool(late) or event.moment == "before backward")
    return ComputeEstimate(
        forward=flops["forward"],
        backward=flops["backward"],
        recomputed=flops["recomputed"],
        units=dict(units),
        compute_seconds=busy,
        exposed_seconds=clock.end - busy,
        peak=max(dtypes, key=lambda rate: dtypes[rate], default=max(device.flops.values())),
    )


class _Clock:
    """Times of the device, of all-gathers and of reductions, each of which does one thing after the other.

    A unit waits for its own all-gather. In forward that begins once the unit before it has begun, and in
    backward FSDP2 gathers in advance, so one unit is gathered while another one computes. Reductions begin
    when the gradients are there, and nothing waits for them before the end. The device waits for broadcasts
    and for what the model's own operators send.
    """

    def __init__(self) -> None:
        self._now = self._gathers = self._reductions = self._began = 0.0

    @property
    def end(self) -> float:
        return max(self._now, self._gathers, self._reductions)

    def compute(self, seconds: float) -> None:
        """The device computes."""
        self._now += seconds

    def begin(self, waits: bool) -> None:
        """A unit begins, if it waits, once it is gathered; from then on the next one may be gathered."""
        if waits:
            self._now = max(self._now, self._gathers)
        self._began = self._now

    def send(self, one: Transfer, seconds: float, waits: bool) -> None:
        """A collective, for which the device may wait."""
        if waits or one.collective == "broadcast":
            self._now += seconds
        elif one.collective == "all_gather":
            self._gathers = max(self._gathers, self._began) + seconds
        else:
            self._reductions = max(self._reductions, self._now) + seconds
