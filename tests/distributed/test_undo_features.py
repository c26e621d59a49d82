"""The way back from what preparations do beside sharding: sequences in parts, adapters, low precision."""

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import context_parallel, parallelize_model, unparallelize_model
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.tensors.inner import inner_tensors
from tests.kit import huggingface
from tests.kit.compare import same, shape_of, values
from tests.kit.decoder import Decoder, token_batch
from tests.kit.measure import profiled
from tests.kit.meshes import config, ddp, mesh
from tests.kit.quantized import Float8Block, Stack, adam, float8_torchao
from tests.kit.toy import Toy, built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(114)
TOKENS = torch.arange(8).view(2, 4)


def bits(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor, and all that quantized ones are made of."""
    found = {}
    for name, one in model.state_dict(keep_vars=True).items():
        inner = inner_tensors(one.detach())
        found |= {f"{name}.{key}": part for key, part in inner.items()} or {name: one.detach()}
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    """One step that depends on nothing but the model, so that every way to train takes the same one."""
    outputs = model(inputs)
    outputs = outputs if isinstance(outputs, Tensor) else outputs.logits
    outputs.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def undone(
    make: Callable[[], nn.Module], wishes: Any, inputs: Tensor, *, rtol: float = 1e-4, **options: Any
) -> None:
    """A model that was prepared, trained and undone is one that was never prepared, with its values."""
    model, plain = built(make), built(make)
    optimizer, other = adam(model), adam(plain)
    fresh = shape_of(model)
    parallelize_model(model, wishes, optimizer, **options)
    step(model, optimizer, inputs)
    step(plain, other, inputs)
    unparallelize_model(model, optimizer)
    now = shape_of(model)
    assert now.keys() == fresh.keys()
    for name, one in fresh.items():
        assert now[name] == one, name
    found, expected = bits(model), bits(plain)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].dtype == one.dtype, name
        torch.testing.assert_close(found[name], one, rtol=rtol, atol=rtol, msg=f"{name}: {{}}".format)
    assert [p for group in optimizer.param_groups for p in group["params"]] == [
        p for p in model.parameters() if p.requires_grad
    ]
    held = [value for state in optimizer.state.values() for value in state.values()]
    assert held
    assert not any(isinstance(one, DTensor) for one in held)
    with torch.no_grad():  # bit for bit the function of a plain model with these values
        plain.load_state_dict(
            {k: v for k, v in model.state_dict().items() if not inner_tensors(v)}, strict=False
        )
        got, wanted = model.eval()(inputs), plain.eval()(inputs)
    assert torch.equal(getattr(got, "logits", got), getattr(wanted, "logits", wanted))
    model.train()
    plain.train()
    fresh_state = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    fresh_state.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, inputs)
    step(plain, fresh_state, inputs)
    same(bits(model), bits(plain))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "fsdp of lora": (huggingface.lora_llama, config(), {}),
    "tp of lora": (huggingface.lora_llama, mesh(dp_shard=1, tp=2), {}),
    "ddp of lora": (huggingface.lora_llama, ddp(), {}),
    "fsdp in amp_bf16": (Decoder, config(), {"precision": "amp_bf16", "rtol": 0.03}),
    "fsdp in bf16": (lambda: Decoder().bfloat16(), config(), {"rtol": 0.03}),
    "ddp in amp_bf16": (Decoder, ddp(), {"precision": "amp_bf16", "rtol": 0.03}),
    "fsdp of int8": (Stack, config(), {}),
    "fsdp of nf4": (lambda: Stack("nf4"), config(), {}),
    "ddp of int8": (Stack, ddp(), {}),
    "ddp of buffers": (Toy, ddp(), {}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_adapters_quantized_weights_and_low_precision(case: str) -> None:
    warnings.simplefilter("ignore")  # peft's and transformers' own
    make, wishes, options = CASES[case]
    if case.endswith("nf4"):
        pytest.importorskip("torchao", reason="NF4 is torchao's; it is an extra")
    undone(make, wishes, torch.arange(8) if make is Toy else TOKENS, **options)


@on_ranks(2)
def test_context_parallelism() -> None:
    """Attention, the positions' tables and the forward are the model's own, in training and after it."""
    model, plain = built(huggingface.tied_llama), built(huggingface.tied_llama)
    batch = {"input_ids": (ids := token_batch()), "labels": ids}
    optimizer, other = adam(model), adam(plain)
    fresh, attention = shape_of(model), nn.functional.scaled_dot_product_attention
    parallelize_model(model, mesh(dp_shard=1, cp=2), optimizer)
    with context_parallel(model, batch) as part:
        model(**part).loss.backward()
    plain(**batch).loss.backward()
    for one in (optimizer, other):
        one.step()
    unparallelize_model(model, optimizer)
    assert shape_of(model) == fresh
    assert nn.functional.scaled_dot_product_attention is attention
    with torch.no_grad():
        for name, value in values(plain).items():
            torch.testing.assert_close(values(model)[name], value, rtol=1e-4, atol=1e-5)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(ids).logits, plain(ids).logits)
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    assert model(**batch).loss < loss


@pytest.mark.filterwarnings("ignore:float8 without torch.compile")
@on_ranks(2)
def test_float8() -> None:
    with float8_torchao():
        model = built(lambda: nn.Sequential(Float8Block(), Float8Block()))
        before, fresh, x = values(model), shape_of(model), torch.ones(4, 16)
        expected = model(x)
        parallelize_model(model, config(), precision="amp_fp8")
        assert shape_of(model) != fresh
        assert not torch.equal(model(x), expected)
        unparallelize_model(model)
    assert shape_of(model) == fresh
    same(values(model), before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_ranks(2)
def test_state_in_few_bits_is_quantized_again_as_a_whole(name: str) -> None:
    """Of the 31 rows, rank 0 quantizes its 16, and rank 1 leaves its 15 as they are."""
    import torchao.optim

    with mock.patch.object(torch, "compile", lambda step, **options: step):
        model = built(lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 31)))
        plain = built(lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 31)))
        parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config()))
        optimizer, other = (getattr(torchao.optim, name)(one.parameters(), lr=0.01) for one in (model, plain))
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        step(model, optimizer, x)
        step(plain, other, x)
        unparallelize_model(model, optimizer)
        for one, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            for key, expected in other.state[theirs].items():
                found = optimizer.state[one][key]
                assert type(found) is type(expected)
                if isinstance(expected, Tensor) and expected.ndim:
                    found, expected = (
                        t.dequantize() if t.is_floating_point() and type(t) is not Tensor else t
                        for t in (found, expected)
                    )
                    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=1e-3)
        step(model, optimizer, x)
        step(plain, other, x)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, values(model))
    same(everywhere[0], everywhere[1])


@on_ranks(4)
def test_a_mesh_with_sequences_in_parts() -> None:
    model = built(huggingface.llama)
    fresh, before = shape_of(model), values(model)
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_shard=2, cp=2)))
    unparallelize_model(model)
    assert shape_of(model) == fresh
    same(values(model), before)


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
@on_ranks(2)
def test_beside_the_result_a_rank_holds_one_tensor(mode: str) -> None:
    """By torch's allocator: parts of gradients and state go when their whole tensors have come."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    nbytes = 512 * 512 * 4
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plan = TPConfig(plan={str(one): "colwise_gather" for one in range(6)})
    wishes = config() if mode == "fsdp" else ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=plan)
    parallelize_model(model, wishes, optimizer)

    def step_and_undo() -> None:
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()
        del one
        unparallelize_model(model, optimizer)

    in_this_thread = mock.patch.object(Agreement, "collectively", lambda self, step, body: body())
    with in_this_thread:  # where the profiler looks
        held = profiled(step_and_undo)
    result = 3 * 6 * nbytes  # parameters, gradients and state
    travelling = nbytes + nbytes // 2 + nbytes // 2  # one tensor whole, its message, and its part
    assert result < held <= result + travelling + 4096
