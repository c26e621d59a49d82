"""FSDP2 from the plan: the prepared model is the same function, on two and four gloo ranks."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import named_parameters_canonical, parallelize_model, plan_parallelism
from composer_dist.distributed.sharding.apply import check_offload
from composer_dist.errors import (
    ParallelismError,
    ParallelismKeyError,
    ParallelismRuntimeError,
    ParallelismValueError,
)
from tests.kit import models
from tests.kit.compare import assert_same_training, full
from tests.kit.models import batch
from tests.kit.world import World

# On a CPU the output of a biased linear layer over sequences is a view, which torch 2.13 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

Build = Callable[[], nn.Module]


def _units(build: Build, config: Any = "fsdp", **options: Any) -> tuple[list[str], list[str]]:
    """Trains beside the reference; the units, and the parameters that stayed plain."""
    done = assert_same_training(build, config, **options)
    for name, parameter in named_parameters_canonical(done.model):
        assert isinstance(parameter, DTensor) == (name not in done.plain_parameters), name
    return ["+".join(unit.modules) for unit in done.plan.units], list(done.plain_parameters)


def _rules(*rules: Rule, **options: Any) -> ParallelismConfig:
    return ParallelismConfig(rules=rules, **options)


BLOCKS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.promise(22, 24, 84)
@pytest.mark.parametrize(
    ("build", "units", "plain"),
    [
        (models.M, ["", "0", "2"], []),
        (models.B, ["", *BLOCKS], []),
        (models.tied, ["", *BLOCKS], []),
        (models.mamba, ["", *BLOCKS], []),
        (models.bert, ["", *BLOCKS], []),
        (
            models.EncoderDecoder,
            ["", *(f"{h}.block.{i}" for h in ("encoder", "decoder") for i in (0, 1))],
            [],
        ),
        (models.moe, ["", *BLOCKS], []),
        (models.tied_blocks, ["", *BLOCKS], []),
        (models.parent_child, ["", *BLOCKS], []),
        (models.scalar, ["", *BLOCKS], [f"{block}.gain" for block in BLOCKS]),
        (models.non_contiguous, ["", *BLOCKS], []),
        (models.dtypes, ["", *(f"{block}{end}" for block in BLOCKS for end in ("", ".norm"))], []),
        (models.own_dtype, ["", *(f"{block}{end}" for block in BLOCKS for end in ("", ".linear"))], []),
        (models.borrowed, ["", *BLOCKS], []),
        (models.Shell, ["", "net.0", "net.2", "net.4"], []),
        (models.Composers, [""], []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_structure_trains_like_one_process(
    world2: World, build: Build, units: list[str], plain: list[str]
) -> None:
    assert world2(_units, build) == [(units, plain)] * 2


@pytest.mark.promise(15, 19, 22)
@pytest.mark.parametrize(
    ("build", "rules", "units", "plain"),
    [
        (models.B, [Rule("layers.0.mlp", shard=True), Rule("layers.0", shard=True)], 2, 25),
        (models.B, [Rule("re:layers.*mlp", shard=True), Rule("", shard=True)], 4, 0),
        (models.tied, [Rule("embed", shard=True), Rule("head", shard=True)], 2, 32),
        (models.tied, [Rule("embed", shard=True), Rule("head", shard=True), Rule("", shard=True)], 1, 0),
        (models.EncoderDecoder, [Rule("encoder", shard=False)], 3, 21),
        (models.Composers, [Rule("m2.a", shard=True, reshard_after_forward=False)], 1, 6),
        (models.moe, [Rule(models.Mlp, shard=True), Rule("", shard=True)], 7, 0),
    ],
)
def test_rules_train_like_one_process(
    world2: World, build: Build, rules: Sequence[Rule], units: int, plain: int
) -> None:
    found = world2(_units, build, _rules(*rules))
    assert [(len(one), len(left)) for one, left in found] == [(units, plain)] * 2


def _expect_warning(build: Build, config: Any, text: str, **options: Any) -> Any:
    with pytest.warns(UserWarning, match=text):
        return _units(build, config, **options)


@pytest.mark.promise(14)
def test_a_list_stands_for_its_blocks(world2: World) -> None:
    config = _rules(Rule("layers", shard=True), Rule("", shard=True))
    assert world2(_expect_warning, models.B, config, "its children are used") == [(["", *BLOCKS], [])] * 2


def _in_place() -> None:
    model = models.tied()
    modules = list(model.modules())
    names = list(model.state_dict())
    parallelize_model(model, "fsdp")
    assert all(now is before for now, before in zip(model.modules(), modules, strict=True))
    assert list(model.state_dict()) == names
    assert [isinstance(m, FSDPModule) for m in (model, model.layers[1], model.norm)] == [True, True, False]
    assert isinstance(model.layers[1], models.Block)


@pytest.mark.promise(22)
def test_nothing_is_replaced_or_renamed(world2: World) -> None:
    world2(_in_place)


def _attributes_and_hooks() -> list[str]:
    model = models.scalar()
    calls: list[str] = []
    for name in ("layers.0.linear.weight", "layers.0.gain"):
        parameter = model.get_parameter(name)
        parameter.no_decay = True  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    parallelize_model(model, "fsdp")
    assert model.get_parameter("layers.0.linear.weight").no_decay
    assert model.get_parameter("layers.0.gain").no_decay
    model(batch(model)).square().mean().backward()
    return sorted(calls)


@pytest.mark.promise(103)
def test_attributes_and_post_accumulate_hooks_survive(world2: World) -> None:
    assert world2(_attributes_and_hooks) == [["layers.0.gain", "layers.0.linear.weight"]] * 2


def _gradient_hook() -> None:
    model = models.M()
    model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ParallelismValueError, match="Gradient hooks.*0.weight"):
        parallelize_model(model, "fsdp")
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.promise(103)
def test_gradient_hooks_are_refused_by_name(world2: World) -> None:
    world2(_gradient_hook)


def _step_after_eval(reshard: bool | int) -> None:
    torch.manual_seed(0)
    reference, model = models.B(), models.B()
    reference.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, model)]
    parallelize_model(model, FSDP2Config(reshard_after_forward=reshard), optimizers[1])
    x = batch(model)
    for one, optimizer in zip((reference, model), optimizers, strict=True):
        one(x).square().mean().backward()
        with torch.no_grad():
            one.eval()(x)
        optimizer.step()
        one.zero_grad()
        with torch.no_grad():
            one(x)
    for name, parameter in named_parameters_canonical(model):
        torch.testing.assert_close(full(parameter), reference.get_parameter(name), rtol=1e-4, atol=1e-6)


@pytest.mark.promise(103)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_an_optimizer_steps_after_an_evaluation(world4: World, reshard: bool | int) -> None:
    world4(_step_after_eval, reshard)


def _shard_first(model: nn.Module) -> None:
    fully_shard(model.layers[1], mesh=init_device_mesh("cpu", (2,)))


def _already_sharded() -> list[str]:
    config = _rules(Rule(r"re:layers\.\d(\.mlp)?", shard=True), Rule("", shard=True))
    with pytest.warns(UserWarning, match=r"Sharded already, left as it is: layers.1, layers.1.mlp\."):
        done = assert_same_training(models.B, config, first=_shard_first)
    return [unit.name for unit in done.plan.units]


@pytest.mark.promise(16)
def test_what_the_user_has_sharded_is_left_and_the_rest_prepared(world2: World) -> None:
    units = ["", "layers.0", "layers.0.mlp", "layers.2", "layers.2.mlp"]
    assert world2(_already_sharded) == [units] * 2


def _own_mesh(shape: tuple[int, ...], names: Any) -> ParallelismConfig:
    return ParallelismConfig(
        fsdp2=FSDP2Config(device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    )


def _on_own_mesh(shape: tuple[int, ...], names: Any) -> tuple[list[str], tuple[int, ...]]:
    done = assert_same_training(models.tied, lambda: _own_mesh(shape, names))
    weight = done.model.get_parameter("embed.weight")
    assert isinstance(weight, DTensor)
    return [str(place) for place in weight.placements], tuple(weight.to_local().shape)


@pytest.mark.promise(89)
@pytest.mark.parametrize("names", [None, ("a", "b")])
def test_a_2d_mesh_of_the_user_s_replicates_and_shards(world4: World, names: Any) -> None:
    assert world4(_on_own_mesh, (2, 2), names) == [(["R", "S(0)"], (8, 8))] * 4


@pytest.mark.promise(89)
@pytest.mark.parametrize("names", [None, ("a",)])
def test_a_1d_mesh_of_the_user_s_shards(world2: World, names: Any) -> None:
    assert world2(_on_own_mesh, (2,), names) == [(["S(0)"], (8, 8))] * 2


@pytest.mark.promise(34, 89)
@pytest.mark.parametrize("build", [models.scalar, models.EncoderDecoder])
def test_replicas_of_shards(world4: World, build: Build) -> None:
    config = ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2))
    first, *others = world4(_units, build, config)
    assert first[0][0] == ""
    assert others == [first] * 3


@pytest.mark.promise(34)
def test_replicas_without_shards(world2: World) -> None:
    config = ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1))
    assert world2(_units, models.tied, config) == [(["", *BLOCKS], [])] * 2


@pytest.mark.promise(24)
def test_resharding_to_fewer_ranks(world4: World) -> None:
    config = FSDP2Config(reshard_after_forward=2)
    assert world4(_units, models.B, config) == [(["", *BLOCKS], [])] * 4


def _options(module: nn.Module) -> Any:
    return {"reshard_after_forward": False} if isinstance(module, models.Pair) else False


def _tie(target: str, source: str) -> Build:
    """Composer's nested model with one tie."""

    def build() -> nn.Module:
        model = models.Composers()
        owner, _, key = target.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(source))
        return model

    return build


def _wrap_attributes(tie: tuple[str, str] | None, wrapped: Sequence[str]) -> tuple[list[str], list[str]]:
    plain = models.Composers if tie is None else _tie(*tie)

    def build() -> nn.Module:
        model = plain()
        for name in wrapped:
            model.get_submodule(name)._fsdp_wrap = True
        return model

    return _units(build, FSDP2Config(), optimizer=torch.optim.Adam)


@pytest.mark.promise(84)
@pytest.mark.parametrize(
    ("tie", "wrapped", "units"),
    [
        (None, ["", "m2", "m5"], ["", "m2", "m5"]),
        (("m2.b.weight", "m2.a.weight"), ["", "m2.a", "m2.b"], ["", "m2.a", "m2.b"]),
        (("m2.b.weight", "m2.a.weight"), ["", "m2.a"], ["", "m2.a"]),
        (("m2.b.weight", "m2.a.weight"), ["", "m2"], ["", "m2"]),
        (("m5.a.weight", "m2.a.weight"), ["", "m2"], ["", "m2"]),
        (("m5.a.weight", "m2.a.weight"), [""], [""]),
        (("m2.weight", "m2.a.weight"), ["", "m2"], ["", "m2"]),
        (("m2.weight", "m2.a.weight"), ["", "m2", "m2.a"], ["", "m2", "m2.a"]),
        (("m2.weight", "m2.a.weight"), ["", "m2.a"], ["", "m2.a"]),
    ],
)
def test_composer_s_wrap_attributes(world2: World, tie: Any, wrapped: list[str], units: list[str]) -> None:
    assert world2(_wrap_attributes, tie, wrapped) == [(units, [])] * 2


def _policy(kind: str) -> tuple[list[str], list[bool | int]]:
    policy = CustomPolicy(_options) if kind == "CustomPolicy" else _options
    done = assert_same_training(models.Composers, "fsdp", policy=policy)
    return [unit.name for unit in done.plan.units], [unit.reshard_after_forward for unit in done.plan.units]


@pytest.mark.promise(84)
@pytest.mark.parametrize("kind", ["CustomPolicy", "function"])
def test_policies(world2: World, kind: str) -> None:
    assert world2(_policy, kind) == [(["", "m2", "m5"], [False, False, False])] * 2


def _refused(build: Build, config: Any, policy: Any, kind: type[Exception], text: str) -> None:
    model = build()
    before = dict(model.named_parameters())
    with pytest.raises(kind, match=text) as caught:
        parallelize_model(model, config, fsdp_wrap_policy=policy)
    assert isinstance(caught.value, ParallelismError)
    assert dict(model.named_parameters()) == before
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert model(batch(model)).requires_grad


def _duplicated() -> nn.Module:
    model = models.B()
    model.last = model.layers[2]
    return model


class Stuck(nn.Module):
    """Two dtypes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.shift = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.float()


def _stuck_dtype() -> nn.Module:
    return models.B(block=Stuck)


def _no(module: nn.Module) -> bool:
    return False


def _tacos(module: nn.Module) -> dict[str, bool]:
    return {"tacos": False}


@pytest.mark.promise(12, 22, 23, 82)
@pytest.mark.parametrize(
    ("build", "config", "policy", "kind", "text"),
    [
        (models.B, _rules(Rule("heed", shard=True)), None, ParallelismValueError, "Did you mean 'head'"),
        (models.B, "fsdp", _no, ParallelismValueError, "Nothing would be sharded"),
        (models.B, "fsdp", _tacos, ParallelismKeyError, "'tacos'"),
        (_duplicated, "fsdp", None, ParallelismValueError, "layers.2 = last"),
        (_stuck_dtype, "fsdp", None, ParallelismValueError, r"layers.1.shift \(float64\)"),
        (
            models.tied,
            _rules(Rule("embed", shard=True, reshard_after_forward=False), Rule("head", shard=True)),
            None,
            ParallelismValueError,
            "different options",
        ),
    ],
)
def test_refusals_come_before_anything_is_touched(
    world2: World, build: Build, config: Any, policy: Any, kind: type[Exception], text: str
) -> None:
    world2(_refused, build, config, policy, kind, text)


def _offloaded(cpu_offload: Any) -> set[str]:
    done = assert_same_training(models.B, FSDP2Config(cpu_offload=cpu_offload))
    return {str(p.device) for p in done.model.parameters()}


@pytest.mark.promise(29)
@pytest.mark.parametrize("cpu_offload", [True, "pageable"])
def test_offload_works_without_an_accelerator(world2: World, cpu_offload: Any) -> None:
    assert world2(_offloaded, cpu_offload) == [{"cpu"}] * 2


@pytest.mark.promise(29)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine that has no accelerator")
def test_pinning_without_an_accelerator_is_refused() -> None:
    plan = plan_parallelism(models.B(), FSDP2Config(cpu_offload="pinned"))
    with pytest.raises(ParallelismRuntimeError, match="cpu_offload='pinned'.*needs an accelerator"):
        check_offload(plan)


def _dtypes_seen(precision: str, mixed: str) -> tuple[str, str]:
    model = models.M()
    config = FSDP2Config(mixed_precision=mixed)
    parallelize_model(model, config, precision=precision)
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    output = model(batch(model))
    output.float().mean().backward()
    assert {p.dtype for _, p in named_parameters_canonical(model)} == {torch.float32}
    assert {p.grad.dtype for _, p in named_parameters_canonical(model)} == {torch.float32}
    return str(seen[0]), str(output.dtype)


@pytest.mark.promise(88)
@pytest.mark.parametrize(
    ("precision", "mixed", "dtype"),
    [
        ("amp_bf16", "DEFAULT", "torch.bfloat16"),
        ("amp_bf16", "PURE", "torch.bfloat16"),
        ("amp_bf16", "FULL", "torch.float32"),
        ("amp_fp16", "DEFAULT", "torch.float16"),
        ("fp32", "DEFAULT", "torch.float32"),
    ],
)
def test_what_the_forward_computes_in(world2: World, precision: str, mixed: str, dtype: str) -> None:
    assert world2(_dtypes_seen, precision, mixed) == [(dtype, dtype)] * 2


def _twice() -> None:
    model = models.M()
    parallelize_model(model, "fsdp")
    with pytest.raises(ParallelismValueError, match="sharded already"):
        parallelize_model(model, "fsdp")
    with warnings.catch_warnings():
        model(batch(model)).mean().backward()


@pytest.mark.promise(16)
def test_a_model_is_prepared_once(world2: World) -> None:
    world2(_twice)
