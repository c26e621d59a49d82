"""The result of `suggest`: the fastest way to train that fits, alternatives, and advice."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.plan.compute import ComputeEstimate
from composer_dist.distributed.plan.memory import MemoryEstimate
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.plan.text import mesh_in_words, table
from composer_dist.errors import ParallelismValueError
from composer_dist.wording import human_bytes


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One way to train a model, and what it costs."""

    config: ParallelismConfig
    """For `parallelize_model`."""
    plan: ParallelPlan
    batch: Any = field(repr=False)
    """Of one microbatch, as for `plan.memory`."""
    microbatches: int
    """Of a rank in a step."""
    sequences: int
    """In a microbatch: the Trainer's `device_train_microbatch_size`."""
    memory: MemoryEstimate
    """Of one rank; with several microbatches, together with the gradients of those before."""
    compute: ComputeEstimate
    """Of one microbatch."""

    @property
    def seconds(self) -> float:
        """Of a step, without copies to the host and back: see `ComputeEstimate`."""
        return self.microbatches * self.compute.seconds

    @property
    def offloads(self) -> bool:
        """Whether parameters, gradients and optimizer state are in host memory."""
        return any(unit.offload for unit in self.plan.units)

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        numbers = {name: getattr(self, name) for name in ("seconds", "microbatches", "sequences", "offloads")}
        mesh = dict(self.plan.mesh)
        return {"config": self.config.to_dict(), "mesh": mesh, "peak": self.memory.peak, **numbers}

    def cells(self, limit: int) -> dict[str, str]:
        """As text, by heading of a table."""
        fsdp2 = self.config.fsdp2
        recomputed = {None: "nothing", "composable": "all"}
        chosen: Any = self.config.activation_checkpointing
        return {
            "a step": f"{self.seconds * 1000:.1f} ms{' +' if self.offloads else ''}",
            "peak": human_bytes(self.memory.peak),
            "fits": "yes" if self.memory.peak <= limit else "no",
            "mesh": mesh_in_words(self.plan.mesh) or "one rank",
            "reshard": str(fsdp2.reshard_after_forward) if fsdp2 else "",
            "recompute": recomputed[chosen] if chosen in recomputed else str(chosen),
            "offload": "yes" if self.offloads else "no",
            "microbatches": f"{self.microbatches} of {self.sequences}",
        }


@dataclass(frozen=True)
class Advice:
    """What to change so that it fits, computed as `proposal` shows."""

    text: str
    proposal: Proposal = field(repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The result of `suggest`."""

    device_memory: int
    """Bytes of one device."""
    best: Proposal | None
    """The fastest that fits; of those within 1%, the one that needs the least memory (first of the host,
    if it offloads)."""
    frontier: tuple[Proposal, ...]
    """Those that no other one beats in both time and memory, whether or not they fit, fastest first."""
    advice: tuple[Advice, ...] = ()
    """What to change, if nothing fits without offloading."""

    @property
    def config(self) -> ParallelismConfig:
        """The best one's, for `parallelize_model`.

        Raises:
            ParallelismValueError: nothing fits.
        """
        if self.best is None:
            raise ParallelismValueError("\n".join(self._last_lines()))
        return self.best.config

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {
            "best": None if self.best is None else self.best.to_dict(),
            "frontier": [one.to_dict() for one in self.frontier],
            "advice": [{"text": one.text, **one.proposal.to_dict()} for one in self.advice],
        }

    def __str__(self) -> str:
        rows = [one.cells(self.device_memory) for one in self.frontier]
        sides = {key: "right" if key in ("a step", "peak") else "left" for row in rows[:1] for key in row}
        title = f"Time of a step against memory, for {human_bytes(self.device_memory)} of each device"
        lines = [table(title, sides, (tuple(row.values()) for row in rows))] if rows else []
        if any(one.offloads for one in self.frontier):
            lines.append("+: and copies to the host and back")
        return "\n".join([*lines, *self._last_lines()])

    def _last_lines(self) -> list[str]:
        limit, advice = human_bytes(self.device_memory), [f"- {one}" for one in self.advice]
        if self.best is not None:
            cells = self.best.cells(self.device_memory).items()
            best = ", ".join(f"{heading} {cell}" for heading, cell in cells if heading != "fits")
            return [f"Best: {best}", *["Without offloading it fits with"] * bool(advice), *advice]
        if advice:
            return [f"Nothing fits into {limit} of each device. It does with", *advice]
        return [
            f"Nothing fits into {limit} of each device, not even with more ranks, fewer tokens or parameters "
            "in bfloat16."
        ]


def frontier_of(proposals: Iterable[Proposal]) -> tuple[Proposal, ...]:
    """Those that no other one beats in both time and memory, fastest first."""
    found: list[Proposal] = []
    for one in sorted(proposals, key=lambda one: (one.seconds, one.memory.peak)):
        if not found or one.memory.peak < found[-1].memory.peak:
            found.append(one)
    return tuple(found)
