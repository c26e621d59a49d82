"""What an initializer touches, and that looking leaves no trace."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from composer_dist.distributed.weights.trace import Initializer, trace
from composer_dist.random_states import seed_all, set_aside
from composer_dist.structure.structure import read_structure


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)
        self.right.bias = self.left.bias
        self.register_buffer("table", torch.zeros(3))
        self.plain = torch.zeros(2)


def touched(write: Callable[[Any], Any], module: str = "") -> tuple[set[str], set[str]]:
    """What a function of the model writes, and what it only reads."""
    model = Pair()
    before = [*model.parameters(), *model.buffers(), model.plain]
    copies = [tensor.detach().clone() for tensor in before]
    initializer = Initializer(module, "test", lambda: write(model))
    trace(read_structure(model), [initializer])
    after = [*model.parameters(), *model.buffers(), model.plain]
    assert [id(tensor) for tensor in after] == [id(tensor) for tensor in before]
    assert all(torch.equal(a, b) for a, b in zip(after, copies, strict=True))
    return set(initializer.writes), set(initializer.touches - initializer.writes)


@pytest.mark.promise(36)
@pytest.mark.parametrize(
    ("write", "written", "read"),
    [
        (lambda m: nn.init.normal_(m.left.weight), {"left.weight"}, set()),
        (lambda m: m.right.bias.zero_(), {"left.bias"}, set()),
        (lambda m: m.right.weight.copy_(m.left.weight), {"right.weight"}, {"left.weight"}),
        (lambda m: m.left.weight.data.fill_(1), {"left.weight"}, set()),
        (lambda m: m.left.weight[0].zero_(), {"left.weight"}, set()),
        (lambda m: m.left.weight.view(-1)[2:].view(5, 2).t().mul_(2), {"left.weight"}, set()),
        (lambda m: setattr(m.left.weight, "data", torch.ones(3, 4)), {"left.weight"}, set()),
        (lambda m: setattr(m.right, "weight", nn.Parameter(torch.ones(3, 4))), {"right.weight"}, set()),
        (lambda m: setattr(m, "table", torch.arange(3.0)), {"table"}, set()),
        (lambda m: setattr(m, "plain", m.table[:2] + 1), {"plain"}, {"table"}),
        (lambda m: torch.mul(m.left.bias, 2, out=m.table), {"table"}, {"left.bias"}),
        (
            lambda m: torch._foreach_zero_([m.left.weight, m.right.weight]),
            {"left.weight", "right.weight"},
            set(),
        ),
        (lambda m: m.left.reset_parameters(), {"left.weight", "left.bias"}, set()),
        (lambda m: m.left.weight.shape, set(), set()),
    ],
)
def test_what_an_initializer_writes_and_reads(
    write: Callable[[Any], Any], written: set[str], read: set[str]
) -> None:
    assert touched(write) == (written, read)


def _wrapped(look: Callable[[], Any]) -> None:
    try:
        look()
    except RuntimeError as error:
        raise ValueError("cannot look") from error


@pytest.mark.parametrize(
    "look",
    [
        lambda m: m.left.weight.sum().item(),
        lambda m: m.left.weight.numpy(),
        lambda m: bool(m.left.weight.any()),
        lambda m: [0, 1][m.left.weight.int().sum()],
        lambda m: f"{m.left.weight.sum():.3f}",
        lambda m: m.left.weight[m.left.weight > 0],
        lambda m: torch.ones(3, 4, device="cpu") + m.left.weight,
        lambda m: torch.unique(m.left.weight),
        lambda m: _wrapped(m.left.weight.tolist),
    ],
)
def test_an_initializer_that_needs_values_may_do_anything_to_its_own(look: Callable[[Any], Any]) -> None:
    written, _ = touched(look, "left")
    assert written == {"left.weight", "left.bias"}


def _raise(error: Exception) -> None:
    raise error


def test_an_error_of_the_initializers_own_is_raised_and_the_model_put_back() -> None:
    def fail(model: Any) -> None:
        model.left.weight = nn.Parameter(torch.ones(1))
        raise ValueError("no such init")

    with pytest.raises(ValueError, match="no such init"):
        touched(fail)
    with pytest.raises(RuntimeError, match="must match the size"):
        touched(lambda m: m.left.weight.copy_(m.right.bias[:2]))
    with pytest.raises(ValueError, match="not a meta-learner"):  # whatever its text
        touched(lambda m: _raise(ValueError("not a meta-learner")))


def test_an_object_that_was_replaced_does_not_lend_its_address_to_another() -> None:
    """A storage that is freed while tracing may be given to a temporary one."""
    model = Pair()

    def rebind() -> None:
        model.left.weight = nn.Parameter(torch.ones(3, 4))

    def temporary() -> None:
        for _ in range(64):
            torch.ones(3, 4).mul_(2)

    first, second = Initializer("left", "rebind", rebind), Initializer("right", "temporary", temporary)
    trace(read_structure(model), [first, second])
    assert first.writes == {"left.weight"}
    assert second.touches == frozenset()


def test_seeds_and_states() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    expected = draw()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    with set_aside():
        seed_all(1)
        first = draw()
        seed_all(2)
        assert draw() != first
        seed_all(1)
        assert draw() == first
    assert draw() == expected


class Rewrites(nn.Module):
    """Rewrites its child's weight by a function of `nn.init` that skips meta tensors."""

    def __init__(self, function: Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Conv1d(4, 4, 3) if len(shape) == 3 else nn.Linear(4, 4)
        self.own = nn.Parameter(torch.empty(shape))
        self.function = function

    def reset_parameters(self) -> None:
        self.function(self.own)
        self.function(self.inner.weight)


@pytest.mark.promise(87)
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (nn.init.trunc_normal_, (4, 4)),
        (nn.init.orthogonal_, (4, 4)),
        (partial(nn.init.sparse_, sparsity=0.5), (4, 4)),
        (nn.init.dirac_, (4, 4, 3)),
    ],
)
def test_functions_that_skip_meta_tensors_are_seen_to_write(
    function: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = Rewrites(function, shape)
    structure = read_structure(model)
    initializer = Initializer("", "reset_parameters", model.reset_parameters)
    trace(structure, [initializer])
    assert initializer.writes == {"own", "inner.weight"}
    assert nn.init.orthogonal_(torch.ones(3, 3)).abs().max() <= 1  # and is itself again
    assert nn.init.trunc_normal_(torch.ones(50), std=0.01).abs().max() < 0.1
