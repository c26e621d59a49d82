"""What docs/promises.md says of values, through `parallelize_model` itself, on two and four gloo ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import export_pretrained, full_model_state, load_full_model_state
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import (
    clip_grad_norm,
    clip_grad_value,
    init_context,
    named_parameters_canonical,
    no_sync,
    parallelize_composer_model,
    parallelize_model,
    sampler_kwargs,
    summon_full_params,
)
from composer_dist.errors import ParallelismValueError
from composer_dist.models import ComposerModel
from tests.kit import models
from tests.kit.compare import full, values
from tests.kit.huggingface import pretrained_llama
from tests.kit.measure import record
from tests.kit.models import batch
from tests.kit.toy import Toy, built
from tests.kit.world import World

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def twins(build: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """One model twice: the reference, and the one to prepare."""
    return built(build, 3), built(build, 3)


def close(found: Tensor, expected: Tensor, name: str = "") -> None:
    torch.testing.assert_close(
        full(found), expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}"
    )


def same_parameters(model: nn.Module, reference: nn.Module, gradients: bool = False) -> None:
    """Every parameter, or every gradient, equals the reference's."""
    theirs = dict(named_parameters_canonical(model))
    for name, parameter in reference.named_parameters():
        mine = theirs[name]
        if not gradients:
            close(mine.detach(), parameter.detach(), name)
        elif parameter.grad is None:
            assert mine.grad is None, name
        else:
            assert mine.grad is not None, name
            close(mine.grad, parameter.grad, name)


def mine(x: Tensor, mesh: Any) -> Tensor:
    """This rank's part of a batch."""
    data = sampler_kwargs(mesh)
    return x.chunk(data["num_replicas"])[data["rank"]]


# P19: what no unit has


def leftovers() -> list[str]:
    reference, model = twins(models.B)
    config = ParallelismConfig(rules=[Rule("layers.0", shard=True), Rule("layers.2", shard=True)])
    done = parallelize_model(model, config)
    x = batch(model)
    reference(x).square().mean().backward()
    model(mine(x, done.mesh)).square().mean().backward()
    same_parameters(model, reference, gradients=True)
    for name, parameter in done.plain_parameters.items():
        assert not isinstance(parameter, DTensor)
        assert model.get_parameter(name) is parameter
    return list(done.plain_parameters)


@pytest.mark.promise(19)
def test_leftovers_are_listed_and_their_gradients_averaged(world2: World) -> None:
    names = [name for name, _ in models.B().named_parameters()]
    expected = [name for name in names if not name.startswith(("layers.0", "layers.2"))]
    assert world2(leftovers) == [expected] * 2


# P32, P33: two replicas of two shards


def clip_and_accumulate() -> float:
    reference, model = twins(models.scalar)
    done = parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2)))
    assert len(done.plain_parameters) == 3
    batches = [batch(model, step) for step in range(3)]
    for x in batches:
        reference(x).square().mean().backward()
    with no_sync(model):
        for x in batches[:2]:
            model(mine(x, done.mesh)).square().mean().backward()
    model(mine(batches[2], done.mesh)).square().mean().backward()
    same_parameters(model, reference, gradients=True)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    norm = clip_grad_norm(model, 0.05)
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    same_parameters(model, reference, gradients=True)
    return norm.item()


@pytest.mark.promise(32, 33)
def test_accumulation_and_clipping_on_replicas_of_shards(world4: World) -> None:
    norms = world4(clip_and_accumulate)
    assert norms[0] > 0.05
    assert len(set(norms)) == 1


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


def composed() -> dict[str, Any]:
    reference, model = twins(Composed)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (reference, model)]
    network = [p.detach().clone() for p in model.distance.parameters()]
    held = list(model.distance.parameters())
    done = parallelize_composer_model(model, optimizers[1], "fsdp")
    for step in range(3):
        x = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(step))
        part = mine(x, done.mesh)
        expected, outputs = reference(x), model(part)
        torch.testing.assert_close(outputs, mine(expected, done.mesh), rtol=1e-4, atol=1e-5)
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
    return {
        "units": {unit.name: unit.reshard_after_forward for unit in done.plan.units},
        "plain": list(done.plain_parameters),
        "root": sorted(name for name, unit in done.plan.parameter_units.items() if not unit),
        "tied": model.weight is model.head.weight,
    }


@pytest.mark.promise(85)
def test_a_composer_model_trains_like_one_process_with_parameters_of_its_own(world2: World) -> None:
    for found in world2(composed):
        assert set(found["units"]) == {"", "stack", "stack.blocks.0.mlp", "stack.blocks.1.mlp", "head"}
        assert found["units"]["stack.blocks.0.mlp"] is False
        assert found["plain"] == ["gain", "distance.net.weight", "distance.net.bias"]
        assert found["root"] == ["offset", "scale", "weight"]
        assert found["tied"]


# P86: activation checkpointing, asked for in every way


class Counting(models.Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def counting() -> models.B:
    return models.B(block=Counting)


def checkpoint(how: str) -> list[int]:
    reference, model = twins(counting)
    options: dict[str, Any] = {}
    config = ParallelismConfig(fsdp2=FSDP2Config(activation_checkpointing=how != "offload"))
    if how == "check_fn":
        options["activation_checkpointing_check_fn"] = lambda module: module is model.layers[1]
    elif how == "attribute":
        model.layers[1]._activation_checkpointing = True
    elif how == "function":
        model.activation_checkpointing_fn = lambda module: module is model.layers[1]
    elif how == "both":
        config = FSDP2Config(activation_checkpointing=True, activation_cpu_offload=True)  # type: ignore[assignment]
    elif how == "offload":
        config = FSDP2Config(activation_cpu_offload=True, reshard_after_forward=False)  # type: ignore[assignment]
    elif how == "rule":
        config = ParallelismConfig(rules=[Rule("layers.1", act_ckpt="composable")])
    names = list(model.state_dict())
    done = parallelize_model(model, config, **options)
    assert list(model.state_dict()) == names
    x = batch(model)
    reference(x).square().mean().backward()
    model(mine(x, done.mesh)).square().mean().backward()
    same_parameters(model, reference, gradients=True)
    return [layer.calls for layer in model.layers]


@pytest.mark.promise(26, 86)
@pytest.mark.parametrize(
    ("how", "calls"),
    [
        ("structure", [2, 2, 2]),
        ("check_fn", [1, 2, 1]),
        ("attribute", [1, 2, 1]),
        ("function", [1, 2, 1]),
        ("rule", [1, 2, 1]),
        ("both", [2, 2, 2]),
        ("offload", [1, 1, 1]),
    ],
)
def test_what_is_checkpointed_runs_twice_and_trains_the_same(
    world2: World, how: str, calls: list[int]
) -> None:
    assert world2(checkpoint, how) == [calls] * 2


def check_without_checkpointing() -> str:
    model = models.B()
    before = list(model.parameters())
    with pytest.raises(ParallelismValueError) as error:
        parallelize_model(model, "fsdp", activation_checkpointing_check_fn=lambda module: True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return str(error.value)


@pytest.mark.promise(86)
def test_a_check_function_alone_is_refused_with_the_model_untouched(world2: World) -> None:
    first, second = world2(check_without_checkpointing)
    assert first == second
    assert "activation_checkpointing_check_fn" in first


# P88: what travels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def travels(precision: str | None, mixed: Any, rules: list[Rule]) -> dict[str, Any]:
    model = models.M()
    config = ParallelismConfig(fsdp2=FSDP2Config(mixed_precision=mixed), rules=rules)
    parallelize_model(model, config, precision=precision)
    gathered: set[torch.dtype] = set()
    reduced: set[torch.dtype] = set()
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
    return {"gathered": gathered, "reduced": reduced, "output": output.dtype}


@pytest.mark.promise(88)
@pytest.mark.parametrize(
    ("precision", "mixed", "gathered", "reduced"),
    [
        (None, "DEFAULT", F32, F32),
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
def test_what_travels_is_what_the_table_says(
    world2: World, precision: str | None, mixed: Any, gathered: Any, reduced: Any
) -> None:
    for seen in world2(travels, precision, mixed, []):
        assert seen == {"gathered": {gathered}, "reduced": {reduced}, "output": gathered}


@pytest.mark.promise(88)
def test_a_rule_sets_a_unit_apart(world2: World) -> None:
    rules = [Rule(["0", "2", ""], shard=True), Rule("0", mixed_precision="FULL")]
    for seen in world2(travels, "amp_bf16", "PURE", rules):
        assert seen["gathered"] == seen["reduced"] == {F32, BF16}


def refused(precision: str | None, mixed: Any) -> str:
    model = models.M()
    with pytest.raises(ParallelismValueError) as error:
        parallelize_model(model, FSDP2Config(mixed_precision=mixed), precision=precision)
    assert type(model) is nn.Sequential
    return str(error.value)


@pytest.mark.promise(88)
@pytest.mark.parametrize(
    ("precision", "mixed", "text"),
    [
        (None, "PURE", "precision is None"),
        ("bf16", "DEFAULT", "amp_bf16"),
        ("fp32", "HALF", "'DEFAULT', 'PURE', 'FULL'"),
    ],
)
def test_wrong_combinations_are_refused_with_the_model_untouched(
    world2: World, precision: str | None, mixed: Any, text: str
) -> None:
    first, second = world2(refused, precision, mixed)
    assert text in first
    assert first == second


# P12: nobody waits


# P103: every public function after an evaluation


@contextmanager
def evaluated(models: tuple[Any, ...], x: Tensor) -> Iterator[None]:
    """The models right after an evaluation."""
    for one in models:
        with torch.no_grad():
            one.eval()(x)
    yield


def after_evaluation(reshard: bool | int) -> bool:
    reference, model = twins(models.tied)
    pair = (reference, model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in pair]
    done = parallelize_model(model, FSDP2Config(reshard_after_forward=reshard), optimizers[1])
    held = [p for group in optimizers[1].param_groups for p in group["params"]]
    x = batch(model)

    with evaluated(pair, x):
        state = full_model_state(model, ranks="all")
    assert list(state) == list(reference.state_dict())
    assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())

    for options in ({}, {"offload_to_cpu": True}, {"rank0_only": True, "writeback": False}):
        with evaluated(pair, x), summon_full_params(model, **options):  # type: ignore[arg-type]
            if not options.get("rank0_only") or dist.get_rank() == 0:
                found = dict(model.named_parameters())
                assert not any(isinstance(p, DTensor) for p in found.values())
                assert all(torch.equal(found[name], p) for name, p in reference.named_parameters())
    with evaluated(pair, x), summon_full_params(model), torch.no_grad():
        model.embed.weight.mul_(2)
    with torch.no_grad():
        reference.embed.weight.mul_(2)
    same_parameters(model, reference)

    other = {name: value + 0.125 for name, value in reference.state_dict().items()}
    with evaluated(pair, x):
        load_full_model_state(model, other if dist.get_rank() == 0 else {})
    reference.load_state_dict(other)
    same_parameters(model, reference)
    close(model(x), reference(x))

    reference(x).square().mean().backward()
    model(mine(x, done.mesh)).square().mean().backward()
    with evaluated(pair, x):
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(clip_grad_norm(model, 0.05), expected, rtol=1e-6, atol=0)
    same_parameters(model, reference, gradients=True)
    with evaluated(pair, x), summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            close(parameter.grad, reference.get_parameter(name).grad, name)
    with evaluated(pair, x):
        for optimizer in optimizers:
            optimizer.step()
    same_parameters(model, reference)
    assert model.head.weight is model.embed.weight
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    with evaluated(pair, x):
        close(model(x), reference(x))
    return True


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False])
def test_every_function_after_an_evaluation(world2: World, reshard: bool) -> None:
    assert all(world2(after_evaluation, reshard))


@pytest.mark.promise(103)
def test_every_function_after_an_evaluation_on_a_smaller_shard(world4: World) -> None:
    assert all(world4(after_evaluation, 2))


def clip_what_the_model_shows(reshard: bool, by: str) -> tuple[float, float]:
    """The largest gradient after clipping `model.parameters()` right after an evaluation."""
    reference, model = twins(models.tied)
    parallelize_model(model, FSDP2Config(reshard_after_forward=reshard))
    x = batch(model)
    for one in (reference, model):
        one(x).square().mean().backward()
    with torch.no_grad():
        model.eval()(x)
    if by == "norm":
        clip_grad_norm(model.parameters(), 0.01)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    else:
        clip_grad_value(model.parameters(), 0.01)
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
    found = (full(p.grad) for _, p in named_parameters_canonical(model))
    return (
        max(float(gradient.abs().max()) for gradient in found),
        max(float(p.grad.abs().max()) for p in reference.parameters()),
    )


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("by", ["norm", "value"])
def test_clipping_what_the_model_shows_after_an_evaluation(world2: World, reshard: bool, by: str) -> None:
    for found, expected in world2(clip_what_the_model_shows, reshard, by):
        assert found == pytest.approx(expected, rel=1e-4)


def export_after_evaluation(reshard: bool | int, path: str) -> Tensor:
    model = pretrained_llama(tied=True)
    parallelize_model(model, FSDP2Config(reshard_after_forward=reshard))
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids).logits
    export_pretrained(model, path)
    return logits


def exported(path: Path, logits: list[Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = pretrained_llama(tied=True).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    for found in logits:
        torch.testing.assert_close(loaded(torch.arange(12).view(2, 6)).logits, found)


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False])
def test_export_after_an_evaluation(world2: World, tmp_path: Path, reshard: bool) -> None:
    exported(tmp_path, world2(export_after_evaluation, reshard, str(tmp_path)))


@pytest.mark.promise(103)
def test_export_after_an_evaluation_on_a_smaller_shard(world4: World, tmp_path: Path) -> None:
    exported(tmp_path, world4(export_after_evaluation, 2, str(tmp_path)))
