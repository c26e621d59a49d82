"""What DDP ignores: new parameters, forwards that change them, gradients that only the caller gets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from composer_dist import _torch
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.distributed.training.changes import Before, Watch
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.tensors.nested import tensors_in
from composer_dist.wording import listed


class Checks:
    """Looks at a replicated model before and after each forward for training.

    Args:
        parameters: by name, those whose gradients are averaged while they are trainable.
        ignored: tensors that are left to each rank.
        group: the ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ignored: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        self._parameters, self._group = parameters, group
        self._known = {id(tensor) for tensor in (*parameters.values(), *ignored)}
        self._watch = Watch()
        self._before: Before[str] | None = None
        self._changeable: set[str] | None = None
        """Parameters that forward may change, because all ranks do it alike; None before the first step."""
        self._backward = -1
        self._leaves = WeakTensorKeyDictionary()
        """The handles of the hooks on outputs that are leaves."""

    def before_forward(self, model: nn.Module) -> None:
        """A forward begins.

        Raises:
            ParallelismRuntimeError: naming a trainable parameter that the preparation has not seen.
        """
        for name, parameter in model.named_parameters() if torch.is_grad_enabled() else ():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise ParallelismRuntimeError(
                    f"{name} was put into the model after the preparation, so its gradient would not be "
                    "averaged over the ranks. Put it in before, or freeze it."
                )
        self._before = self._watch.before(model, self._parameters)

    def after_forward(self, output: Any) -> None:
        """The forward has ended; `output` is None if it has raised.

        Raises:
            ParallelismRuntimeError: naming the parameters that it has changed.
        """
        before, self._before = self._before, None
        if before is None or output is None:
            return
        transforms = _torch.is_transforming()  # of torch.func: they hide tensors, and inputs get gradients
        first = self._changeable is None and not transforms
        self._refuse_changed(before.changed(self._parameters), first)
        if transforms:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                _torch.hook_output(tensor, self._refuse_grad, self._leaves)

    def _refuse_changed(self, changed: Iterable[str], first: bool = False) -> None:
        """Refuse changes, unless all ranks have made them alike in the first step."""
        if first and torch.is_grad_enabled():
            mine = [(name, fingerprint(self._parameters[name])) for name in changed]
            everywhere: list[Any] = [None] * dist.get_world_size(self._group)
            try:
                dist.all_gather_object(everywhere, mine, group=self._group)
            except RuntimeError as error:
                raise reason_of_loss(error, "a DDP forward") or error from None
            alike = all(one == everywhere[0] for one in everywhere)
            self._changeable = {name for name, _ in mine} if alike else set()
            changed = sorted({name for one in everywhere for name, _ in one})
        if refused := [name for name in changed if name not in (self._changeable or ())]:
            raise ParallelismRuntimeError(
                f"The forward of the model changed {listed(refused)} in place, and not in the same way on "
                "all ranks in the first step. Make what forward updates a buffer (register_buffer), which "
                "follows rank 0, or update it from the first step on with the same values on all ranks."
            )

    def _refuse_grad(self, gradient: torch.Tensor) -> None:
        """Refuse `torch.autograd.grad` of parameters, whose gradients nobody would average."""
        if self._backward == _torch.current_backward():
            return
        self._backward = _torch.current_backward()
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        nodes = (get_gradient_edge(parameter).node for parameter in trainable.values())
        if (index := _torch.wanted_by_caller(nodes)) is not None:
            raise ParallelismRuntimeError(
                f"torch.autograd.grad returns this rank's gradient of {list(trainable)[index]}, which DDP "
                "does not average; call loss.backward() and read .grad."
            )
