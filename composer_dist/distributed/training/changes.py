"""Whether a forward has changed parameters or buffers, which several ranks lose or come to differ in."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.tensors.parts import as_bytes

Key = TypeVar("Key")


@dataclass(slots=True)
class Before(Generic[Key]):
    """Tensors as a forward finds them, by name or by where they are held."""

    versions: Mapping[Key, int]
    data_writes: Mapping[Key, int]
    sums: Mapping[Key, Tensor | None]
    """Of the values, where they are compared."""

    def changed(self, tensors: Mapping[Key, Tensor]) -> list[Key]:
        """Which of them are different by now, in place; those that are missing by now are skipped."""
        given = self.data_writes or _torch.wrote_data()
        compared = {name: self.differs(name, one) for name, one in tensors.items()} if self.sums else {}
        other = _torch.which_are_true(compared) if compared else []
        now = _torch.versions(tensors)
        if now == self.versions and not given and not other:
            return []
        return [
            name
            for name, tensor in tensors.items()
            if self.versions.get(name, 0) != now[name]
            or (given and self.data_writes.get(name, 0) != _torch.data_writes(tensor))
            or name in other
        ]

    def differs(self, name: Key, tensor: Tensor) -> Tensor | None:
        """A boolean, on the tensor's device: whether its values are others; None if they are not compared."""
        then, now = self.sums.get(name), _sum(tensor) if name in self.sums else None
        return None if then is None or now is None else then.ne(now)


class Watch:
    """Looks at tensors before a forward.

    Every change that autograd counts is found, and every one through `.data` or through memory that the
    tensor has given out (numpy, dlpack). Others (of a kernel that declares nothing, a batch norm's
    statistics) are found by the values, which are compared in the forwards 1, 2, 4, 8, ... of each kind:
    for training or evaluation, with or without gradients.
    """

    def __init__(self) -> None:
        self._forwards: Counter[tuple[bool, bool]] = Counter()

    def before(self, module: nn.Module, tensors: Mapping[Key, Tensor], watched: bool = False) -> Before[Key]:
        """What the forward of `module` that begins now finds; if `watched`, `watch_data` has the tensors."""
        kind = module.training, torch.is_grad_enabled()
        self._forwards[kind] += 1
        compared = is_power_of_two(self._forwards[kind])
        sums = {name: _sum(tensor) for name, tensor in tensors.items()} if compared else {}
        if not watched:
            _torch.watch_data(tensors.values())
        given = tensors if _torch.wrote_data() else {}
        writes = {name: _torch.data_writes(tensor) for name, tensor in given.items()}
        return Before(_torch.versions(tensors), writes, sums)


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8 or so on: how often to do what is too slow to do every time."""
    return number & (number - 1) == 0


def _sum(tensor: Tensor) -> Tensor | None:
    """A sum that shows a change of the values, on the tensor's own device; None of those that hide theirs."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if type(local) not in (Tensor, nn.Parameter):
        return None
    whole = as_bytes(local.detach().contiguous().view(-1))
    first = min(-whole.storage_offset() % 8, len(whole))
    last = first + (len(whole) - first) // 8 * 8
    total = whole[:first].sum() + whole[last:].sum()
    if last > first:  # most of it, without a conversion, which would take ten times as long
        total += whole[first:last].view(torch.int64).sum()
    return total
