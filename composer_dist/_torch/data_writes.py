"""Writes that autograd does not count: through `.data`, numpy, dlpack and storages.

What `x.data` returns has a number of changes of its own. While the memory of `x` is watched, all that is
read from `.data` of it, or of a view of it, has the same number, which is kept here. It is not the number
of `x`, which autograd compares in backward. Memory that is given out in other ways is summed from then on.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

_SLOT: Any = vars(torch._C.TensorBase)["data"]
_read = _SLOT.__get__
_watched: dict[int, Any] = {}
"""The storages of watched tensors by address, each with what forgets all of it here when it is freed."""
_counters: dict[tuple[int, type], Any] = {}
"""For each storage and type whose `.data` was read, a tensor without memory that has the number."""
_given: dict[int, tuple[int, int]] = {}
"""For each storage that was given out: how often its values were found changed, and their sum then."""
_freed: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""For each storage whose memory FSDP2 frees, the tensor that it holds."""


def watch_data(tensors: Iterable[Tensor], are_freed: bool = False) -> None:
    """As long as their storages live, count the writes that autograd does not.

    Args:
        tensors: what to watch, ordinary tensors and DTensors; others are skipped.
        are_freed: their memory will be freed; numpy gets copies that cannot be written.
    """
    if not _watched:
        setattr(Tensor, "data", _CountedData())  # noqa: B010 - mypy knows its type
        for owner, name in _GIVING:
            if not hasattr(getattr(owner, name), "__wrapped__"):
                setattr(owner, name, _noting(owner, name))
    for tensor in tensors:
        if (key := _key(tensor)) is None:
            continue
        if key not in _watched:
            _watched[key] = ref(_storage(tensor), functools.partial(_forget, key))
        if are_freed:
            _freed[key] = tensor


def _forget(key: int, _: Any) -> None:
    """Another storage may come to be at the same address."""
    del _watched[key]
    _given.pop(key, None)
    for kind in (Tensor, DTensor):
        _counters.pop((key, kind), None)


def data_writes(tensor: Tensor) -> int:
    """A number of a tensor that is watched, which grows with writes that autograd does not count."""
    if not wrote_data() or (key := _key(tensor)) is None:
        return 0
    found = (_counters.get((key, kind)) for kind in (Tensor, DTensor))
    counted: int = sum(counter._version for counter in found if counter is not None)
    if key not in _given:
        return counted
    changes, then = _given[key]
    if (now := _sum(tensor)) != then:
        changes += 1
        _given[key] = changes, now
    return counted + changes


def wrote_data() -> bool:
    """Whether there can be such writes: the memory of any watched tensor was given out."""
    return bool(_counters or _given)


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
    """Replaces torch's descriptor, and is the same on the class, where the compiler reads it."""

    def __get__(self, tensor: Tensor | None, kind: Any = None) -> Any:
        return _SLOT if tensor is None else read_data(tensor)

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        _SLOT.__set__(tensor, value)

    def __eq__(self, other: object) -> bool:
        return other is self or other is _SLOT

    def __hash__(self) -> int:
        return hash(_SLOT)


_GIVING: list[tuple[Any, str]] = [
    *((owner, "to_dlpack") for owner in (torch, torch.utils.dlpack)),
    *((Tensor, name) for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "set_")),
    *((torch.UntypedStorage, name) for name in ("fill_", "copy_", "__setitem__")),
]
"""The functions that give out the memory of a tensor, or write it."""


def _noting(owner: Any, name: str) -> Callable[..., Any]:
    """A function of torch that notes what watched memory it gives out, but not to torch or this package."""
    function = getattr(owner, name)
    own = ("composer_dist", "torch") if name == "data_ptr" else ("composer_dist",)

    @functools.wraps(function)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if name == "set_" and args else self
        if name == "set_" and given is self and len(args) == 1:  # torch's parametrizations do it
            return self
        key = _key(given)
        if key in _watched and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in own:
            if key in _freed and name in ("numpy", "__array__"):
                array = function(self.clone(), *args, **kwargs)
                array.flags.writeable = False
                return array
            if key not in _given and _storage(given).device.type != "meta":
                _given[key] = 0, _sum(given)
        return function(self, *args, **kwargs)

    return noting


def _sum(given: Any) -> int:
    """A sum of all values in the storage of a tensor, which shows changes."""
    storage = _storage(given)
    size = max(size for size in _INTEGERS if storage.nbytes() % size == 0)
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        numbers = torch.empty(0, dtype=_INTEGERS[size], device=storage.device)
        return int(numbers.set_(storage).sum(dtype=torch.int64))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _counted(data: Any, key: int | None) -> Tensor:
    place: Any = key, type(data)
    counter: Any = _counters.get(place)
    if counter is None:
        counter = torch.empty(0, device=data.device) if type(data) is Tensor else data.detach()
        if type(data) is DTensor:
            counter._local_tensor = torch.empty(0, device=data.device)
        _counters[place] = counter
    counted: Any = counter.detach()
    _SLOT.__set__(counted, data)
    if type(data) is DTensor:
        counted._spec, counted._local_tensor = data._spec, _counted(data._local_tensor, key)
    return counted  # type: ignore[no-any-return]


def _key(given: Any) -> int | None:
    try:
        storage = _storage(given)
    except RuntimeError:  # torch.func's tensors, and sparse ones
        return None
    return None if storage is None else storage._cdata


def _storage(given: Any) -> Any:
    """The storage of an ordinary tensor or of a DTensor's part, or what a typed one holds."""
    kind = type(given)
    if kind is DTensor:
        given, kind = given._local_tensor, type(given._local_tensor)
    if kind is Tensor or kind is nn.Parameter:
        return given.untyped_storage()
    if kind is torch.TypedStorage:
        return given._untyped_storage
    return given if kind is torch.UntypedStorage else None
