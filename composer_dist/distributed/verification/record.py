"""Keeps what the units of a model get and return in a forward and backward."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.distributed.forwards import is_cache
from composer_dist.structure.structure import read_structure
from composer_dist.tensors.nested import named_tensors, replace_tensors, tensors_in


@dataclass
class UnitCall:
    """What a unit of the prepared model got and returned in one call."""

    inputs: dict[str, Tensor]
    input_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """None until backward; of those inputs that need one."""
    outputs: list[Tensor] = field(default_factory=list)
    output_gradients: dict[int, Tensor | None] = field(default_factory=dict)
    """Of those outputs that have a history."""


@dataclass
class CallRecorder:
    """Keeps what units get and return."""

    model: nn.Module
    names: Sequence[str]
    calls: defaultdict[str, list[UnitCall]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, all calls are kept; their gradients come afterwards, in backward."""
        modules, handles = read_structure(self.model).modules, []
        for name in self.names:
            before = torch.compiler.disable(partial(self._before, name))
            after = torch.compiler.disable(partial(self._after, name))
            one = modules[name]
            handles.append(one.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(one.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = dict(named_tensors(arguments(args, kwargs)))
        call = UnitCall({key: one.detach().clone() for key, one in found.items()})
        self.calls[name].append(call)

        def viewed(key: str, value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                value = value.view_as(value)  # whose gradient is that of this use of the tensor
                call.input_gradients[key] = None
                value.register_hook(partial(_keep, call.input_gradients, key))
            elif type(value) is tuple:
                value = tuple(viewed(f"{key}.{index}", one) for index, one in enumerate(value))
            return value

        args = tuple(viewed(str(index), one) for index, one in enumerate(args))
        return args, {key: viewed(key, one) for key, one in kwargs.items()}

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call, given = self.calls[name][-1], set(map(id, tensors_in([args, kwargs])))
        if any(id(one) in given for one in tensors_in(output)):  # the gradient of the input counts its uses
            output = replace_tensors(lambda one: one.view_as(one) if id(one) in given else one, output)
        for index, one in enumerate(tensors_in(output)):
            call.outputs.append(one.detach().clone())
            if one.requires_grad:
                call.output_gradients[index] = None
                one.register_hook(partial(_keep, call.output_gradients, index))
        return output


def _keep(held: dict[Any, Any], key: Any, gradient: Tensor) -> None:
    held[key] = gradient.detach().clone()


def arguments(args: Any, kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """Arguments by number and name, without caches."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    return {key: None if is_cache(value) else value for key, value in named.items()}
