"""The plan itself: which module gets what, and why, to be read, compared and carried out."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.config.mesh import MeshConfig
from composer_dist.distributed.feature_plan import Rank, StepEvent
from composer_dist.distributed.plan.communication import Communication, estimate_communication
from composer_dist.distributed.plan.compute import ComputeEstimate, estimate_compute
from composer_dist.distributed.plan.decisions import Decisions, Subject
from composer_dist.distributed.plan.html import html_report
from composer_dist.distributed.plan.memory import MemoryEstimate, estimate_memory, rank_of
from composer_dist.distributed.plan.start_up import Weights
from composer_dist.distributed.plan.text import mesh_in_words, table, unit_rows
from composer_dist.distributed.plan.topology import TOPOLOGIES, Topology, by_name
from composer_dist.distributed.plan.trace import as_trained, traced
from composer_dist.distributed.plan.work import DEVICES, Device
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.structure.calling import Loss
from composer_dist.structure.structure import Structure
from composer_dist.wording import human_bytes, near_miss


@dataclass(frozen=True, kw_only=True)
class ParallelPlan(Decisions):
    """Everything that `parallelize_model` will do to a model."""

    def wanted_mesh(self, world_size: int) -> MeshConfig | DeviceMesh:
        """The mesh to carry out the plan on."""
        if self.own_mesh is not None:
            return self.own_mesh
        if self.world_size != world_size:
            raise ParallelismValueError(
                f"The plan was made for {self.world_size} ranks, but there are {world_size}."
            )
        return MeshConfig(**self.mesh, device_type=self.device_type)

    def memory(self, batch: Any = None, *, loss: Loss | None = None, rank: int = 0) -> MemoryEstimate:
        """How much memory a rank needs, without a device and without a process group.

        Args:
            batch: what the rank's model is called with in each step: a shape (sequences, tokens) for models
                of transformers, or example inputs, whose values are not read. With context parallelism it is
                whole, and split as `context_parallel(model, batch)` does. None leaves the step out.
            loss: `(outputs, batch) -> scalar`. By default a ComposerModel's own, `outputs.loss`, or a mean.
            rank: whose memory.

        Raises:
            ParallelismValueError: the plan has no such rank, or the batch does not suit the model.
        """
        return estimate_memory(self, self._subject(), *self._followed(batch, loss, rank))

    def communication(
        self,
        batch: Any = None,
        *,
        loss: Loss | None = None,
        rank: int = 0,
        topology: Topology | str = "h100",
        weights: Weights | None = None,
    ) -> Communication:
        """What a rank sends and receives at start-up, and in a step: the third or later, with one microbatch.

        Bytes are those of an all-gather's output, a reduce-scatter's input, and the tensor of an all-reduce
        or a broadcast. With a batch, units, gradients and calls are followed through a traced step; without
        one, each unit runs once, and `.uncounted` names the features whose collectives depend on it: tensor
        and context parallelism. Not counted: what goes through the store and shared memory (`check_order`,
        agreements, hashes of weights), what the optimizer and clipping send, and under FSDP2 buffers that a
        forward changes, except those of batch norms.

        At start-up, rank 0's weights are sent in messages, or read from its memory where all ranks are on one
        host of the topology. From files, each rank reads its parts of the parameters, and what several ranks
        hold is gathered. Weights that every rank has, or initializes, need neither, except that what stays
        whole is initialized by one rank, which is not counted; nor is the optimizer's state.

        Args:
            batch, loss, rank: as for `memory`.
            topology: the links, "h100", "a100" or a `Topology`; see there for how seconds are computed.
            weights: where they come from: "rank0", "files", or None, which is "rank0" where the configuration
                has sync="rank0", and else of the ranks' own.

        Raises:
            ParallelismValueError: the plan has no such rank, or the batch does not suit the model.
        """
        here, events = self._followed(batch, loss, rank)
        return estimate_communication(self, here, events, by_name(topology, TOPOLOGIES), weights)

    def compute(
        self,
        batch: Any,
        *,
        loss: Loss | None = None,
        rank: int = 0,
        topology: Topology | str = "h100",
        device: Device | str = "h100",
    ) -> ComputeEstimate:
        """How much a rank computes in a step, and how long the step takes at least.

        Args:
            batch, loss, rank, topology: as for `communication`.
            device: the rates, "h100", "a100" or a `Device`.

        Raises:
            ParallelismValueError: the plan has no such rank, or the batch does not suit the model.
        """
        here, events = self._followed(batch, loss, rank)
        if events is None:
            raise ParallelismValueError("What is computed depends on the batch. Pass batch=.")
        return estimate_compute(self, here, events, by_name(topology, TOPOLOGIES), by_name(device, DEVICES))

    def to_html(
        self,
        path: str | Path,
        batch: Any = None,
        *,
        loss: Loss | None = None,
        rank: int = 0,
        device_memory: int | None = None,
        topology: Topology | str = "h100",
    ) -> None:
        """Write the plan as one HTML file: modules, memory over a step and traffic, for any browser, offline.

        Args:
            path: of the file; an existing one is replaced.
            batch, loss, rank: as for `memory`.
            device_memory: bytes of a device, drawn as the limit.
            topology: as for `communication`.

        Raises:
            ParallelismValueError: the plan has no such rank, or the batch does not suit the model.
        """
        text = html_report(
            self,
            self._subject().structure,
            self.explain,
            self.memory(batch, loss=loss, rank=rank),
            self.communication(batch, loss=loss, rank=rank, topology=topology),
            rank=rank,
            device_memory=device_memory,
        )
        Path(path).write_text(text, encoding="utf-8")

    def _subject(self) -> Subject:
        if self.subject is None:
            raise ParallelismValueError("The plan has no model. Make it with plan_parallelism(model, ...).")
        return self.subject

    def _followed(self, batch: Any, loss: Loss | None, rank: int) -> tuple[Rank, list[StepEvent] | None]:
        """A rank, and what happens in its step if there is a batch."""
        subject = self._subject()
        here = rank_of(self, subject.structure, rank)
        if batch is None:
            return here, None
        events = traced(subject, self, batch, loss, here)
        return as_trained(here, events), events

    def explain(self, name: str) -> str:
        """Explain what happens to the module or tensor called `name` ("" is the root), and why.

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
            lines.append(f"initialization takes up to {human_bytes(self.init_peak)} more than the shards")
        lines += [f"warning: {text}" for text in self.warnings]
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        title = f"Plan for {ranks} ({mesh_in_words(self.mesh) or 'one rank'})"
        return "\n".join([table(title, *unit_rows(self.units)) if self.units else title, *lines])


def check_plan(plan: ParallelPlan, structure: Structure) -> ParallelPlan:
    """A ready plan; one that was made for another structure is refused."""
    if plan.structure != structure.digest:
        raise ParallelismValueError(
            f"The plan was made for a model with structure {plan.structure}, but this one has "
            f"{structure.digest}: names, shapes, dtypes, frozen parameters or ties differ. Plan this model."
        )
    return plan
