"""DDP in place, and the synchronization of gradients in backward."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# Data parallelism by hooks, with DDP's reducer, and the class that it adds to a module's. Since torch 2.0.
from torch.distributed._composable.replicate import DDP as ComposableDDP
from torch.distributed._composable.replicate import replicate as replicate
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from composer_dist._torch.backward import is_transforming
from composer_dist._torch.sharding import fsdp_param_groups


def is_replicated(module: nn.Module) -> bool:
    """Whether composable replicate was applied to `module`."""
    return isinstance(module, ComposableDDP)


def serve_in_place(model: nn.Module, ddp: DistributedDataParallel) -> None:
    """Make composable replicate's hooks, which the first call adds, run `ddp` around the forward of `model`.

    Otherwise replicate creates its DDP in the first forward, from a bare ParameterList without buffers,
    sparse embeddings and names. The fields of its state are unchanged since torch 2.2.
    """
    if not is_replicated(model):
        names = type(model).__name__, type(model).__qualname__
        replicate(model)
        # transformers writes the name into configurations, without the prefix of FSDP2, but with that of DDP
        type(model).__name__, type(model).__qualname__ = names
    state: Any = replicate.state(model)
    state.module, state.has_initialized = model, True
    state._init_args, state._init_kwargs = (), {}
    state._ddp = ddp


def register_late_hooks(model: nn.Module) -> None:
    """Register the hooks that the user has since given to composable replicate's `register_comm_hook`."""
    replicate.state(model).register_comm_hook()


class InPlaceDDP(DistributedDataParallel):
    """DDP that composable replicate's hooks call; subclasses define what happens around its steps.

    Like DDP's own forward, the hooks call `_pre_forward` and `_post_forward`. Since torch 2.0.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # The end of a gloo group waits for its threads, which may wait for the interpreter. The group's own
        # destructor lets them have it, the reducer's does not: so the reducer must not be the last holder.
        for holder in (self.reducer, self.logger):
            finalize(holder, partial(id, self.process_group))

    def before_forward(self) -> None:
        """Called when a forward starts."""

    def on_error(self, error: RuntimeError) -> None:
        """Called when DDP cannot start a forward; may raise another error."""

    def broadcast_due(self) -> None:
        """Broadcast the buffers now if the next forward would; a collective."""
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]

    def wants_backward(self, output: Any) -> bool:
        """Whether the reducer averages the next backward; called after a forward that synchronizes."""
        raise NotImplementedError

    is_nested = False
    """Whether the current forward is inside another one of the same module, which does all of this."""

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_nested:
            return args, kwargs
        self.before_forward()
        if not self.modules_buffers:  # a forward may have made some since
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        transforms = is_transforming()  # of torch.func, in which tensors have no memory to send from
        try:
            with temporarily_clear_interpreter_stack() if transforms else nullcontext():
                return super()._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.on_error(error)
            raise

    def _post_forward(self, output: Any) -> Any:
        if self.is_nested:
            return output
        sync = self.require_backward_grad_sync and torch.is_grad_enabled()
        self.require_backward_grad_sync = ready = sync and self.wants_backward(output)
        # With a static graph, the first output always starts the reducer in backward.
        if ready or not self.static_graph or self._static_graph_delay_allreduce_enqueued:
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = sync  # broadcast buffers in the next forward
        return output


@contextmanager
def ddp_ignores(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Inside, a new DDP of `model` ignores the parameters and buffers with these names.

    DDP reads the names from this attribute since torch 1.7. In one place it joins module and parameter by a
    dot even for the root's own, so these have two names.
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


@lru_cache(1000)  # replicate makes a class for each module
def synchronizes(kind: type[Any]) -> bool:
    """Whether modules of a class have flags for whether backward synchronizes their gradients."""
    return issubclass(kind, (FSDPModule, DistributedDataParallel, ComposableDDP))


def gradient_sync_flags(module: nn.Module) -> list[tuple[object, str, bool]]:
    """The flags of `module` itself for whether backward synchronizes its gradients.

    FSDP2 and composable replicate have public functions to set these, but not to read them.

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
