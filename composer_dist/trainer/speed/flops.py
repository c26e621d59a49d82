"""The floating-point operations of a training batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from composer_dist import _torch


class FlopCount(_torch.TorchDispatchMode):
    """Counts matrix products, convolutions and attention while it is entered, by torch's formulas.

    torch's own FlopCounterMode also counts what activation checkpointing computes a second time, which model
    FLOPs utilization leaves out. Only that runs in backward with gradients enabled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13 has no types here
        self.flops = 0.0
        self.in_backward = False

    def enter(self) -> None:
        """Starts counting."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stops counting."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(_torch.packet(func))
        if formula is None and isinstance(func, _torch.OpOverload):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None and not (self.in_backward and torch.is_grad_enabled()):
            self.flops += formula(*args, **kwargs, out_val=result) / _ranks(args)
        return result


def _ranks(args: Any) -> int:
    """How many ranks share an operation: those of a DTensor's mesh, whose shapes are the whole's."""
    tensors = (leaf for leaf in args if isinstance(leaf, DTensor))
    return max((tensor.device_mesh.size() for tensor in tensors), default=1)
