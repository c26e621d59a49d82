"""DDP in place, and gradients that are synchronized in backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

# Data parallelism by hooks, over DDP's reducer, and the class that it mixes into a module's own.
# Since torch 2.0.
from torch.distributed._composable.replicate import DDP as ComposableDDP
from torch.distributed._composable.replicate import replicate as replicate
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from composer_dist._torch.sharding import fsdp_param_groups


def is_replicated(module: nn.Module) -> bool:
    """Whether composable replicate has been at work on `module`."""
    return isinstance(module, ComposableDDP)


def serve_in_place(model: nn.Module, ddp: DistributedDataParallel) -> None:
    """Let composable replicate's hooks, set at the first call, run `ddp` around the forward of `model`.

    By itself replicate makes its DDP in the first forward, and over a bare ParameterList, which knows
    neither buffers nor sparse embeddings nor names. The state's fields are the same since torch 2.2.
    """
    if not is_replicated(model):
        replicate(model)
    state: Any = replicate.state(model)
    state.module, state.has_initialized = model, True
    state._init_args, state._init_kwargs = (), {}
    state._ddp = ddp


def register_late_hooks(model: nn.Module) -> None:
    """Register what the user has given to composable replicate's `register_comm_hook` since the start."""
    replicate.state(model).register_comm_hook()


class InPlaceDDP(DistributedDataParallel):
    """DDP that composable replicate's hooks call; a subclass says what happens around its steps.

    The hooks call what DDP's own forward calls, `_pre_forward` and `_post_forward`. Since torch 2.0.
    """

    def before_forward(self) -> None:
        """A forward begins."""

    def on_error(self, error: RuntimeError) -> None:
        """DDP refuses to begin a forward; may raise an error of its own."""

    def wants_backward(self, output: Any) -> bool:
        """Whether the reducer is to average the next backward; asked after a forward that synchronizes."""
        raise NotImplementedError

    is_nested = False
    """Whether the present forward runs inside of another one of the same module, which settles all."""

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_nested:
            return args, kwargs
        self.before_forward()
        try:
            return super()._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.on_error(error)
            raise

    def _post_forward(self, output: Any) -> Any:
        if self.is_nested:
            return output
        sync = self.require_backward_grad_sync and torch.is_grad_enabled()
        self.require_backward_grad_sync = ready = sync and self.wants_backward(output)
        # Of a static graph the first output starts the reducer in backward, asked for or not.
        if ready or not self.static_graph or self._static_graph_delay_allreduce_enqueued:
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = sync  # broadcast buffers in the next forward
        return output


@contextmanager
def ddp_ignores(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Inside, a DDP that is built around `model` leaves out the parameters and buffers called so.

    The attribute is how DDP is told, and has been since torch 1.7. It joins module and parameter by a dot
    in one place even for the root's own, so those are named both ways.
    """
    key = "_ddp_params_and_buffers_to_ignore"
    before = vars(model).get(key)
    vars(model)[key] = [*names, *(f".{name}" for name in names if "." not in name)]
    try:
        yield
    finally:
        del vars(model)[key]
        if before is not None:
            vars(model)[key] = before


def gradient_sync_flags(module: nn.Module) -> list[tuple[object, str, bool]]:
    """Where `module` itself keeps whether backward synchronizes its gradients.

    FSDP2 and composable replicate have a setter for it but no public way to read it back.

    Returns:
        (owner, attribute, the value that means yes), for FSDP2, DDP and composable replicate.
    """
    flags: list[tuple[object, str, bool]] = []
    if isinstance(module, FSDPModule):
        for group in fsdp_param_groups(module):
            flags += [(group, "reduce_grads", True), (group, "all_reduce_grads", True)]
    if isinstance(module, DistributedDataParallel):
        flags.append((module, "require_backward_grad_sync", True))
    if isinstance(module, ComposableDDP):
        flags.append((replicate.state(module), "_no_sync", False))
    return flags


def current_backward() -> int:
    """The number of the backward pass that this thread is in, -1 outside. Since torch 2.1."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once when the current backward pass is over, before it returns.

    DDP and FSDP2 finish their gradients this way; callbacks run in the order in which they were
    queued, on the streams of the caller. Since torch 1.0; there is no public name for it.
    """
    Variable._execution_engine.queue_callback(callback)
