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
        self._held: list[dict[str, Any]] = []
        """What each of them holds."""
        self._children: list[nn.Module | None] = []
        self._starts: list[int] = []
        """Of each module, how many attributes come first that every module has."""
        self._sorted: tuple[Any, ...] = ()
        """The names of the others, and the types of their values."""
        self.containers: list[tuple[nn.Module, str]] = []
        """The attributes that are tensors and builtin containers; those that may hold some are `objects`."""
        self.objects: set[tuple[nn.Module, str]] = set()

    def modules(self) -> Sequence[nn.Module]:
        """The modules of the unit, without those of the units inside it."""
        if self._held and self._registered("_modules") == self._children:
            return self._modules
        self._modules = own_modules(self._unit)
        self._held = [vars(one) for one in self._modules]
        self._children = self._registered("_modules")
        count = len(_OF_EVERY_MODULE)
        first = (islice(one, count) for one in self._held)
        self._starts = [count if _OF_EVERY_MODULE.issuperset(names) else 0 for names in first]
        return self._modules

    def parameters(self) -> list[Any]:
        """What the modules have registered as parameters."""
        return self._registered("_parameters")

    def _registered(self, kind: str) -> list[Any]:
        return [*chain.from_iterable([one[kind].values() for one in self._held])]

    def sort(self) -> None:
        """Bring `containers` and `objects` up to date."""
        self.modules()
        # From the end: to step over what every module has would touch it in memory, which takes most time.
        places = [(one, len(one) - start) for one, start in zip(self._held, self._starts, strict=True)]
        values = chain.from_iterable([islice(reversed(one.values()), count) for one, count in places])
        names = chain.from_iterable([islice(reversed(one), count) for one, count in places])
        now = *names, *map(type, values)
        if now == self._sorted:
            return
        self._sorted, self.containers, self.objects = now, [], set()
        for one, attributes in zip(self._modules, self._held, strict=True):
            for key in attributes.keys() - NO_COPIES:
                if key.startswith(_OURS):
                    continue
                if isinstance(value := attributes[key], (Tensor, list, tuple, dict, set)):
                    self.containers.append((one, key))
                elif may_hold(value):
                    self.objects.add((one, key))


def own_modules(unit: nn.Module) -> list[nn.Module]:
    """The modules of a unit, without those of the units inside it."""
    found = [unit]
    for module in found:
        children = vars(module)["_modules"].values()
        found += [child for child in children if child is not None and not isinstance(child, FSDPModule)]
    return found
