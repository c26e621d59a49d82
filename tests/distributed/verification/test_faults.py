"""Faults that are put in on purpose: each is found and named, alike on every rank."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import Verification, parallelize_model, verify_model
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.inner import local_part
from tests.kit.compare import fails_alike
from tests.kit.decoder import Decoder, token_batch
from tests.kit.meshes import MESHES
from tests.kit.models import B, batch
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(113)


def prepared(mesh: str, build: Callable[[], nn.Module] = Decoder) -> tuple[Any, Any, torch.optim.Optimizer]:
    """A model, its unsharded copy and its optimizer."""
    torch.manual_seed(0)
    model = build()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, MESHES[mesh][1], optimizer)
    return model, reference, optimizer


def spoil(model: nn.Module, name: str, value: float, rank: int | None = 1) -> None:
    if rank in (None, dist.get_rank()):
        with torch.no_grad():
            local_part(dict(named_parameters_canonical(model))[name]).view(-1)[0] = value


def rows(found: Verification) -> list[tuple[str, str, tuple[int, ...]]]:
    """The differences, which are the same on all ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, str(found))
    assert everywhere == everywhere[:1] * len(everywhere)
    return [(one.what, one.name, one.ranks) for one in found.differences]


@on_ranks(2)
def test_one_changed_weight_on_one_rank() -> None:
    model, reference, optimizer = prepared("ddp")
    spoil(model, "layers.1.mlp.0.weight", 3.0)
    found = verify_model(model, reference, token_batch(), optimizer=optimizer)
    assert rows(found)[:2] == [
        ("replica's parameter", "layers.1.mlp.0.weight", ()),
        ("weight", "layers.1.mlp.0.weight", (1,)),
    ]
    assert "ranks 0, 1 hold different values" in found.differences[0].detail
    assert found.first_module == "layers.1.mlp.0"
    assert not verify_model(model, batch=None).ok


@on_ranks(2)
def test_a_changed_shard_is_named_beside_a_reference() -> None:
    model, reference, _ = prepared("fsdp2")
    spoil(model, "head.weight", 3.0)
    assert verify_model(model, None, token_batch()).ok  # its own weights are what it computes with
    found = verify_model(model, reference, token_batch())
    assert rows(found)[0] == ("weight", "head.weight", ())
    assert found.differences[0].absolute > 2
    assert found.first_module == "head"


class Turning(nn.Module):
    """With a complex weight, a complex output, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Linear(4, 4, bias=False, dtype=torch.complex64)
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = self.turns(x.to(torch.complex64))
        return turned, turned.imag + self.none.sum()


@pytest.mark.parametrize("mesh", ["fsdp2", "ddp"])
@on_ranks(2)
def test_complex_numbers_are_compared_as_a_whole(mesh: str) -> None:
    model, reference, optimizer = prepared(mesh, Turning)
    x = torch.ones(4, 4)
    found = verify_model(model, reference, x, optimizer=optimizer)
    assert found.ok, str(found)
    assert {one.what: one.count for one in found.checked}["output"] == 2
    with torch.no_grad():
        part = local_part(model.turns.weight).view(-1)
        part[0] += 3j
    found = verify_model(model, reference, x)
    assert {("weight", "turns.weight", ()), ("output", "0", ()), ("output", "1", ())} <= {*rows(found)}
    assert found.differences[0].absolute == pytest.approx(3)
    assert found.first_module == "turns"
    with torch.no_grad():
        part[0] *= torch.nan
    assert ("value", "turns.weight", ()) in rows(verify_model(model))


@pytest.mark.parametrize("mesh", ["ddp", "tp", "cp"])
@on_ranks(2)
def test_one_bit_of_one_replica(mesh: str) -> None:
    """Under tensor and context parallelism, of what the ranks of a replica hold in common."""
    model, _, optimizer = prepared(mesh)
    if mesh == "cp":  # FSDP2 shards over these ranks; buffers are whole
        model.register_buffer("table", torch.ones(3))
    tensor = model.table if mesh == "cp" else dict(named_parameters_canonical(model))["norm.weight"]
    if dist.get_rank() == 1:
        tensor.numpy(force=True).view("uint8")[0] ^= 1
    found = verify_model(model, optimizer=optimizer)
    kind, name = ("buffer", "table") if mesh == "cp" else ("parameter", "norm.weight")
    assert rows(found) == [(f"replica's {kind}", name, ())]


@on_ranks(4)
def test_one_bit_of_one_replica_among_shards() -> None:
    model, _, optimizer = prepared("hsdp")
    parameter = dict(named_parameters_canonical(model))["layers.0.mlp.0.weight"]
    if dist.get_rank() == 3:
        local_part(parameter).numpy(force=True).view("uint8")[0, 0] ^= 1
    found = verify_model(model, optimizer=optimizer)
    assert rows(found) == [("replica's parameter", "layers.0.mlp.0.weight", ())]
    assert "ranks 1, 3 hold different values" in found.differences[0].detail


@pytest.mark.parametrize("mesh", ["fsdp2", "ddp", "tp"])
@on_ranks(2)
def test_a_wrong_scale_of_the_gradients(mesh: str) -> None:
    """As of an average that sums, or of a loss that is divided twice: outputs and the loss are right."""
    model, reference, _ = prepared(mesh)
    for parameter in model.parameters():
        if mesh == "fsdp2":  # which calls no other hooks
            parameter.register_post_accumulate_grad_hook(lambda one: one.grad.mul_(2))
        else:
            parameter.register_hook(lambda gradient: gradient * 2)
    found = verify_model(model, reference, token_batch())
    names = {name for kind, name, _ in rows(found) if kind == "gradient"}
    assert names == {name for name, _ in reference.named_parameters() if not name.endswith("k_proj.bias")}
    assert {one.what for one in found.differences} == {"gradient", "gradient norm"}
    norm = next(one for one in found.differences if one.what == "gradient norm")
    assert norm.relative == pytest.approx(1.0, rel=1e-4)
    assert found.first_module is None


@on_ranks(2)
def test_a_stale_tie() -> None:
    model, _, _ = prepared("ddp", lambda: B(tied=True))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    found = verify_model(model, None)
    assert rows(found) == [("tie", "embed.weight", ())]
    assert found.differences[0].detail == "is no longer one tensor with head.weight"


@on_ranks(2)
def test_parameters_that_the_optimizer_lacks_or_holds_twice() -> None:
    model, _, optimizer = prepared("fsdp2")
    dropped = optimizer.param_groups[0]["params"].pop()
    second = torch.optim.SGD([model.head.weight, nn.Parameter(torch.ones(3))])
    names = {id(p): name for name, p in model.named_parameters()}
    found = verify_model(model, optimizer=[optimizer, second])
    assert [(one.what, one.name, one.detail[:20]) for one in found.differences] == [
        ("optimizer group", "head.weight", "is in 2 groups"),
        ("optimizer group", names[id(dropped)], "is in no optimizer g"),
        ("optimizer group", "", "of the parameters, 1"),
    ]
    assert "the first of shape (3,); they move nothing" in found.differences[2].detail


class Lazy(torch.optim.SGD):
    """Moves nothing that has one dimension."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim > 1:
                with torch.no_grad():
                    parameter.sub_(parameter.grad)


@on_ranks(2)
def test_a_parameter_that_no_step_moves() -> None:
    model, _, _ = prepared("fsdp2", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)))
    found = verify_model(model, optimizer=Lazy(model.parameters()))
    assert rows(found) == [("optimizer step", "0.bias", ())]
    assert found.differences[0].detail == "Lazy does not move it"


@on_ranks(2)
def test_a_wrong_buffer() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_buffer("table", torch.arange(4.0), persistent=False)
        return model

    model, _, _ = prepared("fsdp2", build)
    if dist.get_rank() == 1:
        model.table[2] = 7
    assert rows(verify_model(model)) == [("replica's buffer", "table", ())]
    model.table[2] = torch.nan
    found = verify_model(model)
    assert rows(found) == [("value", "table", ())]
    assert found.differences[0].detail == "holds nan"


@on_ranks(2)
def test_nan_and_memory_that_is_missing() -> None:
    model, _, _ = prepared("fsdp2")
    spoil(model, "norm.weight", torch.nan)
    found = verify_model(model, None, token_batch())
    assert rows(found)[0] == ("value", "norm.weight", (1,))
    assert found.differences[0].detail == "holds nan"
    assert {one.what for one in found.differences} == {"value", "output", "loss", "gradient", "gradient norm"}
    model.head.bias = nn.Parameter(torch.empty(21, device="meta"))
    found = verify_model(model, None, token_batch())
    assert ("value", "head.bias", ()) in rows(found)
    assert found.notes[-1] == "outputs and gradients, because tensors are on the meta device"


@pytest.mark.parametrize("mesh", ["tp", "fsdp2"])
@on_ranks(2)
def test_a_wrong_number_of_heads(mesh: str) -> None:
    model, reference, _ = prepared(mesh)
    attention = model.layers[1].attention
    attention.num_heads, attention.num_kv_heads = 2 * attention.num_heads, 2 * attention.num_kv_heads
    attention.head_dim //= 2
    found = verify_model(model, reference, token_batch())
    assert found.first_module == "layers.1.attention.o_proj"
    assert {one.what for one in found.differences} >= {"output", "loss", "gradient"}


@on_ranks(2)
def test_preparation_verifies_and_raises_the_table() -> None:
    torch.manual_seed(0)
    model = B()
    x = batch(model)
    done = parallelize_model(model, FSDP2Config(), torch.optim.SGD(model.parameters(), lr=0.1), verify=x)
    assert done.timings["verify"] > 0
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(half[0].parameters(), lr=0.1)
    texts = "not the one that was given.", "1.weight: is in no optimizer group"
    with fails_alike(ParallelismRuntimeError, *texts):
        parallelize_model(half, FSDP2Config(), optimizer, verify=True)
