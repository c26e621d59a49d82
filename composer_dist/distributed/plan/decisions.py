"""The decisions that a plan consists of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composer_dist.config.parallelism import Sync
from composer_dist.distributed.activations.plan import ActivationPlan, Checkpointed
from composer_dist.distributed.compiling.plan import Compiled, CompilePlan
from composer_dist.distributed.context_parallelism.plan import ContextPlan
from composer_dist.distributed.feature_plan import FeaturePlan, StepEvent
from composer_dist.distributed.replication.plan import ReplicaPlan
from composer_dist.distributed.sharding.plan import ShardingPlan, Unit
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.structure.structure import Structure


@dataclass(frozen=True)
class ModulePlan:
    """What happens to one module."""

    action: str
    reason: str


@dataclass(frozen=True)
class Delivery:
    """How every tensor gets its value."""

    sync: Sync
    """Whose weights count; see `ParallelismConfig`. "auto" depends on what the ranks hold: they agree."""
    transport: Literal["auto", "memory", "messages"]
    """How weights travel; with "auto" the ranks try and agree on the first way that works for all."""
    bucket_bytes: int
    """Most bytes that travel at one time."""
    strict: bool
    """Whether every tensor of the base model must be in the files that are read."""


@dataclass(frozen=True)
class Subject:
    """What a plan was made for."""

    structure: Structure
    optimizers: tuple[Optimizer | type[Optimizer], ...]
    """A class is that of an optimizer of all trainable parameters."""
    traces: dict[str, tuple[Any, list[StepEvent]]] = field(default_factory=dict, repr=False, compare=False)
    """The loss and the events of steps that were traced; see `traced` in trace.py."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Everything that is decided about a model."""

    mesh: Mapping[str, int]
    """Mesh dimension to size, all four of them."""
    device_type: str
    own_mesh: DeviceMesh | None = None
    """The mesh that the caller has made, if there is one."""
    structure: str
    """Digest of the names, shapes, dtypes, `requires_grad` flags and ties planned for."""
    modules: Mapping[str, ModulePlan]
    """Every module's action and reason, by name."""
    plain: Mapping[str, str]
    """Parameters that stay whole on every rank, each with the reason."""
    ties: tuple[tuple[str, ...], ...]
    """The names of each parameter that has several."""
    others: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What else the model holds, by name: buffers, and parameters that its own code has sharded."""
    delivery: Delivery
    init_peak: int = 0
    """Bytes that a rank needs in addition to its shards while tensors on the meta device are initialized: a
    bucket, or the largest set of tensors that must be whole together. 0 where nothing is on meta."""
    verbose: bool = False
    """Whether rank 0 prints the plan and the preparation's report."""
    warnings: tuple[str, ...] = ()
    sharding: ShardingPlan | None = None
    replication: ReplicaPlan | None = None
    tensor_parallel: TensorParallelPlan | None = None
    context_parallelism: ContextPlan | None = None
    activations: ActivationPlan | None = None
    compiling: CompilePlan | None = None

    subject: Subject | None = field(default=None, repr=False, compare=False)
    """What the plan was made for; estimates need it."""

    @property
    def world_size(self) -> int:
        """Ranks that the plan is for."""
        return prod(self.mesh.values())

    @property
    def units(self) -> tuple[Unit, ...]:
        """FSDP2's, in the order in which they are applied: outer before inner."""
        return self.sharding.units if self.sharding else ()

    @property
    def parameter_units(self) -> Mapping[str, str]:
        """Every sharded parameter's first name to its unit's."""
        return self.sharding.parameter_units if self.sharding else {}

    @property
    def checkpointing(self) -> tuple[Checkpointed, ...]:
        """Modules whose activations are recomputed or offloaded."""
        return self.activations.modules if self.activations else ()

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """Modules whose forward torch.compile takes."""
        return self.compiling.modules if self.compiling else ()

    @property
    def float8(self) -> tuple[str, ...]:
        """Linear layers that compute in float8."""
        return self.compiling.float8 if self.compiling else ()

    @property
    def features(self) -> dict[str, FeaturePlan]:
        """The plans of the features that the model uses."""
        found: dict[str, FeaturePlan | None] = {
            "replication": self.replication,
            "sharding": self.sharding,
            "tensor_parallel": self.tensor_parallel,
            "context_parallelism": self.context_parallelism,
            "activations": self.activations,
            "compiling": self.compiling,
        }
        return {name: one for name, one in found.items() if one is not None}
