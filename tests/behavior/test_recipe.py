"""What docs/promises.md says of values, through `parallelize_model` itself, on two and four gloo ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import ComposerModel, FSDP2Config, ParallelismConfig, Rule
from composer_dist.checkpoint import export_pretrained, full_model_state, load_full_model_state
from composer_dist.distributed import (
    clip_grad_norm,
    clip_grad_value,
    init_context,
    parallelize_composer_model,
    parallelize_model,
    summon_full_params,
)
from tests.kit import models
from tests.kit.compare import full, part_of, same, same_parameters, values
from tests.kit.grids import slow
from tests.kit.huggingface import pretrained_llama
from tests.kit.measure import record
from tests.kit.models import batch
from tests.kit.toy import Toy, built
from tests.kit.world import World, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
RESHARD = pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (2, False), slow(4, 2)])


def twins(build: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """One model twice: the reference, and the one to prepare."""
    return built(build, 3), built(build, 3)


# P37: seeds that differ


def other_seeds(on_meta: bool) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    with init_context(empty=on_meta):
        model = Toy()
    config = ParallelismConfig(sync="auto" if on_meta else "rank0")
    done = parallelize_model(model, config)
    whole = {name: p.detach().clone() for name, p in done.plain_parameters.items()}
    whole |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return whole | {"checked": full(model.embed.weight.detach())}


@pytest.mark.promise(37)
@pytest.mark.parametrize("on_meta", [True, False])
def test_what_stays_whole_is_equal_on_all_ranks_whatever_their_seeds(world2: World, on_meta: bool) -> None:
    first, second = world2(other_seeds, on_meta)
    assert {"scale", "shift", "layers.0.table", "layers.0.norm.running_var"} < first.keys()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if not on_meta:
        expected = values(built(seed=0))
        assert all(torch.equal(first[name], expected[name]) for name in first if name != "checked")


# P85: a ComposerModel


class Distance(torchmetrics.Metric):
    """A metric with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor) -> None:
        self.total += self.net(outputs).detach().square().sum()

    def compute(self) -> Tensor:
        return self.total


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(), models.Block()])
        self.fsdp_wrap_fn = lambda module: (
            {"reshard_after_forward": False} if isinstance(module, models.Mlp) else False
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Composed(ComposerModel):
    """Holds parameters itself: a vector, a scalar, one that is its child's, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.offset = nn.Parameter(torch.randn(8), requires_grad=False)
        self.stack = Stack()
        self.head = nn.Linear(8, 8)
        self.weight = self.head.weight
        self.distance = Distance()

    def forward(self, batch: Any) -> Any:
        x = self.stack(batch * self.scale + self.offset)
        return self.head(x) * self.gain + x @ self.weight

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return (outputs - batch).square().mean()


@pytest.mark.promise(85)
@on_ranks(2)
def test_a_composer_model_trains_like_one_process_with_parameters_of_its_own() -> None:
    reference, model = twins(Composed)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (reference, model)]
    network = [p.detach().clone() for p in model.distance.parameters()]
    held = list(model.distance.parameters())
    done = parallelize_composer_model(model, optimizers[1], "fsdp")
    for step in range(3):
        x = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(step))
        part = part_of(x, done.mesh)
        expected, outputs = reference(x), model(part)
        torch.testing.assert_close(outputs, part_of(expected, done.mesh), rtol=1e-4, atol=1e-5)
        reference.loss(expected, x).backward()
        model.loss(outputs, part).backward()
        same_parameters(model, reference, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(model, reference)
        for one in (reference, model):
            one.distance.update(one.eval()(x).detach())
    torch.testing.assert_close(model.distance.compute(), reference.distance.compute(), rtol=1e-4, atol=0)
    assert all(a is b for a, b in zip(held, model.distance.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(network, model.distance.parameters(), strict=True))
    units = {unit.name: unit.reshard_after_forward for unit in done.plan.units}
    assert set(units) == {"", "stack", "stack.blocks.0.mlp", "stack.blocks.1.mlp", "head"}
    assert units["stack.blocks.0.mlp"] is False
    assert [units[name] for name in ("stack", "stack.blocks.1.mlp", "head")] == [False] * 3  # end the forward
    assert list(done.plain_parameters) == ["gain", "distance.net.weight", "distance.net.bias"]
    root = sorted(name for name, unit in done.plan.parameter_units.items() if not unit)
    assert root == ["offset", "scale", "weight"]
    assert model.weight is model.head.weight


# P86: activation checkpointing, asked for in every way


class Counting(models.Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.promise(26, 86)
@pytest.mark.parametrize(
    ("how", "recompute", "offload", "calls"),
    [
        ("structure", True, False, [2, 2, 2]),
        ("structure", True, True, [2, 2, 2]),
        ("structure", False, True, [1, 1, 1]),
        ("check_fn", True, False, [1, 2, 1]),
        ("attribute", True, False, [1, 2, 1]),
        ("attribute", False, False, [1, 1, 1]),
        ("function", True, False, [1, 2, 1]),
        ("function", True, True, [1, 2, 1]),
        ("rule", False, False, [1, 2, 1]),
    ],
)
@on_ranks(2)
def test_what_is_checkpointed_runs_twice_and_trains_the_same(
    how: str, recompute: bool, offload: bool, calls: list[int]
) -> None:
    reference, model = twins(lambda: models.B(block=Counting))
    options: dict[str, Any] = {}
    config = ParallelismConfig(
        fsdp2=FSDP2Config(
            activation_checkpointing=recompute,
            activation_cpu_offload=offload,
            reshard_after_forward=recompute,
        )
    )
    if how == "check_fn":
        options["activation_checkpointing_check_fn"] = lambda module: module is model.layers[1]
    elif how == "attribute":
        model._activation_checkpointing = False
        model.layers[1]._activation_checkpointing = True
    elif how == "function":
        model.activation_checkpointing_fn = lambda module: module is model.layers[1]
    elif how == "rule":
        config = ParallelismConfig(rules=[Rule("layers.1", act_ckpt="composable")])
    names = list(model.state_dict())
    done = parallelize_model(model, config, **options)
    assert list(model.state_dict()) == names
    x = batch(model)
    reference(x).square().mean().backward()
    model(part_of(x, done.mesh)).square().mean().backward()
    same_parameters(model, reference, gradients=True)
    assert [layer.calls for layer in model.layers] == calls


# P88: what travels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def travels(precision: str | None, mixed: Any, rules: list[Rule]) -> dict[str, Any]:
    model = models.M()
    config = ParallelismConfig(fsdp2=FSDP2Config(mixed_precision=mixed), rules=rules)
    parallelize_model(model, config, precision=precision)
    gathered: set[torch.dtype] = set()
    reduced: set[torch.dtype] = set()
    computed: set[torch.dtype] = set()
    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(lambda module, args: computed.add(module.weight.dtype))
    with (
        record(gathered, "all_gather_single", "all_gather_into_tensor"),
        record(reduced, "reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        output = model(batch(model))
        output.float().square().mean().backward()
    for parameter in model.parameters():
        assert parameter.dtype is F32
        assert parameter.grad is not None
        assert parameter.grad.dtype is F32
    return {"gathered": gathered, "reduced": reduced, "computed": computed, "output": output.dtype}


@pytest.mark.promise(88)
@pytest.mark.parametrize(
    ("precision", "mixed", "gathered", "reduced"),
    [
        (None, "DEFAULT", F32, F32),
        ("fp32", "DEFAULT", F32, F32),
        ("fp32", "PURE", F32, F32),
        ("amp_bf16", "DEFAULT", BF16, F32),
        ("amp_bf16", "PURE", BF16, BF16),
        ("amp_bf16", "FULL", F32, F32),
        ("amp_fp16", "DEFAULT", F16, F32),
        ("amp_fp16", "PURE", F16, F16),
        ("amp_fp16", "FULL", F32, F32),
        ("fp32", {"param_dtype": "bf16", "reduce_dtype": "fp16"}, BF16, F16),
    ],
)
@on_ranks(2)
def test_what_travels_and_computes_is_what_the_table_says(
    precision: str | None, mixed: Any, gathered: Any, reduced: Any
) -> None:
    seen = travels(precision, mixed, [])
    assert seen["gathered"] == seen["computed"] == {seen["output"]} == {gathered}
    assert seen["reduced"] == {reduced}


@pytest.mark.promise(88)
@on_ranks(2)
def test_a_rule_sets_a_unit_apart() -> None:
    rules = [Rule(["0", "2", ""], shard=True), Rule("0", mixed_precision="FULL")]
    seen = travels("amp_bf16", "PURE", rules)
    assert seen["gathered"] == seen["reduced"] == seen["computed"] == {F32, BF16}


# P103: every public function right after an evaluation


@pytest.mark.promise(103)
@pytest.mark.parametrize(("ranks", "reshard"), [slow(2, True), (2, False), slow(4, 2)])
@on_ranks("ranks")
def test_every_function_after_an_evaluation(ranks: int, reshard: bool | int) -> None:
    reference, model = twins(models.tied)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (reference, model)]
    done = parallelize_model(model, FSDP2Config(reshard_after_forward=reshard), optimizers[1])
    held = [p for group in optimizers[1].param_groups for p in group["params"]]
    x = batch(model)

    def evaluate() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), reference.eval()(x))

    evaluate()
    state = full_model_state(model, ranks="all")
    assert list(state) == list(reference.state_dict())
    assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())

    for options in ({}, {"offload_to_cpu": True}, {"rank0_only": True, "writeback": False}):
        evaluate()
        with summon_full_params(model, **options):  # type: ignore[arg-type]
            if not options.get("rank0_only") or dist.get_rank() == 0:
                found = dict(model.named_parameters())
                assert not any(isinstance(p, DTensor) for p in found.values())
                assert all(torch.equal(found[name], p) for name, p in reference.named_parameters())
    evaluate()
    with summon_full_params(model), torch.no_grad():
        model.embed.weight.mul_(2)
        reference.embed.weight.mul_(2)
    same_parameters(model, reference)

    other = {name: value + 0.125 for name, value in reference.state_dict().items()}
    evaluate()
    load_full_model_state(model, other if dist.get_rank() == 0 else {})
    reference.load_state_dict(other)
    same_parameters(model, reference)

    for _ in range(2):
        reference(x).square().mean().backward()
        model(part_of(x, done.mesh)).square().mean().backward()
        evaluate()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(clip_grad_norm(model.parameters(), 0.05), expected, rtol=1e-6, atol=0)
        same_parameters(model, reference, gradients=True)
        evaluate()
        nn.utils.clip_grad_value_(reference.parameters(), 0.001)
        clip_grad_value(model.parameters(), 0.001)
        same_parameters(model, reference, gradients=True)
        evaluate()
        with summon_full_params(model, with_grads=True):
            same_parameters(model, reference, gradients=True)
        evaluate()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(model, reference)
    assert model.head.weight is model.embed.weight
    evaluate()
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))


@pytest.mark.promise(103)
@RESHARD
@on_ranks("ranks")
def test_export_after_an_evaluation(tmp_path: Path, ranks: int, reshard: bool | int) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = pretrained_llama(tied=True), torch.arange(12).view(2, 6)
    parallelize_model(model, FSDP2Config(reshard_after_forward=reshard))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    export_pretrained(model, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same(dict(loaded.state_dict()), dict(pretrained_llama(tied=True).state_dict()))
    torch.testing.assert_close(loaded(ids).logits, logits)
