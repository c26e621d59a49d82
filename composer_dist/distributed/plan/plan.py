"""The plan itself: which module gets what, and why, to be read, compared and carried out."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import Sync
from composer_dist.distributed.activations.plan import ActivationPlan, Checkpointed
from composer_dist.distributed.compiling.plan import Compiled, CompilePlan
from composer_dist.distributed.context_parallelism.plan import ContextPlan
from composer_dist.distributed.feature_plan import FeaturePlan
from composer_dist.distributed.plan.text import mesh_in_words, table, unit_rows
from composer_dist.distributed.replication.plan import ReplicaPlan
from composer_dist.distributed.sharding.plan import ShardingPlan, Unit
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.structure.structure import Structure
from composer_dist.wording import human_bytes, near_miss


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


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Everything that `parallelize_model` will do to a model."""

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
    """Bytes that a rank needs beside its shards while the tensors on the meta device are initialized: a
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

    def wanted_mesh(self, world_size: int) -> MeshConfig | DeviceMesh:
        """The mesh to carry out the plan on."""
        if self.own_mesh is not None:
            return self.own_mesh
        if self.world_size != world_size:
            raise ParallelismValueError(
                f"The plan was made for {self.world_size} ranks, but there are {world_size}."
            )
        return MeshConfig(**self.mesh, device_type=self.device_type)

    def explain(self, name: str) -> str:
        """In words: what happens to the module or tensor called `name` ("" is the root), and why.

        Raises:
            ParallelismKeyError: the model has nothing of this name.
        """
        if name in self.modules:
            found = self.modules[name]
            first = f"{name or 'The root'}: {found.action}, because {found.reason}."
            return " ".join(filter(None, [first, *(one.explain(name) for one in self.features.values())]))
        tie = next((tie for tie in self.ties if name in tie), (name,))
        others = ", ".join(other for other in tie if other != name)
        tied = f", one parameter with {others}" if others else ""
        where = self.tensor_parallel.where(tie[0]) if self.tensor_parallel else None
        if where and tie[0] not in self.parameter_units:
            return f"{name}{tied}: {where}."
        tied += f", {where}" if where else ""
        if tie[0] in self.parameter_units:
            return f"{name}{tied}: sharded in unit {self.parameter_units[tie[0]] or 'root'}."
        if tie[0] in self.plain:
            return f"{name}{tied}: replicated on every rank, because {self.plain[tie[0]]}."
        if name in self.others:
            return f"{name}: {self.others[name]}."
        known = {*self.modules, *self.parameter_units, *self.plain, *self.others}
        raise ParallelismKeyError(f"The model has nothing called {name!r}.{near_miss(name, known)}")

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types, for JSON, comparison and the digest."""
        return {
            "world_size": self.world_size,
            "mesh": dict(self.mesh),
            "device_type": self.device_type,
            "structure": self.structure,
            "modules": {name: vars(one) for name, one in self.modules.items()},
            "plain": dict(self.plain),
            "ties": [list(names) for names in self.ties],
            "delivery": vars(self.delivery),
            "init_peak": self.init_peak,
            "verbose": self.verbose,
            "warnings": list(self.warnings),
            **{name: one.facts() for name, one in self.features.items()},
        }

    def decisions(self) -> dict[str, Any]:
        """Every decision by name except those on single units and modules, to report what differs."""
        facts = {key: value for key, value in self.to_dict().items() if key not in {"modules", "init_peak"}}
        for name in ("delivery", *self.features):
            nested = facts.pop(name)
            facts |= {key if key != "modules" else name: one for key, one in nested.items() if key != "units"}
        return facts

    def digest(self) -> str:
        """A hash that is equal on ranks which are about to do the same."""
        facts = self.to_dict() | {"init_peak": None}  # which ranks are on meta differs
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"tied: {' = '.join(names)}" for names in self.ties]
        lines += [line for one in self.features.values() for line in one.notes()]
        if self.init_peak:
            lines.append(f"initialization takes up to {human_bytes(self.init_peak)} beside the shards")
        lines += [f"warning: {text}" for text in self.warnings]
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        title = f"Plan for {ranks} ({mesh_in_words(self.mesh) or 'one rank'})"
        return "\n".join([table(title, *unit_rows(self.units)) if self.units else title, *lines])


def check_plan(plan: ParallelPlan, structure: Structure) -> ParallelPlan:
    """A ready plan; one that was made for another structure is refused."""
    if plan.structure != structure.digest():
        raise ParallelismValueError(
            f"The plan was made for a model with structure {plan.structure}, but this one has "
            f"{structure.digest()}: names, shapes, dtypes, frozen parameters or ties differ. Plan this model."
        )
    return plan
