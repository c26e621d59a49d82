"""Selective checkpointing: what is kept is not computed again, and nothing else changes.

Longer than other files: all cases count operations of the same models.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from composer_dist import ParallelismConfig, Rule
from composer_dist._torch import TorchDispatchMode
from composer_dist.distributed import named_parameters_canonical, plan_parallelism
from composer_dist.distributed.activations import offload as activation_offload
from composer_dist.distributed.activations import recompute as activation_checkpointing
from composer_dist.distributed.activations.options import ac_mode
from composer_dist.distributed.activations.recompute import checkpoint_modules
from composer_dist.distributed.activations.selective import operators
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit import compare, models
from tests.kit.grids import slow
from tests.kit.world import on_ranks

BLOCKS = ["0", "1"]
EXACT = {"early_stop": False}  # recompute the whole forward, so that the counts are round


class Block(nn.Module):
    """Two linear layers, attention with dropout, and activations."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.dropout(torch.tanh(self.out(mixed)), 0.3)


class Operations(TorchDispatchMode):
    """Counts what runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(getattr(operator, "overloadpacket", operator))] += 1
        return operator(*args, **(kwargs or {}))


def two_blocks(value: Any, build: Callable[[], nn.Module] = Block) -> tuple[nn.Module, nn.Module]:
    """Two blocks, checkpointed, and a copy that is not."""
    model = nn.Sequential(build(), build())
    plain = copy.deepcopy(model)
    mode = ac_mode(value)
    assert mode is not None
    checkpoint_modules(model, BLOCKS, *mode)
    return model, plain


def step(model: nn.Module, count: Counter[str] | None = None) -> list[torch.Tensor]:
    """Output and gradients with the dropout of one seed; `count` takes the backward's operations."""
    torch.manual_seed(5)
    x = torch.randn(4, 6, 8, requires_grad=True)
    model.zero_grad()
    output = model(x)
    with Operations() as operations:
        output.square().mean().backward()
    if count is not None:
        count.update(operations.counts)
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


FORWARD = ("aten.addmm", "aten._scaled_dot_product_flash_attention_for_cpu", "aten.tanh", "aten.bernoulli_")


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    ("value", "recomputed"),
    [
        (("composable", EXACT), (2, 2, 2, 2)),
        (("selective", EXACT), (0, 0, 2, 2)),
        (("wrapped", {"save": "default", **EXACT}), (0, 0, 2, 2)),
        (("selective", {"save": ["aten.tanh"], **EXACT}), (2, 2, 0, 2)),
        (("selective", {"save": ["default", "aten.tanh"], **EXACT}), (0, 0, 0, 2)),
        (("selective", {"save": ["aten.addmm.default"], **EXACT}), (0, 2, 2, 2)),
        (("selective", {"offload": True, **EXACT}), (0, 0, 2, 2)),
    ],
    ids=str,
)
def test_what_is_saved_is_not_computed_again(value: Any, recomputed: tuple[int, ...]) -> None:
    model, plain = two_blocks(value)
    counts: Counter[str] = Counter()
    reference: Counter[str] = Counter()
    same(step(model, counts), step(plain, reference))
    again = tuple(counts[name] - reference[name] for name in FORWARD)
    assert again == recomputed


@contextmanager
def watched() -> Iterator[list[int]]:
    """The sizes of the results that selective checkpointing keeps, in bytes."""
    kept: list[int] = []
    stay = activation_offload.stay

    def recording(tensor: torch.Tensor) -> Any:
        kept.append(tensor.nbytes)
        return stay(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_checkpointing, "stay", recording)
        yield kept


def saved_bytes(model: nn.Module) -> int:
    """What autograd itself keeps between forward and backward, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(4, 6, 8, requires_grad=True))
    del output
    return sum(saved.values())


@pytest.mark.promise(26)
def test_selective_keeps_more_than_full_and_less_than_none() -> None:
    sizes = {}
    for value in ("composable", "selective"):
        with watched() as kept:
            model, plain = two_blocks(value)
            sizes[value] = saved_bytes(model) + sum(kept)
    inputs = 2 * 4 * 6 * 8 * 4  # of each block, float32
    assert sizes["composable"] == inputs
    products = 2 * (24 + 8) * 4 * 6 * 4
    attention = 2 * (8 + 2) * 4 * 6 * 4  # its output, and a logsumexp for each of two heads
    assert sizes["selective"] == inputs + products + attention
    assert saved_bytes(plain) > sizes["selective"]


@pytest.mark.promise(26)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("view", [lambda y: y, torch.flatten, lambda y: torch.unsafe_chunk(y, 1)[0]])
def test_a_saved_result_changed_in_place_is_noticed(view: Callable[..., torch.Tensor], bias: bool) -> None:
    """Also through a tensor over its memory that autograd does not know as a view."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            view(y).mul_(2)
            return y.sin()

    model, _ = two_blocks("selective", InPlace)
    with pytest.raises(ParallelismRuntimeError, match=r"shape \(24, 8\) .* changed in place"):
        step(model)


@pytest.mark.promise(26)
@pytest.mark.parametrize("bias", [True, False])
def test_a_change_of_shape_in_place_is_no_change(bias: bool) -> None:
    """vmap makes them; after one, a change of values is still noticed."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=bias)
            self.factor = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x.flatten(0, 1)).unsqueeze_(0).transpose_(0, 1).squeeze_(1)
            z = self.linear(x).unsqueeze_(0).squeeze_(0)  # without a bias a view of what is kept
            z = z if self.factor == 1 else z.mul_(self.factor)
            return (y.sin().view_as(z) + z.sin()) + torch.vmap(lambda row: self.linear(row).tanh())(x)

    model, plain = two_blocks("selective", InPlace)
    same(step(model), step(plain))
    output = model(torch.randn(4, 6, 8)).sum()
    first, second = (torch.autograd.grad(output, [*model.parameters()], retain_graph=True) for _ in range(2))
    same([*first], [*second])
    model[1].factor = 2  # type: ignore[assignment]
    with pytest.raises(ParallelismRuntimeError, match="changed in place"):
        step(model)


@pytest.mark.promise(26)
def test_a_module_that_does_more_the_second_time_is_refused() -> None:
    calls: dict[nn.Module, int] = {}

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[self] = calls.get(self, 0) + 1
            for _ in range(calls[self]):  # without gradients: what is saved does not tell torch
                with torch.no_grad():
                    y = self.linear(x)
            return self.linear(x + y).tanh()

    model, _ = two_blocks(("selective", EXACT), Growing)
    with pytest.raises(ParallelismRuntimeError, match="addmm.default ran more often in the recomputation"):
        step(model)


# Random numbers


@pytest.fixture
def noise() -> Iterator[None]:
    """An operation that draws where its `dropout_p` is not 0, as attention kernels on a GPU do."""
    library = Library("composer_dist_test", "DEF")
    tags = (torch.Tag.nondeterministic_seeded,)
    library.define("noise(Tensor x, float dropout_p=0.0) -> Tensor", tags=tags)
    library.define("drawn(Tensor x) -> Tensor", tags=tags)

    def run(x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
        return x + torch.rand(x.shape) if dropout_p else x + 1

    library.impl("noise", run, "CPU")
    library.impl("noise", _Noise.apply, "AutogradCPU")
    library.impl("drawn", lambda x: torch.rand(x.shape), "CPU")
    yield
    library._destroy()


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.composer_dist_test.noise(x, dropout_p)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Noisy(nn.Module):
    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout_p = dropout_p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.composer_dist_test.noise(self.linear(x), self.dropout_p)
        return F.dropout(x.sin(), 0.5)  # draws after it: other numbers, were the call left out


@pytest.mark.promise(26)
@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize(("dropout_p", "again"), [(0.0, 0), (0.5, 2)])
def test_a_call_that_draws_random_numbers_is_repeated(dropout_p: float, again: int) -> None:
    save = {"save": ["default", "composer_dist_test.noise"], **EXACT}
    model, plain = two_blocks(("selective", save), lambda: Noisy(dropout_p))
    counts: Counter[str] = Counter()
    same(step(model, counts), step(plain))
    assert counts["composer_dist_test.noise"] == again
    assert counts["aten.addmm"] == 0


# Names


@pytest.mark.promise(27)
@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize(
    ("save", "says"),
    [
        (["aten.mmm"], r"'aten.mmm', because there is no such operation. Did you mean 'aten.mm'"),
        (["aten.mm.default", "aten.mm.defalt"], "save 'aten.mm.defalt', because there is no such"),
        (["mm"], "'mm', because there is no such operation"),
        (["aten.linear"], "'aten.linear', which torch decomposes.*'aten.addmm' for a linear layer"),
        (["aten.scaled_dot_product_attention"], "decomposes before it runs; .* or 'default'"),
        (["aten.relu_"], "'aten.relu_', which changes a tensor in place; leave it out"),
        (["composer_dist_test.drawn"], "draws random numbers; leave it out"),
        (["aten.native_dropout", "aten.matmul"], "'aten.native_dropout', which draws .*; 'aten.matmul'"),
        ("aten.mm", r"needs save to be 'default' or a list of operations .*, not 'aten.mm'"),
        ([], "needs save to be 'default' or a list"),
    ],
)
def test_what_cannot_be_saved_is_named_when_planned(save: Any, says: str) -> None:
    config = ParallelismConfig(rules=[Rule("layers.0", act_ckpt=("selective", {"save": save}))])
    with pytest.raises(ParallelismValueError, match=says):
        plan_parallelism(models.B(), config)


def test_a_name_stands_for_all_overloads_that_change_nothing() -> None:
    assert torch.ops.aten.mm.default in operators(["aten.mm"])
    assert not any(one._schema.is_mutable for one in operators(["aten.mm", "aten.relu"]))
    assert operators(["aten.relu.default"]) == {torch.ops.aten.relu.default}
    assert torch.ops._c10d_functional.all_reduce.default in operators("default")
    assert torch.ops.higher_order.flex_attention in operators("default")


# Sharded


class Communicating(nn.Module):
    """Sums over the ranks in the midst of its forward, as tensor parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = "all_gather_single_autograd"  # until torch 2.12 all_gather_tensor_autograd
        gather = getattr(funcol, name, None) or funcol.all_gather_tensor_autograd
        gathered = gather(self.linear(x).tanh(), 0, dist.group.WORLD)
        return x + sum(gathered.sin().chunk(dist.get_world_size()))  # type: ignore[arg-type]


@pytest.mark.promise(26)
@pytest.mark.parametrize(("value", "again"), [("composable", 2), ("selective", 0)])
@on_ranks(2)
def test_collectives_that_are_kept_run_once(value: str, again: int) -> None:
    model, plain = two_blocks((value, EXACT), Communicating)
    counts: Counter[str] = Counter()
    reference: Counter[str] = Counter()
    same(step(model, counts), step(plain, reference))
    name = "_c10d_functional.all_gather_into_tensor"
    assert counts[name] - reference[name] == again


@pytest.mark.promise(26)
@pytest.mark.parametrize("build", [slow(models.B), slow(models.tied), models.own_dtype])  # a unit in a block
@on_ranks(2)
def test_sharded_training_is_the_same(build: Callable[[], nn.Module]) -> None:
    for value in ("selective", ("wrapped", {"save": ["aten.mm"]}), ("selective", {"offload": True})):
        done = compare.assert_same_training(build, ParallelismConfig(activation_checkpointing=value))
        names = [name for name, _ in named_parameters_canonical(done.model)]
        assert not any("_checkpoint_wrapped_module" in name for name in names)
