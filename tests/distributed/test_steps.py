"""The steps one by one come to what the recipe comes to."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import (
    init_context,
    meta_init,
    parallelize_model,
    prepare_fully_shard,
    sync_module_states,
)
from composer_dist.distributed.forwards import is_checkpointed, is_compiled
from composer_dist.distributed.weights.initialize import assert_no_meta
from composer_dist.errors import ParallelismError, ParallelismKeyError, ParallelismValueError
from tests.kit.compare import close, same, values
from tests.kit.meshes import config
from tests.kit.toy import Buffers, Kinds, Toy, built, train
from tests.kit.world import run

MODELS: dict[str, Any] = {"Toy": Toy, "Kinds": Kinds, "Buffers": Buffers}


@pytest.mark.promise(87)
@pytest.mark.parametrize("name", ["Toy", "Kinds"])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_shard_then_meta_init(name: str, size: int, replicas: int) -> None:
    with init_context():
        reference = MODELS[name]()
    torch.manual_seed(7)
    meta_init(reference)
    for found in run(shard_and_init, size, name, replicas):
        same(found["steps"], values(reference))
        same(found["recipe"], values(reference))
        assert found["units"][0] == found["units"][1]


def shard_and_init(name: str, replicas: int) -> dict[str, Any]:
    with init_context():
        model, other = MODELS[name](), MODELS[name]()
    torch.manual_seed(7)
    plan = prepare_fully_shard(model, config(replicas=replicas))
    assert all(p.is_meta for p in model.parameters())
    meta_init(model)
    assert_no_meta(model)
    done = parallelize_model(other, config(replicas=replicas))
    return {
        "steps": values(model),
        "recipe": values(other),
        "units": [[unit.modules for unit in plan.units], [unit.modules for unit in done.plan.units]],
    }


@pytest.mark.promise(80)
@pytest.mark.parametrize("name", ["Toy", "Kinds", "Buffers"])
@pytest.mark.parametrize("others", ["meta", "cpu"])
@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)])
def test_shard_then_sync(name: str, others: str, size: int, replicas: int) -> None:
    expected = values(built(MODELS[name]))
    for found in run(shard_and_sync, size, name, others, replicas):
        same(found, expected)


def shard_and_sync(name: str, others: str, replicas: int) -> dict[str, torch.Tensor]:
    first = dist.get_rank() == 0
    full_state = built(MODELS[name]).state_dict() if first else {}
    model = built(MODELS[name], 0 if first else 9, "cpu" if first else others)
    prepare_fully_shard(model, config(replicas=replicas))
    sync_module_states(model, full_state)
    assert_no_meta(model)
    return values(model)


def test_sync_takes_another_dtype_and_trains_on() -> None:
    expected = {
        name: v.bfloat16().float() for name, v in built().state_dict().items() if v.is_floating_point()
    }
    for found in run(sync_half, 2):
        same({name: found[name] for name in expected}, expected)


def sync_half() -> dict[str, torch.Tensor]:
    full_state = built().bfloat16().state_dict() if dist.get_rank() == 0 else {}
    model = built(seed=4)
    prepare_fully_shard(model, config())
    sync_module_states(model, full_state)
    return values(model)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("lacks", ParallelismKeyError, "Rank 0: full_state_dict has no 'row'."),
        ("shape", ParallelismValueError, "Rank 0: row: shape (3,) in full_state_dict, (1, 8) in the model."),
        ("buffer", ParallelismKeyError, "Rank 0: full_state_dict has no 'layers.0.table', which rank 0's"),
        ("plain", ParallelismValueError, "The model is not sharded; call prepare_fully_shard first."),
    ],
)
def test_sync_refuses_on_every_rank(what: str, kind: type, text: str) -> None:
    results = run(sync_refused, 2, what)
    assert results[0] == results[1]
    assert results[0][0] is kind
    assert results[0][1].startswith(text)


def sync_refused(what: str) -> tuple[type, str]:
    model = built(device="meta" if what == "buffer" else "cpu")
    state = dict(built().state_dict())
    if what == "lacks":
        del state["row"]
    elif what == "shape":
        state["row"] = torch.ones(3)
    if what != "plain":
        prepare_fully_shard(model, config())
    with pytest.raises(ParallelismError) as error:
        sync_module_states(model, state if dist.get_rank() == 0 else {})
    return type(error.value), str(error.value)


def test_prepare_fully_shard_trains_like_the_recipe() -> None:
    model = built()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    for found in run(shard_and_train, 2):
        close(found, values(model))


def shard_and_train() -> dict[str, torch.Tensor]:
    """The scalar stays whole; its gradient is averaged here as well. Hooks and attributes are kept."""
    model = built()
    model.embed.weight.no_decay = True
    calls: list[int] = []
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    prepare_fully_shard(model, {"fsdp2": {}}, auto_wrap_policy=lambda m: isinstance(m, nn.BatchNorm1d))
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight.no_decay is True
    assert not isinstance(model.scale, DTensor)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    assert len(calls) == 3
    return values(model)


def test_prepare_fully_shard_refuses_on_every_rank_before_anything_is_touched() -> None:
    results = run(shard_refused, 2)
    assert results[0] == results[1]
    assert results[0].startswith("Rank 1: ")


def shard_refused() -> str:
    model = built()
    before = list(model.parameters())

    def policy(module: nn.Module) -> bool:
        if dist.get_rank() == 1:
            raise ValueError("no such module")
        return True

    with pytest.raises(ParallelismValueError) as error:
        prepare_fully_shard(model, FSDP2Config(), auto_wrap_policy=policy)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return str(error.value)


@pytest.mark.promise(87)
def test_prepare_fully_shard_does_all_that_it_plans() -> None:
    """Recomputation and compilation are applied, and the result trains as after the recipe."""
    for units, checkpointed, compiled, losses in run(shard_recomputed_and_compiled, 2):
        assert units > 1
        assert checkpointed
        assert compiled
        assert losses[0] == losses[1]


def shard_recomputed_and_compiled() -> tuple[int, bool, bool, list[float]]:
    settings = ParallelismConfig(activation_checkpointing=True, compile={"backend": "aot_eager"})
    model, other = (built(Blocks) for _ in range(2))
    plan = prepare_fully_shard(model, settings)
    parallelize_model(other, settings)
    blocks = [dict(model.named_modules())[one.module] for one in plan.checkpointing]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with warnings.catch_warnings(action="ignore"):  # Dynamo reads .grad of tensors that are not leaves
        losses = [one(x).square().mean().item() for one in (model, other)]
    checkpointed = bool(blocks) and all(map(is_checkpointed, blocks))
    return len(plan.units), checkpointed, bool(blocks) and all(map(is_compiled, blocks)), losses


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def aliased() -> nn.Module:
    model = Blocks()
    model.layers[0][0].bias = nn.Parameter(model.layers[0][0].weight.data[0])
    return model


@pytest.mark.promise(87)
@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (Blocks, ParallelismConfig(ddp=DDPConfig()), r"prepare_fully_shard shards; DDP \(ddp=\)"),
        (Blocks, ParallelismConfig(tp=TPConfig()), "parallelize_model for tensor parallelism"),
        (Blocks, ParallelismConfig(sync="rank0"), "sync='rank0' has no effect; call sync_module_states"),
        (aliased, ParallelismConfig(), "share memory without being one parameter"),
    ],
)
def test_prepare_fully_shard_refuses_what_it_does_not_do(
    build: Any, settings: ParallelismConfig, message: str
) -> None:
    model = build()
    with pytest.raises(ParallelismError, match=message):
        prepare_fully_shard(model, settings)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
