"""The steps one by one come to what the recipe comes to."""

import logging
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import (
    init_context,
    meta_init,
    parallelize_model,
    prepare_fully_shard,
    prepared,
    sync_module_states,
)
from composer_dist.distributed.forwards import is_checkpointed, is_compiled
from composer_dist.distributed.weights.initialize import assert_no_meta
from composer_dist.errors import ParallelismError, ParallelismKeyError, ParallelismValueError
from tests.kit.compare import close, fails_alike, same, values
from tests.kit.grids import crossed
from tests.kit.meshes import config
from tests.kit.toy import Buffers, Kinds, Toy, built, train
from tests.kit.world import on_ranks

MODELS: dict[str, Any] = {"Toy": Toy, "Kinds": Kinds, "Buffers": Buffers}


@pytest.mark.promise(109)
def test_libraries_imported_while_a_model_is_built_do_not_log_of_other_machines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for within in (nullcontext(), init_context(), init_context(empty=False), nullcontext()):
        with within:
            logging.getLogger("torchao").warning("Failed to load _C_mxfp8.so")
            logging.getLogger("torchao").error("an error")
    assert [record.message for record in caplog.records].count("Failed to load _C_mxfp8.so") == 2
    assert [record.message for record in caplog.records].count("an error") == 4


@pytest.mark.promise(87)
@crossed({"name": ["Toy", "Kinds"], "ranks, replicas": [(1, 1), (2, 1), (4, 2)]})
@on_ranks("ranks")
def test_shard_then_meta_init(name: str, ranks: int, replicas: int) -> None:
    with init_context():
        model, other, single = (MODELS[name]() for _ in range(3))
    torch.manual_seed(7)
    meta_init(single)
    torch.manual_seed(7)
    plan = prepare_fully_shard(model, config(replicas=replicas))
    assert all(p.is_meta for p in model.parameters())
    meta_init(model)
    assert_no_meta(model)
    done = parallelize_model(other, config(replicas=replicas))
    same(values(model), values(single))
    same(values(other), values(single))
    assert [unit.modules for unit in plan.units] == [unit.modules for unit in done.plan.units]


@pytest.mark.promise(80)
@crossed(
    {"name": ["Toy", "Kinds", "Buffers"], "others": ["meta", "cpu"], "ranks, replicas": [(2, 1), (4, 2)]}
)
@on_ranks("ranks")
def test_shard_then_sync(name: str, others: str, ranks: int, replicas: int) -> None:
    first = dist.get_rank() == 0
    single = built(MODELS[name])
    model = built(MODELS[name], 0 if first else 9, "cpu" if first else others)
    prepare_fully_shard(model, config(replicas=replicas))
    sync_module_states(model, single.state_dict() if first else {})
    assert_no_meta(model)
    same(values(model), values(single))


@on_ranks(2)
def test_sync_takes_another_dtype() -> None:
    state, model = built().bfloat16().state_dict(), built(seed=4)
    prepare_fully_shard(model, config())
    sync_module_states(model, state if dist.get_rank() == 0 else {})
    expected = {name: value.float() for name, value in state.items() if value.is_floating_point()}
    found = values(model)
    same({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("lacks", ParallelismKeyError, "Rank 0: full_state_dict has no 'row'."),
        ("shape", ParallelismValueError, "Rank 0: row: shape (3,) in full_state_dict, (1, 8) in the model."),
        ("buffer", ParallelismKeyError, "Rank 0: full_state_dict has no 'layers.0.table', which is on"),
        ("plain", ParallelismValueError, "The model is not sharded; call prepare_fully_shard first."),
    ],
)
@on_ranks(2)
def test_sync_refuses_on_every_rank(what: str, kind: type, text: str) -> None:
    model = built(device="meta" if what == "buffer" else "cpu")
    state = dict(built().state_dict())
    if what == "lacks":
        del state["row"]
    elif what == "shape":
        state["row"] = torch.ones(3)
    if what != "plain":
        prepare_fully_shard(model, config())
    with fails_alike(kind, text):
        sync_module_states(model, state if dist.get_rank() == 0 else {})


@on_ranks(2)
def test_prepare_fully_shard_trains_like_the_recipe() -> None:
    """The scalar stays whole; its gradient is averaged here as well. Hooks and attributes are kept."""
    model, single = built(), built()
    model.embed.weight.no_decay = True
    calls: list[int] = []
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    prepare_fully_shard(model, {"fsdp2": {}}, auto_wrap_policy=lambda m: isinstance(m, nn.BatchNorm1d))
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight.no_decay is True
    assert not isinstance(model.scale, DTensor)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    train(single, torch.optim.SGD(single.parameters(), 0.1), 3, whole=True)
    assert len(calls) == 3
    close(values(model), values(single))


@on_ranks(2)
def test_prepare_fully_shard_refuses_on_every_rank_before_anything_is_touched() -> None:
    model = built()
    before = list(model.parameters())

    def policy(module: nn.Module) -> bool:
        if dist.get_rank() == 1:
            raise ValueError("no such module")
        return True

    with fails_alike(ParallelismValueError, "Rank 1: "):
        prepare_fully_shard(model, FSDP2Config(), auto_wrap_policy=policy)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.promise(87)
@on_ranks(2)
def test_prepare_fully_shard_does_all_that_it_plans() -> None:
    """Recomputation and compilation are applied, and the result computes what the recipe's does."""
    settings = ParallelismConfig(activation_checkpointing=True, compile={"backend": "aot_eager"})
    model, other = (built(Blocks) for _ in range(2))
    plan = prepare_fully_shard(model, settings)
    parallelize_model(other, settings)
    assert len(plan.units) > 1
    blocks = [dict(model.named_modules())[one.module] for one in plan.checkpointing]
    assert blocks
    assert all(is_checkpointed(block) and is_compiled(block) for block in blocks)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with warnings.catch_warnings(action="ignore"):  # Dynamo reads .grad of tensors that are not leaves
        losses = [one(x).square().mean().item() for one in (model, other)]
    assert losses[0] == losses[1]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.promise(87)
def test_prepare_fully_shard_warns_as_its_plan_and_remembers_the_buckets() -> None:
    model, rules = Blocks(), [Rule("layers", shard=True)]
    with pytest.warns(UserWarning, match="layers is a ModuleList, .* its children are used") as caught:
        plan = prepare_fully_shard(model, ParallelismConfig(rules=rules, bucket_bytes=1 << 20))
    assert {one.filename for one in caught} == {__file__}
    assert plan.warnings
    assert prepared.record(model).bucket_bytes == 1 << 20


def aliased() -> nn.Module:
    model = Blocks()
    model.layers[0][0].bias = nn.Parameter(model.layers[0][0].weight.data[0])
    return model


@pytest.mark.promise(87)
@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (Blocks, ParallelismConfig(ddp=DDPConfig()), "only shards; use parallelize_model for DDP"),
        (Blocks, ParallelismConfig(tp=TPConfig()), "parallelize_model for DDP and tensor parallelism"),
        (Blocks, ParallelismConfig(sync="rank0"), "sync='rank0' has no effect; call sync_module_states"),
        (Blocks, ParallelismConfig(transport="memory"), "transport='memory' has no effect"),
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
