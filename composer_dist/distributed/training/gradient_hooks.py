"""The user's gradient hooks of parameters whose gradients are averaged over the ranks.

Autograd calls them with this rank's gradient, where one process has the whole batch's. So they run after the
averaging: what clips, normalizes, records or steps sees the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from composer_dist import _torch
from composer_dist.errors import ParallelismRuntimeError

Hook = Callable[[Tensor], Any]


class Averager(Protocol):
    """What averages the gradients."""

    def begin(self) -> None:
        """A gradient has arrived in the current backward."""

    def averages(self, parameter: Tensor) -> bool:
        """Whether the current backward averages the gradient of `parameter`, which is in no other's sum."""


class GradientHooks:
    """Postpones the hooks of parameters until `finish`.

    In a backward without synchronization they run at once; those that change a gradient must be linear then,
    so that the mean of their results is their result for the mean.

    Args:
        averaging: must call `begin` and `finish`.
        names: the parameters by name.
        own: the handles of hooks that are not the user's.
    """

    def __init__(
        self, averaging: Averager, names: Mapping[str, Tensor], own: Collection[RemovableHandle]
    ) -> None:
        self._averaging, self._names, self._own = averaging, names, own
        self._before: dict[Tensor, Tensor | None] = {}
        """The gradients to which the current backward adds what it averages."""
        self._postponed: set[Tensor] = set()
        if names:
            _all.add(self)
            _torch.at_start_of_backward(_postpone_all)

    def postpone(self) -> None:
        """Have the hooks that parameters have by now wait for the averaging."""
        own = {handle.id for handle in self._own}
        for name, parameter in self._names.items():
            for hooks, run in zip(
                _torch.hooks_by_id(parameter), (self._tensor, self._accumulated), strict=True
            ):
                for key, hook in hooks.items():
                    if key not in own and not isinstance(hook, _Postponed):
                        hooks[key] = _Postponed(hook, partial(_run, WeakMethod(run), name, hook))

    def release(self) -> None:
        """Give the hooks back to autograd."""
        _all.discard(self)
        for parameter in self._names.values():
            for hooks in _torch.hooks_by_id(parameter):
                hooks.update({key: one.hook for key, one in hooks.items() if isinstance(one, _Postponed)})

    def begin(self) -> None:
        """Must be called when the first gradient of a backward arrives."""
        self._postponed.clear()
        self._before.clear()
        for parameter in self._names.values():
            hooked = any(map(_postponed, _torch.hooks_by_id(parameter)))
            if hooked and self._averaging.averages(parameter):
                self._before[parameter] = None if parameter.grad is None else parameter.grad.clone()

    def _tensor(self, name: str, hook: Hook, gradient: Tensor) -> Any:
        """Instead of a hook from `register_hook`."""
        self._averaging.begin()
        parameter = self._names[name]
        if parameter in self._before:
            self._postponed.add(parameter)
            return None
        version = _torch.version(gradient)
        result = hook(gradient)
        if _torch.version(gradient) != version or (
            result is not None and not _is_linear(hook, gradient, result)
        ):
            self._refuse(name)
        return result

    def _accumulated(self, name: str, hook: Hook, parameter: Tensor) -> None:
        """Instead of a hook from `register_post_accumulate_grad_hook`."""
        self._averaging.begin()
        if parameter in self._before:
            self._postponed.add(parameter)
            return
        gradient = parameter.grad
        version = gradient is not None and _torch.version(gradient)
        hook(parameter)
        if parameter.grad is not gradient or (gradient is not None and _torch.version(gradient) != version):
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise ParallelismRuntimeError(
            f"A gradient hook of {name} changes a gradient that is not averaged over the ranks yet, because "
            "this backward, or one before it, was inside of no_sync. Leave out no_sync (in the Trainer, "
            "microbatches), or change parameter.grad after the last backward."
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Run the hooks: the gradients are the means over the ranks now."""
        for parameter, before in self._before.items():
            if parameter.grad is None:
                continue
            mean = parameter.grad.clone() if before is None else parameter.grad - before
            if parameter not in self._postponed and (before is not None and not mean.to_dense().any()):
                continue  # no rank has used it
            of_tensor, accumulated = map(_postponed, _torch.hooks_by_id(parameter))
            version, gradient = _torch.version(mean), mean
            for hook in of_tensor:
                result = hook(gradient)
                gradient = gradient if result is None else result
            if gradient is not mean or _torch.version(mean) != version:
                gradient = gradient if before is None else before + gradient
                if parameter.grad.is_sparse or gradient.is_sparse:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)
            for hook in accumulated:
                hook(parameter)
        self._before.clear()


class _Postponed:
    """Stands in the place of a hook, so that the hook's handle removes it."""

    def __init__(self, hook: Hook, run: Hook) -> None:
        self.hook, self._run = hook, run

    def __call__(self, tensor: Tensor) -> Any:
        return self._run(tensor)


def _run(method: WeakMethod[Callable[..., Any]], name: str, hook: Hook, tensor: Tensor) -> Any:
    """Postpone a hook while the model exists, which a reducer's hold on the parameter must not prolong."""
    postpone = method()
    return hook(tensor) if postpone is None else postpone(name, hook, tensor)


def _postponed(hooks: Mapping[int, Hook]) -> list[Hook]:
    return [one.hook for one in hooks.values() if isinstance(one, _Postponed)]


_all: WeakSet[GradientHooks] = WeakSet()


def _postpone_all() -> None:
    for hooks in list(_all):
        hooks.postpone()


def _is_linear(hook: Hook, gradient: Tensor, result: Tensor) -> bool:
    """Whether a hook has the doubled negative result for the doubled negative gradient, and adds up."""
    if gradient.is_sparse:
        return False
    some = gradient.flatten().clone()
    some[::2] = 0
    parts = [hook(part) for part in (some.view_as(gradient), gradient - some.view_as(gradient))]
    pairs = (hook(-2 * gradient), -2 * result), (parts[0] + parts[1], result)
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)
