"""The modules of a unit and their attributes, as they are in each of its calls."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from composer_dist.distributed.prepared import ADDED
from composer_dist.structure.check_aliasing import NO_COPIES
from composer_dist.tensors.nested import may_hold

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OURS = (*ADDED, "forward")


class Attributes:
    """Sorts what a unit's modules hold again only if modules, names or types have changed."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._modules: Sequence[nn.Module] = ()
        self._children: list[list[nn.Module | None]] = []
        self._starts: list[int] = []
        """Of each module, how many attributes come first that every module has."""
        self._sorted: tuple[Any, ...] = ()
        """The names of the others, and the types of their values."""
        self.containers: list[tuple[nn.Module, str]] = []
        """The attributes that are tensors and builtin containers; those that may hold some are `objects`."""
        self.objects: list[tuple[nn.Module, str]] = []

    def modules(self) -> Sequence[nn.Module]:
        """The modules of the unit, without those of the units inside it."""
        if (
            self._modules
            and [list(vars(one)["_modules"].values()) for one in self._modules] == self._children
        ):
            return self._modules
        self._modules = found = own_modules(self._unit)
        self._children = [list(vars(one)["_modules"].values()) for one in found]
        count = len(_OF_EVERY_MODULE)
        first = (islice(vars(one), count) for one in found)
        self._starts = [count if _OF_EVERY_MODULE.issuperset(names) else 0 for names in first]
        return found

    def sort(self) -> Sequence[nn.Module]:
        """Bring `containers` and `objects` up to date, and return the modules."""
        held = [vars(one) for one in self.modules()]
        places = list(zip(held, self._starts, strict=True))
        values = chain.from_iterable([islice(one.values(), start, None) for one, start in places])
        names = chain.from_iterable([islice(one, start, None) for one, start in places])
        now = *names, *map(type, values)
        if now == self._sorted:
            return self._modules
        self._sorted, self.containers, self.objects = now, [], []
        for one, attributes in zip(self._modules, held, strict=True):
            for key in attributes.keys() - NO_COPIES:
                if isinstance(value := attributes[key], (Tensor, list, tuple, dict, set)):
                    self.containers.append((one, key))
                elif may_hold(value) and not key.startswith(_OURS):
                    self.objects.append((one, key))
        return self._modules


def own_modules(unit: nn.Module) -> list[nn.Module]:
    """The modules of a unit, without those of the units inside it."""
    found = [unit]
    for module in found:
        children = vars(module)["_modules"].values()
        found += [child for child in children if child is not None and not isinstance(child, FSDPModule)]
    return found
