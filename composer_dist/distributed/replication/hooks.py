"""How DDP's gradients travel: communication hooks by name, for any backend and device; post-local SGD.

The names stand for torch's own hooks (torch.distributed.algorithms.ddp_comm_hooks). Two are written
here instead: DDP rejects torch's bfloat16 hooks by name off NCCL, though gloo can run the same, and
torch's post-local SGD asks CUDA for the ranks of a host. Post-local SGD: Lin, Stich, Patel and Jaggi,
"Don't Use Large Mini-Batches, Use Local SGD" (2018), arXiv:1808.07217.
"""

# No deferred annotations: DDP compares a hook's with the types themselves.

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.futures import Future
from torch.optim import Optimizer

from composer_dist.config.mesh import per_host
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed.training.averaging import average
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import near_miss


class LocalSGD:
    """The state of the hook; `after_step` belongs behind every optimizer's step.

    Args:
        group: all ranks that hold the model.
        averaging_period: local steps between two averages of the parameters.
        start_localSGD_iter: synchronized backward passes before the first local one.
        group_size: ranks that still average their gradients in each local step; it must divide the world
            size. None is the ranks of one host, as the launcher counts them.
        post_local_gradient_allreduce: False lets every rank step by itself.

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
        self._near, _ = (group, []) if size == world else dist.new_subgroups(group_size=size)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks whose gradients are averaged at present."""
        return self._near if self.steps else self.everybody

    def next_backward(self) -> None:
        """Count a synchronized backward pass."""
        if self.left:
            self.left -= 1
        else:
            self.steps += 1

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Average what `optimizer` moves, if a period is over; registered as its post-step hook."""
        if self.steps and self.steps % self.period == 0:
            average((p for group in optimizer.param_groups for p in group["params"]), self.everybody)


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
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_POWER = "powersgd"  # torch's batched variant fails an assert of its own in 2.13
_NAMES = (*_DTYPES, _POWER, LOCAL_SGD)


class CommHook(NamedTuple):
    """What DDP's `register_comm_hook` takes."""

    state: Any
    function: HookFunction


def reduced_in(dtype: torch.dtype) -> HookFunction:
    """A hook whose state is the process group: gradients are averaged in `dtype` and come back in their own.

    They are divided first, as DDP does, so that a sum in half precision does not overflow.
    """

    def reduce(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        gradients = bucket.buffer()
        message = gradients.to(dtype).div_(dist.get_world_size(group))
        work: Any = dist.all_reduce(message, group=group, async_op=True)
        done: Future[Tensor] = work.get_future().then(lambda future: gradients.copy_(future.value()[0]))
        return done

    return reduce


def cast_around(dtype: torch.dtype, inner: HookFunction) -> HookFunction:
    """A hook that hands its gradients to another one in `dtype`."""

    def cast(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        gradients = bucket.buffer()
        bucket.set_buffer(gradients.to(dtype))
        return inner(state, bucket).then(lambda future: gradients.copy_(future.value()))

    return cast


def innermost(config: DDPConfig) -> str | None:
    """The name of the hook that communicates: "powersgd" in "fp16(powersgd)"; None without a named one."""
    return _parse(config.comm_hook)[-1] if isinstance(config.comm_hook, str) else None


def check_comm_hook(config: DDPConfig, reduce_dtype: torch.dtype | None) -> tuple[str, ...]:
    """Refuse hooks that do not exist, and options that they do not have.

    Args:
        config: names the hook.
        reduce_dtype: what precision wants gradients reduced in.

    Returns:
        Warnings: options that are ignored.

    Raises:
        ParallelismValueError: an unknown name or option; hook and precision that both say how gradients
            travel; post-local SGD without a period.
        ParallelismTypeError: neither a name nor a function.
    """
    hook, name = config.comm_hook, innermost(config)
    if not (hook is None or isinstance(hook, str) or callable(hook)):
        raise ParallelismTypeError(f"comm_hook is a name or a function, not {type(hook).__name__}.")
    if hook is not None and reduce_dtype in _DTYPES.values():
        raise ParallelismValueError(
            f"comm_hook={spell(config)} and mixed_precision (reduce_dtype {reduce_dtype}) both say how "
            "gradients travel; give one."
        )
    _check_options(name, config.comm_hook_options or {})
    if config.comm_hook_state is not None and (hook is None or name is not None):
        raise ParallelismValueError(
            "comm_hook_state is for a comm_hook that is a function; a named one makes its own from "
            "comm_hook_options."
        )
    period = config.averaging_period
    if period is not None and (not isinstance(period, int) or period < 1):
        raise ParallelismValueError(f"averaging_period is a positive number of steps, not {period!r}.")
    if name == LOCAL_SGD and period is None:
        raise ParallelismValueError(
            "comm_hook='post_local_sgd' needs averaging_period: the local steps after which the ranks' "
            "parameters are averaged."
        )
    if name != LOCAL_SGD and period is not None:
        return (
            f"averaging_period={period} is ignored: only comm_hook='post_local_sgd' takes local steps after "
            "which parameters would have to be averaged.",
        )
    return ()


def build_comm_hook(
    config: DDPConfig, reduce_dtype: torch.dtype | None, group: dist.ProcessGroup
) -> CommHook | None:
    """The hook, with a fresh state; None leaves DDP's own all-reduce.

    Args:
        config: has passed `check_comm_hook`.
        reduce_dtype: what gradients are averaged in where no hook is named; None is their own dtype.
        group: the ranks.
    """
    if config.comm_hook is None:
        return CommHook(group, reduced_in(reduce_dtype)) if reduce_dtype else None
    if not isinstance(config.comm_hook, str):
        return CommHook(config.comm_hook_state, config.comm_hook)
    *wrappers, name = _parse(config.comm_hook)
    options = config.comm_hook_options or {}
    state: Any = group
    if name in _DTYPES:
        function = reduced_in(_DTYPES[name])
    elif name == _POWER:
        state, function = power.PowerSGDState(group, **options), power.powerSGD_hook
    else:
        assert config.averaging_period is not None
        state = LocalSGD(group, config.averaging_period, **options)
        function = post_local_sgd
    for wrapper in reversed(wrappers):
        function = cast_around(_DTYPES[wrapper], function)
    return CommHook(state, function)


def spell(config: DDPConfig) -> str:
    """The hook as its author would write it; the same on every rank."""
    hook = config.comm_hook
    if hook is None or isinstance(hook, str):
        return repr(hook)
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _parse(spec: str) -> list[str]:
    """The names in a spec, outermost first: "fp16(powersgd)" has "fp16" and "powersgd"."""
    found = re.fullmatch(r"((?:\w+\()*)(\w+)(\)*)", spec.replace(" ", ""))
    names = [*found[1].split("(")[:-1], found[2]] if found else [spec]
    if found is None or len(found[3]) != len(names) - 1:
        raise ParallelismValueError(f"comm_hook={spec!r} is not written as 'fp16' or 'fp16(powersgd)'.")
    for name in names:
        if name not in _NAMES:
            raise ParallelismValueError(
                f"There is no comm_hook {name!r}. Valid names: {', '.join(_NAMES)}, and "
                f"{' and '.join(f'{outer}(...)' for outer in _DTYPES)} around another."
                f"{near_miss(name, _NAMES)}"
            )
    if wrong := [name for name in names[:-1] if name not in _DTYPES]:
        raise ParallelismValueError(f"{wrong[0]!r} in comm_hook={spec!r} cannot be put around another hook.")
    return names


def _check_options(name: str | None, options: Mapping[str, Any]) -> None:
    """Options by the signature of what they are handed to, and by its own checks."""
    if name == _POWER:
        known = list(inspect.signature(power.PowerSGDState).parameters)[1:]
    elif name == LOCAL_SGD:
        known = list(inspect.signature(LocalSGD).parameters)[2:]
    else:
        known = []
    if unknown := [key for key in options if key not in known]:
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
