"""Writes through `.data`, which autograd does not count.

What `x.data` returns has a number of changes of its own. While the memory of `x` is watched, all that is
read from `.data` of it, or of a view of it, has the same number, which is kept here. It is not the number
of `x`, which autograd compares in backward.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

_SLOT: Any = vars(torch._C.TensorBase)["data"]
_read = _SLOT.__get__
_watched: set[int] = set()
"""The storages of watched tensors. Those that are gone by now cost a few bytes each."""
_counters: dict[tuple[int, type], Any] = {}
"""For each storage and type whose `.data` was read, a tensor without memory that has the number."""


def watch_data(tensors: Iterable[Tensor]) -> set[int]:
    """Count the writes through `.data` of ordinary tensors and DTensors from now on. Since torch 2.4.

    Returns:
        What `forget_data` takes, for tensors that will be gone soon.
    """
    if not _watched:
        setattr(Tensor, "data", _CountedData())  # noqa: B010 - mypy knows its type
    new = {key for tensor in tensors if (key := _key(tensor)) is not None} - _watched
    _watched.update(new)
    return new


def forget_data(keys: set[int]) -> None:
    """Stop counting."""
    _watched.difference_update(keys)
    for place in [place for place in _counters if place[0] in keys]:
        del _counters[place]


def data_writes(tensor: Tensor) -> int:
    """The number of writes through `.data` of a tensor that is watched."""
    if not _counters or (key := _key(tensor)) is None:
        return 0
    found = (_counters.get((key, kind)) for kind in (Tensor, DTensor))
    return sum(counter._version for counter in found if counter is not None)


def wrote_data() -> bool:
    """Whether there can be such writes: `.data` of any watched tensor was read."""
    return bool(_counters)


def read_data(tensor: Tensor) -> Tensor:
    """What `tensor.data` returns. For tensors that are not watched, this costs a call."""
    if not _watched or (key := _key(tensor)) not in _watched or tensor.is_inference():
        return _read(tensor)  # type: ignore[no-any-return]
    if not (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
    ):
        return _counted(_read(tensor), key)
    with torch.inference_mode(False), _disable_current_modes(), temporarily_clear_interpreter_stack():
        return _counted(_read(tensor), key)


class _CountedData:
    """What stands in the place of torch's descriptor, and is the same on the class: the compiler asks it."""

    def __get__(self, tensor: Tensor | None, kind: Any = None) -> Any:
        return _SLOT if tensor is None else read_data(tensor)

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        _SLOT.__set__(tensor, value)

    def __eq__(self, other: object) -> bool:
        return other is self or other is _SLOT

    def __hash__(self) -> int:
        return hash(_SLOT)


def _counted(data: Any, key: int | None) -> Tensor:
    counter: Any = _counters.get((key, type(data)))  # type: ignore[arg-type]
    if counter is None:
        counter = torch.empty(0, device=data.device) if type(data) is Tensor else data.detach()
        if type(data) is DTensor:
            counter._local_tensor = torch.empty(0, device=data.device)
        _counters[key, type(data)] = counter  # type: ignore[index]
    counted: Any = counter.detach()
    _SLOT.__set__(counted, data)
    if type(data) is DTensor:
        counted._spec, counted._local_tensor = data._spec, _counted(data._local_tensor, key)
    return counted  # type: ignore[no-any-return]


def _key(tensor: Any) -> int | None:
    kind = type(tensor)
    if kind is DTensor:
        tensor, kind = tensor._local_tensor, type(tensor._local_tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return None
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except RuntimeError:  # torch.func's tensors, and sparse ones
        return None
