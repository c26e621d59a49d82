"""The parameters that prepared models had before, which a user's code may still hold."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias
from weakref import WeakValueDictionary, ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import listed

Former: TypeAlias = list[WeakValueDictionary[str, Tensor]]
"""Those that still exist, by name, for each preparation of a model."""


def remember(model: nn.Module, replaced: Mapping[str, Tensor]) -> Former:
    """Keep the parameters that a prepared model had before, by name; all of them that still exist."""
    former: Former = [WeakValueDictionary(replaced)]
    for there, earlier in _former:
        former = [*earlier, *former] if there() is model else former
    former = [one for one in former if one]
    _former[:] = [*(one for one in _former if one[0]() not in (None, model)), (ref(model), former)]
    return former


_former: list[tuple[ref[nn.Module], Former]] = []


def prepared_models() -> list[nn.Module]:
    """All that exist."""
    return [model for one, _ in _former if (model := one()) is not None]


def former_parameters() -> Iterator[tuple[str, Tensor]]:
    """Those of all prepared models, with their names."""
    for model, former in _former:
        for each in former if model() is not None else ():
            yield from list(each.items())


def refuse_former(parameters: Iterable[Tensor], function: str) -> None:
    """Raise a ParallelismRuntimeError if `function` was given some that get no gradients any more."""
    given = set(map(id, parameters))
    if old := {name: one for name, one in former_parameters() if id(one) in given and one.grad is None}:
        raise ParallelismRuntimeError(
            f"{function} was given {listed(list(old), 4)} from before {when_replaced(old.values())}, which "
            "the model no longer has, so it would do nothing. Pass the model, or parameters that you take "
            "from model.parameters() afterwards."
        )


def when_replaced(parameters: Iterable[Tensor]) -> str:
    """By what the model got others, for errors."""
    return "unparallelize_model" if any(isinstance(one, DTensor) for one in parameters) else "the preparation"
