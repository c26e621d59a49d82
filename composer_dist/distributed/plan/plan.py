"""The plan itself: which module gets what, and why, to be read, compared and carried out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.activations.plan import Checkpointed
from composer_dist.distributed.compiling.plan import Compiled
from composer_dist.distributed.replication.plan import ReplicaPlan
from composer_dist.distributed.sharding.plan import Unit
from composer_dist.distributed.sharding.skip import Skippable
from composer_dist.distributed.tensor_parallel.plan import TensorParallelPlan
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.structure.structure import Structure
from composer_dist.wording import near_miss


@dataclass(frozen=True)
class ModulePlan:
    """What happens to one module."""

    action: str
    reason: str


@dataclass(frozen=True)
class ParallelPlan:
    """Everything that `parallelize_model` will do to a model."""

    config: ParallelismConfig
    world_size: int
    mesh: Mapping[str, int]
    """Mesh dimension to size, all four of them."""
    structure: str
    """Digest of the names, shapes, dtypes, `requires_grad` flags and ties planned for."""
    units: tuple[Unit, ...]
    """In the order in which they are applied: outer before inner."""
    modules: Mapping[str, ModulePlan]
    """Every module's action and reason, by name."""
    plain: Mapping[str, str]
    """Parameters that stay whole on every rank, each with the reason."""
    ties: tuple[tuple[str, ...], ...]
    """The names of each parameter that has several."""
    checkpointing: tuple[Checkpointed, ...]
    """Modules whose activations are recomputed or offloaded."""
    skippable: tuple[Skippable, ...] = ()
    """Modules with trainable parameters that ranks may skip."""
    init_peak: int = 0
    """Bytes that a rank needs beside its shards while the tensors on the meta device are initialized: a
    bucket, or the largest set of tensors that must be whole together. 0 where nothing is on meta."""
    warnings: tuple[str, ...] = ()
    compiled: tuple[Compiled, ...] = ()
    """Modules whose forward torch.compile takes."""
    float8: tuple[str, ...] = ()
    """Linear layers that compute in float8."""
    parameter_units: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Every sharded parameter's first name to its unit's."""
    tensor_parallel: TensorParallelPlan | None = None
    """Which matrices are cut among tensor-parallel ranks; None where there is one such rank."""
    others: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What else the model holds, by name: buffers, and parameters that its own code has sharded."""
    replica: ReplicaPlan | None = None
    """What DDP does, where it replicates the model."""

    def explain(self, name: str) -> str:
        """In words: what happens to the module or tensor called `name` ("" is the root), and why.

        Raises:
            ParallelismKeyError: the model has nothing of this name.
        """
        if name in self.modules:
            return " ".join(self._explain_module(name))
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

    def _explain_module(self, name: str) -> Iterator[str]:
        found = self.modules[name]
        yield f"{name or 'The root'}: {found.action}, because {found.reason}."
        if self.replica and not name:
            yield self.replica.explain()
        for unit in self.units:
            if name in unit.modules:
                count = len(unit.parameters)
                yield (
                    f"It gathers {count} parameter{'s' * (count != 1)}, {unit.nbytes:,} bytes; "
                    f"reshard_after_forward={unit.reshard_after_forward}."
                )
        if self.tensor_parallel and (text := self.tensor_parallel.explain(name)):
            yield text
        for one in self.checkpointing:
            if one.module == name:
                yield one.explain()
        if name in self.float8:
            yield "It computes in float8, because precision is amp_fp8."
        for compiled in self.compiled:
            if compiled.module == name:
                yield compiled.explain()

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types, for JSON, comparison and the digest."""
        return {
            "world_size": self.world_size,
            "mesh": dict(self.mesh),
            "structure": self.structure,
            "units": [unit.to_dict() for unit in self.units],
            "modules": {name: vars(one) for name, one in self.modules.items()},
            "plain": dict(self.plain),
            "ties": [list(names) for names in self.ties],
            "checkpointing": [one.to_list() for one in self.checkpointing],
            "skippable": [[one.module, list(one.parameters), one.unit] for one in self.skippable],
            "tensor_parallel": self.tensor_parallel and self.tensor_parallel.to_dict(),
            "forward_methods": list(self.config.forward_methods),
            "float8": list(self.float8),
            "compiled": [one.to_list() for one in self.compiled],
            "sync": self.config.sync,
            "transport": self.config.transport,
            "bucket_bytes": self.config.bucket_bytes,
            "init_peak": self.init_peak,
            "warnings": list(self.warnings),
            "replica": self.replica and self.replica.to_dict(),
        }

    def digest(self) -> str:
        """A hash that is equal on ranks which are about to do the same."""
        facts = self.to_dict() | {"init_peak": None}  # which ranks are on meta differs
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from composer_dist.distributed.plan.text import render_plan

        return render_plan(self)


def check_plan(plan: ParallelPlan, structure: Structure, world_size: int) -> ParallelPlan:
    """A ready plan, if it was made for this model and this many ranks.

    Raises:
        ParallelismValueError: another structure or world size.
    """
    if plan.structure != structure.digest():
        raise ParallelismValueError(
            f"The plan was made for a model with structure {plan.structure}, but this one has "
            f"{structure.digest()}: names, shapes, dtypes, frozen parameters or ties differ. Plan this model."
        )
    if plan.world_size != world_size:
        raise ParallelismValueError(
            f"The plan was made for {plan.world_size} ranks, but there are {world_size}."
        )
    return plan
