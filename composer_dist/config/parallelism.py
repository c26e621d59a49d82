"""What a user asks for: frozen dataclasses, never changed by the library.

From Python they are built by name; from YAML or a dictionary by `from_dict`, which refuses unknown
keys. `resolve_config` turns everything that `parallelize_model` accepts into one `ParallelismConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.config.base import ActivationCheckpointing, FromDict, names_of, require
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.errors import ParallelismTypeError, ParallelismValueError

Sync = Literal["auto", "rank0", "verify"]


MIB = 1 << 20


_ALL_RANKS = MeshConfig()


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig(FromDict):
    """Everything about how a model is made parallel; the one home of what several modes need."""

    mesh: MeshConfig | DeviceMesh = _ALL_RANKS
    """The sizes of the mesh, or a mesh of your own: see `composer_dist.distributed.mesh.dimensions.roles`."""
    fsdp2: FSDP2Config | None = None
    """None means the defaults."""
    tp: TPConfig | None = None
    ddp: DDPConfig | None = None
    """Replicate whole models by DDP, on every rank where `mesh` is left at its default."""
    rules: Sequence[Rule] = ()
    """Exceptions, module by module. Rules that choose units leave the root out unless one selects ""."""
    containers: Literal["expand", "skip"] = "expand"
    """A selected ModuleList or ModuleDict stands for its children, or for nothing."""
    activation_checkpointing: ActivationCheckpointing = None
    """"composable" (recompute all; renames nothing; also True), "selective" (recompute what is cheap),
    "wrapped", "offload", "memory_budget", or (mode, options): "every" (n), "save" (operations), "offload",
    ...; see docs/parallelism.md."""
    sync: Sync = "auto"
    """Whose weights count: "auto" delivers rank 0's where other ranks are on meta and otherwise
    verifies that all are equal; "rank0" always takes rank 0's; "verify" only compares."""
    forward_methods: Sequence[str] = ()
    """Methods besides `forward` ("training_step") in which the units that have them gather too."""
    compile: bool | Mapping[str, Any] = False
    """Compile the model's blocks, each by itself: True, or options of torch.compile ("backend", "mode",
    "dynamic", "fullgraph", "options")."""
    check_order: bool | Literal["auto"] = "auto"
    """Before each collective of a unit, compare that all ranks are at the same one, so that a module which
    some ranks skip is an error and not a hang. "auto" does so on CPU meshes; with an accelerator it costs
    overlap, and is for finding a hang."""
    strict: bool = True
    """False turns errors about options without effect into warnings."""
    transport: Literal["auto", "memory", "messages"] = "auto"
    """How weights travel: "memory" lets every rank read them from the source's memory, which works on one
    host; "messages" sends them to every rank; "auto" reads memory if all ranks can, else sends messages."""
    bucket_bytes: int = 256 * MIB
    """Most bytes that travel, or lie in a staging buffer, at one time."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As for the other configurations; the key "strategy" names one from which the others differ."""
        rest = dict(values)
        name = rest.pop("strategy", None)
        given = super().from_dict(rest)
        if name is None:
            return given
        from composer_dist.config.resolve import resolve_config

        return dataclasses.replace(resolve_config(name), **{key: getattr(given, key) for key in rest})  # type: ignore[return-value]

    def __post_init__(self) -> None:
        if isinstance(self.rules, Rule) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ParallelismTypeError("rules must be a sequence of Rule.")
        object.__setattr__(self, "rules", tuple(self.rules))  # the caller's list may change
        object.__setattr__(self, "forward_methods", names_of("forward_methods", self.forward_methods))
        fsdp2 = self.fsdp2
        aliased = fsdp2 is not None and (fsdp2.activation_checkpointing or fsdp2.activation_cpu_offload)
        if aliased and self.activation_checkpointing is not None:
            raise ParallelismValueError(
                "activation_checkpointing is set twice, in ParallelismConfig and (by Composer's alias) in "
                "FSDP2Config; keep one."
            )
        require("check_order", self.check_order, ("auto", True, False))
        require("sync", self.sync, ("auto", "rank0", "verify"))
        require("transport", self.transport, ("auto", "memory", "messages"))
        require("containers", self.containers, ("expand", "skip"))
        require("strict", self.strict, (False, True))
        if not isinstance(self.mesh, (MeshConfig, DeviceMesh)):
            raise ParallelismTypeError(f"mesh is a MeshConfig or a DeviceMesh, not {self.mesh!r}.")
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ParallelismValueError(f"bucket_bytes is a positive number, not {self.bucket_bytes!r}.")
