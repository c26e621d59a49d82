"""The configuration of FSDP2."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch.distributed.device_mesh import DeviceMesh

from composer_dist.config.base import ActivationCheckpointing, FromDict, require
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.users_code import warn
from composer_dist.wording import near_miss


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(FromDict):
    """Fully sharded data parallelism, with Composer's field names."""

    device_mesh: DeviceMesh | None = None
    """Composer's name for your own `ParallelismConfig.mesh`; None builds it from `MeshConfig`."""
    reshard_after_forward: bool | int = True
    """Free the gathered parameters after forward (True), keep them (False), or keep a smaller shard
    over this many ranks (an int that divides the shard dimension)."""
    activation_checkpointing: bool = False
    """Composer's name for `ParallelismConfig.activation_checkpointing="composable"`."""
    activation_cpu_offload: bool = False
    """Keep saved activations in host memory between forward and backward."""
    cpu_offload: bool | Literal["pinned", "pageable"] = False
    """Keep shards, gradients and optimizer state in host memory. True pins it if there is an
    accelerator; "pinned" requires that."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """The form in which a `CheckpointSaver` saves: a directory to which every rank writes its part, or a
    single file for which rank 0 gathers everything."""
    load_monolith_rank0_only: bool = False
    """Composer's name for what is not needed here; True is refused."""
    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    """"DEFAULT", "PURE", "FULL" or a mapping of dtypes: see `composer_dist.precision`."""
    verbose: bool = False
    """Print the plan and the preparation's report on rank 0."""

    def __post_init__(self) -> None:
        require("cpu_offload", self.cpu_offload, (False, True, "pinned", "pageable"))
        require("state_dict_type", self.state_dict_type, ("sharded", "full"))
        for name in ("activation_checkpointing", "activation_cpu_offload", "load_monolith_rank0_only"):
            require(name, getattr(self, name), (False, True))
        require("verbose", self.verbose, (False, True))
        if not isinstance(self.reshard_after_forward, int):
            raise ParallelismTypeError(
                "reshard_after_forward must be True, False or a number of ranks, not "
                f"{self.reshard_after_forward!r}."
            )
        if self.load_monolith_rank0_only:
            raise ParallelismValueError(
                "load_monolith_rank0_only=True: leave it out. No rank holds the whole of a single-file "
                "checkpoint, because load_checkpoint lets every rank read only its part. If rank 0 alone can "
                "see the file, torch.load it there and pass its states to load_full_model_state and "
                "load_full_optimizer_state."
            )

    @property
    def activations(self) -> ActivationCheckpointing:
        """Composer's two activation flags as a value of `ParallelismConfig.activation_checkpointing`."""
        return flagged_activations(self.activation_checkpointing, self.activation_cpu_offload)

    def without_aliases(self) -> Self:
        """A copy without the options that `ParallelismConfig` has a field for."""
        return dataclasses.replace(
            self, device_mesh=None, activation_checkpointing=False, activation_cpu_offload=False
        )

    @classmethod
    def from_compatible_attrs(cls, attrs: Mapping[str, Any]) -> Self:
        """Build the configuration from a Composer dictionary for FSDP1 or FSDP2.

        Each key that has no meaning here is dropped with a warning. FSDP1's `sharding_strategy` becomes
        `reshard_after_forward`.
        """
        rest = dict(attrs)
        known = {field.name for field in dataclasses.fields(cls)} - {"load_monolith_rank0_only"}
        if rest.get("load_monolith_rank0_only") is False:
            del rest["load_monolith_rank0_only"]
        strategy = str(rest.get("sharding_strategy", "")).upper()
        if strategy in {"FULL_SHARD", "SHARD_GRAD_OP"} and "reshard_after_forward" not in rest:
            del rest["sharding_strategy"]
            rest["reshard_after_forward"] = strategy == "FULL_SHARD"
        for key in sorted(rest.keys() - known):
            text = f"FSDP2Config has no {key!r}; '{key}: {rest.pop(key)}' is ignored.{near_miss(key, known)}"
            warn(text)
        return cls.from_dict(rest)


def flagged_activations(checkpointing: bool, offload: bool) -> ActivationCheckpointing:
    """Composer's two flags as one value of `ParallelismConfig.activation_checkpointing`."""
    if checkpointing:
        return ("composable", {"offload": True} if offload else {})
    return "offload" if offload else None
