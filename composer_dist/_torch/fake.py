"""Tensors without values, which know their shapes and devices."""

import weakref
from typing import Any

import torch


def fake_mode() -> Any:
    """A mode in which operators make tensors without values, which know their shapes and devices."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values(error: BaseException) -> bool:
    """Whether an operator could not do without the values of tensors."""
    from torch._subclasses import fake_tensor as fake

    kinds = fake.DataDependentOutputException, fake.DynamicOutputShapeException
    return isinstance(error, (*kinds, fake.UnsupportedOperatorException))


class Unvalued:
    """Runs operators on tensors of `fake_mode`, also those that need values to decide.

    What asks whether all elements, or any, are true finds true and false: masks that hide nothing, and
    numbers that are finite. A grouped matrix product, which torch only knows in bfloat16 there, has its
    inputs' dtype.
    """

    def __init__(self) -> None:
        self._any: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return args[0].untyped_storage() not in self._any
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            low = [one.to(torch.bfloat16) for one in args[:2]]
            return func(*low, *args[2:], **kwargs).to(args[0].dtype)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        made = func(*args, **kwargs)
        if func.overloadpacket is aten.any:
            self._any.add(made.untyped_storage())
        return made
