"""The configuration of DDP."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_dist.config.base import FromDict, require
from composer_dist.errors import ParallelismValueError


@dataclass(frozen=True, kw_only=True)
class DDPConfig(FromDict):
    """Replicated data parallelism: every rank holds the whole model, and gradients are averaged."""

    find_unused_parameters: bool = False
    """Search each step's graph for parameters that the loss does not depend on."""
    static_graph: bool = False
    """The same parameters are used, in the same way, in every step."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers to all ranks before each forward that follows a synchronized one."""
    bucket_cap_mb: float | None = None
    """MiB of gradients that one all-reduce averages; None is torch's default, 25."""
    gradient_as_bucket_view: bool = False
    """Make gradients views of the buckets, which saves their size in memory."""
    skip_all_reduce_unused_params: bool = False
    """Leave out parameters that no rank uses; they must be the same in every step."""
    options: Mapping[str, Any] | None = None
    """Further arguments of this torch's DistributedDataParallel, by name."""
    ignored: Any = ()
    """Parameters, buffers and modules (matched as `Rule.match` does) that are neither synchronized nor
    averaged. Names in the model's `_ddp_params_and_buffers_to_ignore` are included."""
    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    """"DEFAULT", "PURE", "FULL" or a mapping of dtypes: see `composer_dist.precision`. The forward runs
    under autocast to its `param_dtype`, and gradients are reduced in its `reduce_dtype`."""
    comm_hook: str | Callable[..., Any] | None = None
    """How gradients are sent: "fp16", "bf16", "powersgd", "post_local_sgd", one inside another as in
    "fp16(powersgd)", or a function `(state, bucket)` for DDP's `register_comm_hook`."""
    comm_hook_state: Any = None
    """The first argument of a `comm_hook` that is a function."""
    comm_hook_options: Mapping[str, Any] | None = None
    """For "powersgd": the arguments of torch's `PowerSGDState`. For "post_local_sgd": `start_localSGD_iter`
    (0), `group_size` (the ranks of a host) and `post_local_gradient_allreduce` (True)."""
    averaging_period: int | None = None
    """With "post_local_sgd": the local steps after which the ranks' parameters are averaged."""
    sync_batch_norm: bool = False
    """Compute the statistics of batch norms over all ranks; needs an accelerator."""
    evaluate_only: bool = False
    """Give all ranks the same weights and average nothing; gradients are refused."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is bool:
                require(field.name, getattr(self, field.name), (False, True))
        size = self.bucket_cap_mb
        if size is not None and not (isinstance(size, int | float) and 0 < size < float("inf")):
            raise ParallelismValueError(f"bucket_cap_mb must be positive, a number of MiB, not {size!r}.")
