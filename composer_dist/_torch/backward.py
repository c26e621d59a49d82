"""Backward passes: what runs in them and after them, their errors, and autograd's nodes."""

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from composer_dist.errors import ParallelismError, ParallelismRuntimeError

Owner = TypeVar("Owner")


def wanted_by_caller(nodes: Iterable[Node]) -> int | None:
    """The index of the first leaf whose gradient `torch.autograd.grad` returns from the present backward.

    Args:
        nodes: the leaves' `AccumulateGrad`. Inside such a call torch raises an error for them. Since
            torch 2.1.
    """
    for index, node in enumerate(nodes):
        try:
            torch._C._will_engine_execute_node(node)
        except RuntimeError:
            return index
    return None


def current_backward() -> int:
    """The number of this thread's current backward pass; -1 if there is none. Since torch 2.1."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once at the end of the current backward pass, before it returns.

    DDP and FSDP2 finish their gradients this way. Callbacks run in the order in which they were queued, on
    the caller's streams. Since torch 1.0; there is no public function.
    """
    Variable._execution_engine.queue_callback(callback)


_running: list[bool] = []
"""Of each backward that runs in the process, whether `torch.autograd.grad` has called it."""
_leaves: list[Callable[[torch.Tensor], torch.Tensor]] = []
_starts: list[Callable[[], None]] = []
_ends: list[Callable[[bool], None]] = []
_explanations: list[Callable[[RuntimeError], str | ParallelismError | None]] = []
_failures: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def at_start_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` before every backward pass of the process, as `explain_in_backward` does.

    Also before those that the compiler traces; what the callback computes is not part of the trace.
    """
    if callback not in _starts:
        _starts.append(callback)
    _watch_backward()


def after_every_backward(callback: Callable[[bool], None]) -> None:
    """Run `callback(failed)` after backward passes of the process, once none of them runs any more."""
    if callback not in _ends:
        _ends.append(callback)
    _watch_backward()


def replace_inputs(leaf_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have `backward(inputs=...)` and `grad` take `leaf_of(input)`, where there is `explain_in_backward`."""
    if leaf_of not in _leaves:
        _leaves.append(leaf_of)


def explain_in_backward(explain: Callable[[RuntimeError], str | ParallelismError | None]) -> None:
    """Have every backward raise what `explain` returns for its error, if it is not None.

    For all backwards of the process, by the function through which torch starts each. Since torch 2.1.

    Args:
        explain: returns a message to show with torch's error, or an error to raise instead.
    """
    if explain not in _explanations:
        _explanations.append(explain)
    _watch_backward()


def after_failed_backward(owner: Owner, callback: Callable[[Owner], None]) -> None:
    """Run `callback(owner)` after a backward of the process that raises while no other one runs."""
    _failures[owner] = callback
    _watch_backward()


@functools.cache
def _watch_backward() -> None:
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            for callback in _starts:
                callback()
        for leaf_of in _leaves if len(args) > 4 else ():
            args = (*args[:4], tuple(map(leaf_of, args[4])), *args[5:])
        is_grad = not kwargs.get("accumulate_grad", True)
        _running.append(is_grad)
        failed = True
        try:
            result = run(*args, **kwargs)
            failed = False
            return result
        except BaseException as error:
            # One around this one raises too; one in another thread may be about to end well.
            for owner, forget in list(_failures.items()) if len(_running) == 1 else ():
                forget(owner)
            if isinstance(error, RuntimeError):
                for reason in (explain(error) for explain in _explanations):
                    if isinstance(reason, ParallelismError):
                        raise reason from None
                    if reason is not None:
                        raise ParallelismRuntimeError(reason) from error
            raise
        finally:
            _running.remove(is_grad)
            for end in _ends if not _running else ():
                end(failed)

    # torch.compiler, which replaces both for a while, restores the first one under both names.
    torch.autograd.graph._engine_run_backward = watched
    setattr(torch.autograd, "_engine_run_backward", watched)  # noqa: B010 - mypy knows no such export


def is_calling_grad() -> bool:
    """Whether a `torch.autograd.grad` runs in the process; in processes with `explain_in_backward`."""
    return any(_running)


def is_transforming() -> bool:
    """Whether a transform of torch.func (vmap, grad) is at work. Since torch 2.5."""
    return torch._C._are_functorch_transforms_active()


def next_sequence_number() -> int:
    """The sequence number that the next autograd node of this thread gets. Since torch 2.1."""
    return torch._C._autograd._get_sequence_nr()


def sequence_number(tensor: torch.Tensor) -> int:
    """The sequence number of the autograd node that has made `tensor`, -1 of a leaf. Since torch 1.9."""
    node = tensor.grad_fn
    return -1 if node is None else node._sequence_nr()
