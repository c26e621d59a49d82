"""The search for a plan that fits: which plans are estimated, and in which order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed.feature_plan import Rank
from composer_dist.distributed.plan.build import build_plan
from composer_dist.distributed.plan.compute import estimate_compute
from composer_dist.distributed.plan.decisions import Subject
from composer_dist.distributed.plan.memory import MemoryEstimate, followed_memory, held_memory, rank_of
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.plan.suggestion import Proposal
from composer_dist.distributed.plan.topology import Topology
from composer_dist.distributed.plan.trace import as_trained, traced
from composer_dist.distributed.plan.work import Device
from composer_dist.distributed.wishes import Request
from composer_dist.errors import ParallelismError
from composer_dist.structure.calling import Loss
from composer_dist.tensors.nested import map_tensors, tensors_in

CHECKPOINTING = (None, "selective", "composable")
"""From what keeps most to what recomputes most."""
_WAITS = 0.1
"""The share of a step that may be waiting for collectives before tensor parallelism is tried too."""


@dataclass
class Search:
    """What is asked for; see `suggest`."""

    request: Request
    subject: Subject
    world: int
    limit: int
    topology: Topology
    device: Device
    batch: Any
    loss: Loss | None

    def __post_init__(self) -> None:
        self._activations: dict[tuple[str, int], int] = {}
        """At the peak, by checkpointing and sequences, where no dimension is added."""
        self._held: dict[Any, tuple[Rank, MemoryEstimate, int]] = {}
        self._error: ParallelismError | None = None
        """The first reason why something could not be planned."""
        self.base = self.request.config
        assert isinstance(self.base.mesh, MeshConfig)
        self.mesh = self.base.mesh
        self.fsdp2 = self.base.fsdp2 or FSDP2Config()
        self._sequences = _sequences(self.batch)

    def run(self) -> list[Proposal]:
        """Estimates of all that could fit, and of what comes near to it, up to the first mode that fits.

        Raises:
            ParallelismError: nothing could be planned.
        """
        found: list[Proposal] = []
        for offload in self._offloads():
            for dimension in self._dimensions():
                found += self._explored(dimension, offload)
                fastest = min(self.fitting(found), key=lambda one: one.seconds, default=None)
                waits = fastest is not None and fastest.compute.exposed_seconds / fastest.compute.seconds
                if fastest is not None and (dimension != "" or waits <= _WAITS):
                    return found
            if self.fitting(found):
                return found
        if not self._held and self._error is not None:
            raise self._error
        return found

    def fitting(self, found: Iterable[Proposal]) -> list[Proposal]:
        """Those that fit."""
        return [one for one in found if one.memory.peak <= self.limit]

    def smallest(self, world: int, *, subject: Subject | None = None, batch: Any = None) -> Proposal | None:
        """What takes least memory on so many ranks; None if that does not fit."""
        mesh = self.mesh if -1 in self.mesh.sizes().values() else replace(self.mesh, dp_shard=-1)
        checkpointing = self.base.activation_checkpointing or CHECKPOINTING[-1]
        config = self._config(mesh, self._reshards(mesh)[0], checkpointing, False)
        made = self._plan(config, world, subject)
        if made is None or self._holds(made[1]) > self.limit:
            return None
        return next(iter(self.fitting([self._proposal(*made, 1, batch)])), None)

    def _offloads(self) -> list[bool]:
        """Whether parameters are offloaded."""
        settled = bool(self.fsdp2.cpu_offload)
        return [settled] if settled or self.base.ddp is not None else [False, True]

    def _dimensions(self) -> list[str]:
        """Dimensions of the mesh to add, "" being none."""
        if self.settled or self.base.ddp is not None:
            return [""]
        return ["", *(name for name in ("tp", "cp") if getattr(self.mesh, name) == 1)]

    @property
    def settled(self) -> bool:
        """Whether the configuration says how data-parallel ranks share the model."""
        return (self.mesh.dp_replicate, self.mesh.dp_shard) != (1, -1)

    def _explored(self, dimension: str, offload: bool) -> Iterator[Proposal]:
        """Estimates of all that one mode can do within the limit, and of what comes near to it."""
        meshes = [*self._meshes(dimension)]
        settled = self.base.activation_checkpointing
        for checkpointing in CHECKPOINTING if settled is None else (settled,):
            plans = [
                made
                for mesh in meshes
                for reshard in self._reshards(mesh)
                if (made := self._plan(self._config(mesh, reshard, checkpointing, offload)))
                and self._holds(made[1]) <= self.limit
            ]
            count: int | None = self._sequences
            while plans and count:
                key = repr(checkpointing), count
                tried = [
                    self._proposal(*made, count) for made in plans if self._least(made[1], key) <= self.limit
                ]
                yield from tried
                if not dimension and tried:
                    self._activations[key] = activations_of(tried[0])
                count = None if self.fitting(tried) else self._smaller(tried, count)

    def _least(self, plan: ParallelPlan, key: tuple[str, int]) -> float:
        """What a plan needs at least, if the ranks of a dimension that is added share all activations."""
        sharing = self._sharing(plan)
        return self._holds(plan) + (self._activations.get(key, 0) / sharing if sharing > 1 else 0)

    def _sharing(self, plan: ParallelPlan) -> int:
        """The ranks of a dimension that is added."""
        return 1 if self.settled else plan.mesh["tp"] * plan.mesh["cp"] // (self.mesh.tp * self.mesh.cp)

    def _smaller(self, tried: Sequence[Proposal], count: int) -> int | None:
        """The largest smaller microbatch with which one of these may fit."""

        def may_fit(smaller: int) -> bool:
            rest = 1 - smaller / count
            return not tried or any(
                one.memory.peak - rest * activations_of(one) <= self.limit for one in tried
            )

        divisors = (one for one in range(count - 1, 0, -1) if self._sequences % one == 0)
        return next(filter(may_fit, divisors), None)

    def _meshes(self, dimension: str) -> Iterator[MeshConfig]:
        if self.settled:
            sizes: dict[str, Any] = {**self.mesh.resolve(self.world)}
            yield replace(self.mesh, **sizes)
            return
        host = self.topology.ranks_per_host
        further = [{dimension: 2**power} for power in range(1, host.bit_length())] if dimension else [{}]
        for mesh in (replace(self.mesh, **sizes) for sizes in further):
            ranks, rest = divmod(self.world, mesh.tp * mesh.cp)
            for shards in range(1, ranks + 1) if not rest else ():
                if ranks % shards == 0 and (shards <= host or shards % host == 0):
                    yield replace(mesh, dp_replicate=ranks // shards, dp_shard=shards)

    def _reshards(self, mesh: MeshConfig) -> list[bool | int]:
        settled, host = self.fsdp2.reshard_after_forward, self.topology.ranks_per_host
        shards = mesh.dp_shard * mesh.cp
        if settled is not True or shards == 1 or self.base.ddp is not None:
            return [settled]
        return [True, False, *[host] * (shards > host and shards % host == 0)]

    def _config(
        self, mesh: MeshConfig, reshard: bool | int, checkpointing: Any, offload: bool
    ) -> ParallelismConfig:
        config = replace(self.base, mesh=mesh, activation_checkpointing=checkpointing)
        if not self.settled:
            config = replace(config, tp=None if mesh.tp == 1 else self.base.tp or TPConfig())
        if config.ddp is not None:
            return config
        offloaded = self.fsdp2.cpu_offload or offload
        fsdp2 = replace(self.fsdp2, reshard_after_forward=reshard, cpu_offload=offloaded)
        return replace(config, fsdp2=fsdp2)

    def _plan(
        self, config: ParallelismConfig, world: int | None = None, subject: Subject | None = None
    ) -> tuple[ParallelismConfig, ParallelPlan] | None:
        """A configuration and its plan; None if it is not possible."""
        subject = subject or self.subject
        assert isinstance(config.mesh, MeshConfig)
        try:
            sizes = config.mesh.resolve(world or self.world)
            plan = build_plan(subject.structure, replace(self.request, config=config), sizes)
        except ParallelismError as error:
            self._error = self._error or error
            return None
        return config, replace(plan, subject=subject)

    def _of(self, plan: ParallelPlan) -> tuple[Rank, MemoryEstimate, int]:
        """A rank of the plan, what it holds, and what the optimizer's step takes."""
        assert plan.subject is not None
        offloads = [unit.offload for unit in plan.units]
        key = id(plan.subject), tuple(plan.mesh.values()), any(offloads)
        if key not in self._held:
            here = rank_of(plan, plan.subject.structure, 0)
            self._held[key] = here, *held_memory(plan, plan.subject, here)
        return self._held[key]

    def _holds(self, plan: ParallelPlan) -> int:
        """The bytes that a rank holds in any case."""
        return self._of(plan)[1].peak

    def _proposal(
        self, config: ParallelismConfig, plan: ParallelPlan, count: int, batch: Any = None
    ) -> Proposal:
        """The estimates of a plan with so many sequences in a microbatch."""
        assert plan.subject is not None
        batch = _some(self.batch, count) if batch is None else batch
        rank, known, extra = self._of(plan)
        events = traced(plan.subject, plan, batch, self.loss, rank)
        trained = as_trained(rank, events)
        if trained is not rank:
            rank, (known, extra) = trained, held_memory(plan, plan.subject, trained)
        microbatches = -(-self._sequences * self._sharing(plan) // count)
        return Proposal(
            config=config,
            plan=plan,
            batch=batch,
            microbatches=microbatches,
            sequences=count,
            memory=followed_memory(plan, rank, known, extra, events, microbatches),
            compute=estimate_compute(plan, rank, events, self.topology, self.device),
        )


def is_shape(batch: Any) -> bool:
    """Whether a batch is given by its numbers of sequences and tokens."""
    return isinstance(batch, tuple) and all(isinstance(one, int) for one in batch)


def _sequences(batch: Any) -> int:
    """How many sequences a batch has; 1 if it cannot be split."""
    if is_shape(batch):
        return int(batch[0])
    lengths = {one.shape[0] if one.dim() else 1 for one in tensors_in(batch)}
    return lengths.pop() if len(lengths) == 1 else 1


def _some(batch: Any, count: int) -> Any:
    """So many sequences of a batch."""
    if is_shape(batch):
        return (count, *batch[1:])
    if count == _sequences(batch):
        return batch
    return map_tensors(lambda _, one: one[:count], batch)


def activations_of(proposal: Proposal) -> int:
    """The bytes of activations at the peak."""
    return sum(proposal.memory.at_peak.get(kind, 0) for kind in ("activations", "logits"))
