"""What a user asks of DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_dist.config.base import FromDict
from composer_dist.errors import ParallelismValueError


@dataclass(frozen=True, kw_only=True)
class DDPConfig(FromDict):
    """Replicated data parallelism: every rank holds the whole model, and gradients are averaged."""

    find_unused_parameters: bool = False
    """Search each step's graph for parameters that take no part in the loss."""
    static_graph: bool = False
    """The same parameters are used, in the same way, in every step."""
    broadcast_buffers: bool = True
    """Rank 0's buffers go to all ranks before each forward that follows a synchronized one."""
    bucket_cap_mb: float | None = None
    """MiB of gradients that are averaged in one all-reduce; None is torch's own, 25."""
    gradient_as_bucket_view: bool = False
    """Gradients lie in the buckets, which saves their size in memory."""
    skip_all_reduce_unused_params: bool = False
    """Leave out parameters that no rank uses, which must be the same ones throughout."""
    options: Mapping[str, Any] | None = None
    """Further arguments of this torch's DistributedDataParallel, by name."""
    ignored: Any = ()
    """Parameters, buffers and modules (matched as `Rule.match` does) that are left to each rank: neither
    synchronized nor averaged. Names in the model's `_ddp_params_and_buffers_to_ignore` are among them."""
    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    """"DEFAULT", "PURE", "FULL" or a mapping of dtypes: see `composer_dist.precision`. The forward runs
    under autocast to its `param_dtype`, and gradients travel in its `reduce_dtype`."""
    comm_hook: str | Callable[..., Any] | None = None
    """How gradients travel: "fp16", "bf16", "powersgd", "post_local_sgd", one inside of another as in
    "fp16(powersgd)", or a function `(state, bucket)` for DDP's `register_comm_hook`."""
    comm_hook_state: Any = None
    """The first argument of a `comm_hook` that is a function."""
    comm_hook_options: Mapping[str, Any] | None = None
    """Of "powersgd": the arguments of torch's `PowerSGDState`; of "post_local_sgd": `start_localSGD_iter`
    (0), `group_size` (the ranks of a host) and `post_local_gradient_allreduce` (True)."""
    averaging_period: int | None = None
    """With "post_local_sgd": the local steps after which the ranks' parameters are averaged."""
    sync_batch_norm: bool = False
    """Batch norms take their statistics over all ranks; needs an accelerator."""
    evaluate_only: bool = False
    """Bring all ranks to the same weights and average nothing; gradients are refused."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and value not in (False, True):
                raise ParallelismValueError(f"{field.name} is one of False, True, not {value!r}.")
        size = self.bucket_cap_mb
        if size is not None and not (isinstance(size, int | float) and size > 0):
            raise ParallelismValueError(f"bucket_cap_mb must be positive, a number of MiB, not {size!r}.")
