"""DDP's communication hooks by name, for any backend and device; post-local SGD.

The names are those of torch's own hooks (torch.distributed.algorithms.ddp_comm_hooks). Two are rewritten
here: DDP accepts torch's bfloat16 hooks on NCCL only, though gloo supports the dtype too, and torch's
post-local SGD asks CUDA for the ranks of a host. Post-local SGD: Lin, Stich, Patel and Jaggi, "Don't Use
Large Mini-Batches, Use Local SGD" (2018), arXiv:1808.07217.
"""

# No deferred annotations: DDP compares a hook's with the types themselves.

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.futures import Future
from torch.optim import Optimizer

from composer_dist.config.mesh import per_host
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed.training.average_gradients import average
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import near_miss


class LocalSGD:
    """The state of the hook; `after_step` must run after every optimizer's step.

    Args:
        group: all ranks that hold the model.
        averaging_period: local steps between two averages of the parameters.
        start_localSGD_iter: synchronized backward passes before the first local one.
        group_size: number of ranks that average their gradients in each local step; it must divide the
            world size. None takes the ranks of one host, according to the launcher.
        post_local_gradient_allreduce: False averages no gradients in local steps.

    Raises:
        ParallelismValueError: `group_size` does not divide the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        averaging_period: int,
        start_localSGD_iter: int = 0,  # noqa: N803 (torch's name)
        group_size: int | None = None,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        world = dist.get_world_size(group)
        size = int(per_host() or world) if group_size is None else group_size
        size = size if post_local_gradient_allreduce else 1
        if size < 1 or world % size:
            raise ParallelismValueError(f"group_size={size} does not divide the {world} ranks.")
        self.everybody = group
        self.period = averaging_period
        self.left = start_localSGD_iter
        self.steps = 0
        """Local steps so far."""
        self._settled = 0
        """How many there were at the last average between two periods."""
        self._near = group
        if size < world:
            first = dist.get_rank(group) // size * size
            near = dist.get_process_group_ranks(group)[first : first + size]
            self._near = dist.new_group(near, use_local_synchronization=True)  # ranks outside may not come

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that average their gradients now."""
        return self._near if self.steps else self.everybody

    def next_backward(self) -> None:
        """Count a synchronized backward pass."""
        if self.left:
            self.left -= 1
        else:
            self.steps += 1

    def after_step(self, averaged: Set[Tensor], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Average those parameters of `optimizer` if a period is over; its post-step hook."""
        if self.steps and self.steps % self.period == 0:
            held = (p for group in optimizer.param_groups for p in group["params"])
            average((p for p in held if p in averaged), self.everybody)

    def settle(self, parameters: Iterable[Tensor]) -> None:
        """Average parameters if there were local steps since the last average."""
        if self.steps % self.period and self.steps != self._settled:
            average(parameters, self.everybody)
            self._settled = self.steps


def post_local_sgd(state: LocalSGD, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """DDP's communication hook: the mean over all ranks, later over those nearby."""
    if bucket.index() == 0:
        state.next_backward()
    gradients, group = bucket.buffer(), state.group
    if group.size() == 1:
        future: Future[Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future
    work: Any = dist.all_reduce(gradients.div_(group.size()), group=group, async_op=True)
    mean: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return mean


HookFunction = Callable[[Any, Any], Future[Tensor]]
"""`(state, bucket)`, as DDP calls it."""
LOCAL_SGD = "post_local_sgd"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWER = "powersgd"  # torch's batched variant fails an assert of its own in 2.13
_NAMES = (*DTYPES, _POWER, LOCAL_SGD)


class CommHook(NamedTuple):
    """The arguments of DDP's `register_comm_hook`."""

    state: Any
    function: HookFunction


@dataclass(frozen=True)
class HookPlan:
    """The communication hook that the user has chosen."""

    spelled: str
    """As in the configuration, or the name of a function."""
    names: tuple[str, ...] = ()
    """Of named hooks, the outermost first: "fp16(powersgd)" has "fp16" and "powersgd"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the innermost named hook's state."""
    custom: CommHook | None = field(default=None, repr=False)
    """A function of the user's, with its state."""

    @property
    def is_local_sgd(self) -> bool:
        """Whether ranks take steps of their own, between which parameters are averaged."""
        return self.names[-1:] == (LOCAL_SGD,)

    def build(self, group: dist.ProcessGroup) -> CommHook:
        """The hook for the ranks of `group`, with a new state."""
        if self.custom is not None:
            return self.custom
        *wrappers, name = self.names
        state: Any = group
        if name in DTYPES:
            function = reduced_in(DTYPES[name])
        elif name == _POWER:
            state, function = power.PowerSGDState(group, **self.options), power.powerSGD_hook
        else:
            state, function = LocalSGD(group, **self.options), post_local_sgd
        for wrapper in reversed(wrappers):
            function = cast_around(DTYPES[wrapper], function)
        return CommHook(state, function)


def reduced_in(dtype: torch.dtype) -> HookFunction:
    """A hook that averages gradients in `dtype`; its state is the process group.

    It divides before it sums, as DDP does, so that a sum in half precision does not overflow.
    """

    def reduce(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        gradients = bucket.buffer()
        message = gradients.to(dtype).div_(dist.get_world_size(group))
        work: Any = dist.all_reduce(message, group=group, async_op=True)
        done: Future[Tensor] = work.get_future().then(lambda future: gradients.copy_(future.value()[0]))
        return done

    return reduce


def cast_around(dtype: torch.dtype, inner: HookFunction) -> HookFunction:
    """A hook that passes its gradients to `inner` in `dtype`."""

    def cast(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        gradients = bucket.buffer()
        bucket.set_buffer(gradients.to(dtype))
        return inner(state, bucket).then(lambda future: gradients.copy_(future.value()))

    return cast


def plan_comm_hook(config: DDPConfig, reduce_dtype: torch.dtype | None) -> HookPlan | None:
    """The communication hook of a configuration; None leaves DDP's own all-reduce."""
    hook, options, period = config.comm_hook, dict(config.comm_hook_options or {}), config.averaging_period
    names: tuple[str, ...] = ()
    spelled = repr(hook)
    if isinstance(hook, str):
        names = _parse(hook)
    elif callable(hook):
        spelled = str(getattr(hook, "__qualname__", type(hook).__name__))
    elif hook is not None:
        raise ParallelismTypeError(f"comm_hook must be a name or a function, not {type(hook).__name__}.")
    if hook is not None and reduce_dtype in DTYPES.values():
        raise ParallelismValueError(
            f"comm_hook={spelled} and mixed_precision (reduce_dtype {reduce_dtype}) both determine the dtype "
            "in which gradients are sent; give only one."
        )
    name = names[-1] if names else None
    _check_options(name, options)
    if config.comm_hook_state is not None and (hook is None or names):
        raise ParallelismValueError(
            "comm_hook_state is for a comm_hook that is a function; a named one takes comm_hook_options."
        )
    if period is not None and (not isinstance(period, int) or period < 1):
        raise ParallelismValueError(f"averaging_period must be a positive number of steps, not {period!r}.")
    if name == LOCAL_SGD:
        if period is None:
            raise ParallelismValueError(
                "comm_hook='post_local_sgd' needs averaging_period, the number of local steps between two "
                "averages of the parameters."
            )
        options["averaging_period"] = period
    if hook is None:
        return None
    custom = None if isinstance(hook, str) else CommHook(config.comm_hook_state, hook)
    return HookPlan(spelled, names, options, custom)


def _parse(spec: str) -> tuple[str, ...]:
    """The names in "fp16(powersgd)", the outermost first."""
    found = re.fullmatch(r"((?:\w+\()*)(\w+)(\)*)", spec.replace(" ", ""))
    names = (*found[1].split("(")[:-1], found[2]) if found else (spec,)
    if found is None or len(found[3]) != len(names) - 1:
        raise ParallelismValueError(f"comm_hook={spec!r} must have the form 'fp16' or 'fp16(powersgd)'.")
    if unknown := [name for name in names if name not in _NAMES]:
        raise ParallelismValueError(
            f"There is no comm_hook {unknown[0]!r}. Valid names: {', '.join(_NAMES)}, and "
            f"{' and '.join(f'{outer}(...)' for outer in DTYPES)} around another."
            f"{near_miss(unknown[0], _NAMES)}"
        )
    if wrong := [name for name in names[:-1] if name not in DTYPES]:
        raise ParallelismValueError(f"{wrong[0]!r} in comm_hook={spec!r} cannot be put around another hook.")
    return names


def _check_options(name: str | None, options: Mapping[str, Any]) -> None:
    state: Any = {_POWER: power.PowerSGDState, LOCAL_SGD: LocalSGD}.get(name or "")
    known = list(inspect.signature(state).parameters)[1:] if state else []
    if unknown := [key for key in options if key not in known or key == "averaging_period"]:
        raise ParallelismValueError(
            f"comm_hook_options has {', '.join(map(repr, unknown))}, which "
            + (f"comm_hook={name!r} does not take." if name else "has no effect without a named comm_hook.")
            + (f" It takes {', '.join(known)}." if known else "")
        )
    if name == _POWER:
        try:
            power.PowerSGDState(None, **options)
        except ValueError as error:
            raise ParallelismValueError(f"comm_hook={name!r}: {error}") from None
