"""Layers around a module's forward: in one order whatever the order of adding, and each removable."""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_dist.distributed import forwards
from composer_dist.distributed.forwards import Layer
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.grids import slow

pytestmark = pytest.mark.promise(104)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, trail: list[str] | None = None) -> Tensor:
        if trail is not None:
            trail.append("forward")
        return x * self.scale


def own(x: Tensor, *, trail: list[str] | None = None) -> Tensor:
    """A forward that the user has given to one module."""
    if trail is not None:
        trail.append("own")
    return x * 3


class Marked:
    """Notes that it was passed, and by which module."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.name, self.module, self.inner = name, module, forward

    def __call__(self, *args: Any, trail: list[str] | None = None, **kwargs: Any) -> Any:
        if trail is not None:
            trail.append(self.name)
        return self.inner(*args, trail=trail, **kwargs)


def mark(layer: Layer) -> forwards.Wrap:
    return functools.partial(Marked, layer.name)


def passed(module: nn.Module) -> list[str]:
    trail: list[str] = []
    module(torch.ones(2), trail=trail)
    return trail


def expected(layers: set[Layer], inside: str) -> list[str]:
    return [layer.name for layer in sorted(layers, reverse=True)] + [inside]


ORDERS = list(permutations(Layer))


@pytest.mark.parametrize("inside", ["forward", "own"])
@pytest.mark.parametrize("first", [slow(one) if one % 7 else one for one in range(len(ORDERS))])
def test_layers_added_and_removed_in_any_order(first: int, inside: str) -> None:
    order = ORDERS[first]
    for backwards in ORDERS[first % 89 :: 89]:  # all pairs would be half a million
        block = Block()
        if inside == "own":
            block.forward = own  # type: ignore[assignment]
        before, signature = dict(vars(block)), inspect.signature(block.forward)
        layers: set[Layer] = set()
        for layer in order:
            assert not forwards.has(block, layer)
            forwards.add(block, layer, mark(layer))
            layers.add(layer)
            assert passed(block) == expected(layers, inside)
            assert inspect.signature(block.forward) == signature
        for layer in backwards:
            assert forwards.has(block, layer)
            forwards.remove(block, layer)
            layers.remove(layer)
            assert passed(block) == expected(layers, inside)
            assert inspect.signature(block.forward) == signature
        assert vars(block) == before
        assert type(block) is Block


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_copy_has_layers_of_its_own(copied: Callable[[Block], Block]) -> None:
    block = Block()
    for layer in Layer:
        forwards.add(block, layer, mark(layer))
    twin = copied(block)
    assert passed(twin) == passed(block)
    assert twin.forward.module is twin  # type: ignore[attr-defined]
    with torch.no_grad():
        block.scale.zero_()
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 2.0))
    for layer in Layer:
        forwards.remove(twin, layer)
    assert passed(twin) == ["forward"]
    assert passed(block) == expected(set(Layer), "forward")


def test_a_forward_on_top_of_the_layers_stays() -> None:
    block = Block()
    forwards.add(block, Layer.RECOMPUTE, mark(Layer.RECOMPUTE))
    inner = block.forward
    block.forward = Marked("user's", block, inner)  # type: ignore[method-assign]
    forwards.add(block, Layer.COMPILE, mark(Layer.COMPILE))
    assert passed(block) == ["COMPILE", "user's", "RECOMPUTE", "forward"]
    assert forwards.has(block, Layer.RECOMPUTE)
    with pytest.raises(ParallelismRuntimeError, match="recompute .* Block: other code has set a forward"):
        forwards.remove(block, Layer.RECOMPUTE)
    forwards.remove(block, Layer.COMPILE)
    assert passed(block) == ["user's", "RECOMPUTE", "forward"]
    block.forward = inner  # type: ignore[method-assign]
    forwards.remove(block, Layer.RECOMPUTE)
    with pytest.raises(ParallelismRuntimeError, match="there is no such layer"):
        forwards.remove(block, Layer.RECOMPUTE)
    assert passed(block) == ["forward"]


def test_a_forward_that_was_deleted_has_no_layers() -> None:
    block = Block()
    forwards.add(block, Layer.RECOMPUTE, mark(Layer.RECOMPUTE))
    del block.forward
    assert not forwards.has(block, Layer.RECOMPUTE)
    forwards.add(block, Layer.COMPILE, mark(Layer.COMPILE))
    assert passed(block) == ["COMPILE", "forward"]
