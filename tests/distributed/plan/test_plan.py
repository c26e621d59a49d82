"""The plan: pure data, made without a process group, that says what will happen and why.

Longer than other files: all cases read plans of the same models.
"""

import json
import re
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import ParallelPlan, plan_parallelism
from composer_dist.distributed.plan.plan import check_plan
from composer_dist.errors import (
    ParallelismError,
    ParallelismKeyError,
    ParallelismTypeError,
    ParallelismValueError,
)
from composer_dist.structure.structure import read_structure
from tests.kit import models
from tests.kit.compare import fails


def _plan(model: nn.Module, world_size: int = 8, **options: Any) -> ParallelPlan:
    keywords = {k: options.pop(k) for k in ("optimizer", "precision", "fsdp_wrap_policy") if k in options}
    return plan_parallelism(model, ParallelismConfig(**options), world_size=world_size, **keywords)


def _reshard(plan: ParallelPlan) -> dict[str, bool | int]:
    return {unit.name: unit.reshard_after_forward for unit in plan.units}


@pytest.mark.promise(10)
def test_the_plan_lists_every_module_with_action_and_reason() -> None:
    plan = _plan(models.tied())
    assert list(plan.modules) == [name for name, _ in models.tied().named_modules()]
    assert plan.modules["layers.1"].action == "unit"
    assert plan.modules["layers.1"].reason == "it is one of 3 Block in layers"
    assert plan.modules["layers.1.mlp.up"].action == "part of unit layers.1"
    assert plan.modules["head"].action == "part of unit root"
    assert plan.parameter_units["layers.1.mlp.up.bias"] == "layers.1"
    assert plan.ties == (("embed.weight", "head.weight"),)


def test_a_plan_from_meta_is_the_plan_of_the_real_model() -> None:
    with torch.device("meta"):
        empty = models.B()
    real = _plan(models.B()).to_dict()
    assert _plan(empty).to_dict() | {"init_peak": 0} == real
    assert _plan(empty).digest() == _plan(models.B()).digest()
    json.dumps(_plan(empty).to_dict())


def test_planning_touches_nothing() -> None:
    model = models.tied()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    _plan(model, activation_checkpointing=True, rules=[Rule("embed", shard=False)])
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert [type(module) for module in model.modules()] == classes


def test_explain_says_what_and_why() -> None:
    model = models.bert()
    model.register_buffer("table", torch.zeros(2))
    model.gain = nn.Parameter(torch.tensor(1.0))
    plan = _plan(model, activation_checkpointing=True)
    assert plan.explain("layers.1") == (
        "layers.1: unit, because it is one of 3 Block in layers. It gathers 10 parameters, 2,208 bytes; "
        "reshard_after_forward=True. Its activations are recomputed (composable), because it is a block."
    )
    assert plan.explain("").startswith("The root: unit, because the root manages what no other unit does.")
    assert plan.explain("head.decoder") == "head.decoder: part of unit root, because it lies inside it."
    assert plan.explain("head.decoder.bias") == (
        "head.decoder.bias, one parameter with head.bias: sharded in unit root."
    )
    assert plan.explain("gain") == (
        "gain: replicated on every rank, because a scalar has no dimension to shard."
    )
    assert plan.explain("table") == "table: a buffer, whole on every rank."
    with pytest.raises(ParallelismKeyError, match="nothing called 'layer.1'. Did you mean 'layers.1'"):
        plan.explain("layer.1")


def test_explain_names_joined_skipped_and_replicated_modules() -> None:
    plan = _plan(models.tied(), rules=[Rule("embed", shard=True), Rule("head", shard=True)])
    assert plan.explain("head").startswith(
        "head: unit in one group with embed, because rule 'head'. It gathers 1 parameter, "
    )
    assert plan.explain("norm") == "norm: part of unit root, because it lies inside it."
    plan = _plan(models.tied(), rules=[Rule("layers.0.mlp", shard=False)])
    assert plan.explain("layers.0.mlp.up") == (
        "layers.0.mlp.up: replicated, because rule 'layers.0.mlp' leaves it replicated."
    )
    plan = _plan(models.tied(), rules=[Rule("layers.0", shard=True)])
    assert plan.explain("head") == "head: left alone, because no unit contains it."


@pytest.mark.promise(13)
def test_rules_override_the_configuration() -> None:
    plan = _plan(
        models.B(),
        fsdp2=FSDP2Config(reshard_after_forward=False),
        rules=[Rule("layers", shard=True), Rule("layers.1", reshard_after_forward=True)],
    )
    assert _reshard(plan) == {"layers.0": False, "layers.1": True, "layers.2": False}


def test_the_root_and_the_last_block_are_not_freed_unless_somebody_says_so() -> None:
    assert _reshard(_plan(models.B())) == {"": False, "layers.0": True, "layers.1": True, "layers.2": False}
    asked = _plan(
        models.B(),
        fsdp_wrap_policy=lambda m: (
            {"reshard_after_forward": True} if isinstance(m, (models.B, models.Block)) else False
        ),
    )
    assert set(_reshard(asked).values()) == {True}


def test_a_model_in_a_wrapper_is_freed_as_it_would_be_alone() -> None:
    def freed(wrapper: nn.Module) -> dict[str, bool | int]:
        units = {*wrapper.children(), *(m for m in wrapper.modules() if type(m) is models.Block)}
        return _reshard(_plan(wrapper, fsdp_wrap_policy=units.__contains__))

    last = {"": False, "a": False, "a.layers.0": True, "a.layers.1": True, "a.layers.2": False}
    assert freed(nn.Sequential(OrderedDict(a=models.B()))) == last
    assert freed(nn.ModuleDict({"a": models.B()})) == {name: last[name] for name in last if name}
    two = freed(nn.Sequential(OrderedDict(a=models.B(), b=models.B())))
    assert {name: two[name] for name in ("", "a", "b")} == {"": False, "a": True, "b": True}


@pytest.mark.parametrize(("wanted", "planned"), [(2, 2), (4, 4), (8, True), (1, False)])
def test_an_int_reshards_to_that_many_ranks(wanted: int, planned: bool | int) -> None:
    plan = _plan(models.B(), fsdp2=FSDP2Config(reshard_after_forward=wanted))
    assert _reshard(plan) == dict.fromkeys(["", "layers.0", "layers.1", "layers.2"], planned)
    assert type(_reshard(plan)[""]) is type(planned)


@pytest.mark.parametrize("wanted", [3, 0, -1, 16])
def test_an_int_that_does_not_divide_is_refused(wanted: int) -> None:
    with pytest.raises(ParallelismValueError, match=f"reshard_after_forward={wanted}.*divides the 8 ranks"):
        _plan(models.B(), fsdp2=FSDP2Config(reshard_after_forward=wanted))


@pytest.mark.promise(12)
def test_rules_are_checked_before_anything_else_happens() -> None:
    with pytest.raises(ParallelismValueError, match="No module matches 'heed'. Did you mean 'head'?"):
        _plan(models.B(), rules=[Rule("heed", shard=True)])


def test_a_rule_without_effect_is_refused_or_warned_about() -> None:
    rules = [Rule("layers.1.mlp", reshard_after_forward=False), Rule("norm", shard=False, offload=True)]
    with pytest.raises(ParallelismValueError) as caught:
        _plan(models.B(), rules=rules)
    assert str(caught.value) == (
        "rule 'layers.1.mlp' sets reshard_after_forward, but layers.1.mlp is not a unit; add shard=True, or "
        "leave it out.\nrule 'norm' sets offload, but norm is not a unit; add shard=True, or leave it out."
    )
    assert len(_plan(models.B(), rules=rules, strict=False).warnings) == 2
    with fails(ParallelismValueError, "rule '' sets offload, but the root is not a unit; add shard=True"):
        _plan(models.B(), rules=[Rule("layers.0", shard=True), Rule("", offload=True)])
    everywhere = Rule("re:layers.*", reshard_after_forward=False)
    assert _reshard(_plan(models.B(), rules=[everywhere]))["layers.0"] is False


@pytest.mark.promise(29)
def test_where_shards_live() -> None:
    def offloads(**options: Any) -> set[str | None]:
        return {unit.offload for unit in _plan(models.B(), **options).units}

    assert offloads() == {None}
    for device, home in {"cpu": "pageable", "cuda": "pinned"}.items():
        mesh = MeshConfig(device_type=device)
        assert offloads(mesh=mesh, fsdp2=FSDP2Config(cpu_offload=True)) == {home}
        assert offloads(mesh=mesh, rules=[Rule("layers.0", offload=True)]) == {None, home}
    assert offloads(fsdp2=FSDP2Config(cpu_offload="pinned")) == {"pinned"}
    assert offloads(fsdp2=FSDP2Config(cpu_offload="pageable"), rules=[Rule("layers.0", offload=False)]) == {
        None,
        "pageable",
    }
    pageable = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert offloads(fsdp_wrap_policy=lambda m: pageable if isinstance(m, models.B) else False) == {"pageable"}


@pytest.mark.promise(88)
def test_what_is_gathered_and_reduced() -> None:
    def policies(**options: Any) -> dict[str, tuple[Any, Any]]:
        plan = _plan(models.B(), **options)
        return {unit.name: (unit.mp_policy.param_dtype, unit.mp_policy.reduce_dtype) for unit in plan.units}

    assert set(policies().values()) == {(None, None)}
    assert set(policies(precision="amp_bf16").values()) == {(torch.bfloat16, torch.float32)}
    mixed = policies(
        precision="amp_bf16",
        fsdp2=FSDP2Config(mixed_precision="PURE"),
        rules=[Rule("layers.1", mixed_precision="FULL")],
    )
    assert mixed["layers.0"] == (torch.bfloat16, torch.bfloat16)
    assert mixed["layers.1"] == (torch.float32, torch.float32)
    # Torch's own default for a missing reduce_dtype changed in 2.15.
    low = policies(fsdp2=FSDP2Config(mixed_precision={"param_dtype": "bf16"}))
    assert set(low.values()) == {(torch.bfloat16, torch.bfloat16)}
    own = MixedPrecisionPolicy(param_dtype=torch.float16)
    found = _plan(
        models.B(), fsdp_wrap_policy=lambda m: {"mp_policy": own} if isinstance(m, models.Mlp) else False
    )
    assert {unit.mp_policy for unit in found.units if unit.name} == {own}
    with pytest.raises(ParallelismValueError, match="PURE"):
        policies(fsdp2=FSDP2Config(mixed_precision="PURE"))


@pytest.mark.promise(16)
def test_what_is_sharded_already_is_left_alone() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = models.B()
    fully_shard(model.layers[1], mesh=mesh)
    plan = plan_parallelism(
        model,
        ParallelismConfig(
            rules=[Rule("layers", shard=True), Rule("", shard=True), Rule("layers.1.mlp", shard=True)]
        ),
    )
    assert [unit.name for unit in plan.units] == ["", "layers.0", "layers.2"]
    assert plan.warnings[1:] == ("Already sharded, left unchanged: layers.1, layers.1.mlp.",)
    assert plan.modules["layers.1"].reason == "it, or a module that contains it, is already sharded"
    assert (
        plan.explain("layers.1.mlp.up.bias") == "layers.1.mlp.up.bias: already sharded, and left unchanged."
    )
    fully_shard(model, mesh=mesh)
    with pytest.raises(ParallelismValueError, match="already sharded"):
        plan_parallelism(model, "fsdp")


@pytest.mark.promise(82)
def test_an_architecture_that_shares_modules_is_explained() -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.resize_token_embeddings(40, mean_resizing=False)
    assert model.encoder.embed_tokens is model.shared
    plan = _plan(model)
    assert plan.explain("encoder.embed_tokens") == (
        "encoder.embed_tokens: duplicate, because it is the same module as shared, which "
        "T5ForConditionalGeneration shares; handled as a tie."
    )
    assert plan.parameter_units["shared.weight"] == ""
    outer = _plan(nn.ModuleDict({"model": model, "other": model.encoder}))
    assert outer.explain("other") == "other: duplicate, because it is the same module as model.encoder."


@pytest.mark.promise(83)
def test_optimizers_are_checked() -> None:
    other = torch.optim.SGD(models.M().parameters(), lr=0.1)
    with pytest.raises(ParallelismValueError, match="SGD holds 4 parameters"):
        _plan(models.M(), optimizer=other)


@pytest.mark.promise(94)
def test_foreach_over_a_mixed_group_is_refused() -> None:
    model = models.scalar()
    with pytest.raises(ParallelismValueError, match="foreach=True.*layers.0.gain"):
        _plan(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))


def test_the_world_size_is_the_group_s_or_one() -> None:
    assert plan_parallelism(models.B(), "fsdp").world_size == 1
    dist.init_process_group("fake", rank=3, world_size=16)
    plan = plan_parallelism(models.B(), {"mesh": {"dp_replicate": 4}})
    assert plan.world_size == 16
    assert plan.mesh == {"dp_replicate": 4, "dp_shard": 4, "cp": 1, "tp": 1}
    own = init_device_mesh("cpu", (2, 8))
    assert plan_parallelism(models.B(), FSDP2Config(device_mesh=own)).mesh["dp_shard"] == 8
    three = init_device_mesh("cpu", (2, 2, 4))
    with pytest.raises(ParallelismValueError, match="mesh has the dimensions without a name, without"):
        plan_parallelism(models.B(), FSDP2Config(device_mesh=three))


def test_a_ready_plan_belongs_to_one_structure_and_world() -> None:
    model = models.B()
    plan = _plan(model)
    assert check_plan(plan, read_structure(models.B())) is plan
    with pytest.raises(ParallelismValueError, match="made for 8 ranks, but there are 4"):
        plan.wanted_mesh(4)
    model.head.requires_grad_(False)
    with pytest.raises(ParallelismValueError, match="structure"):
        check_plan(plan, read_structure(model))


def test_the_digest_is_the_same_for_functions_made_anew() -> None:
    def rule() -> Rule:
        class Match:
            def __call__(self, name: str, module: nn.Module) -> bool:
                return name == "head"

        return Rule(Match(), shard=True)

    assert _plan(models.B(), rules=[rule()]).digest() == _plan(models.B(), rules=[rule()]).digest()
    assert _plan(models.B(), rules=[rule()]).digest() != _plan(models.B()).digest()


def test_every_error_is_a_parallelism_error() -> None:
    with pytest.raises(ParallelismError):
        _plan(models.B(), world_size=3, mesh=MeshConfig(dp_shard=2))


@pytest.mark.parametrize("blocks", [100])
def test_plans_grow_linearly(blocks: int) -> None:
    """Counted, not timed: how often the structure is walked does not depend on the number of blocks."""

    def walks(count: int) -> float:
        with torch.device("meta"):
            model = models.B(blocks=count)
        calls = 0
        modules = nn.Module.named_modules

        def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            for one in modules(self, *args, **kwargs):
                calls += 1
                yield one

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", counting)
            _plan(model)
        return calls / count

    assert walks(4 * blocks) <= walks(blocks) * 1.1


def test_the_peak_of_initialization_stands_in_the_plan() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False))
    assert plan_parallelism(model, FSDP2Config()).init_peak == 0  # each rank fills its own rows
    model.param_init_fn = lambda layer: nn.init.orthogonal_(layer.weight)
    plan = plan_parallelism(model, ParallelismConfig(fsdp2=FSDP2Config(), bucket_bytes=10))
    assert plan.init_peak == 8 * 16 * 4  # the larger layer, whole
    assert "initialization takes up to 512 B more than the shards" in str(plan)
    roomy = plan_parallelism(model, FSDP2Config())
    assert roomy.init_peak == (8 * 8 + 8 * 16) * 4  # both fit into one bucket
    assert plan_parallelism(nn.Linear(2, 2), FSDP2Config()).init_peak == 0
    assert roomy.digest() == replace(roomy, init_peak=0).digest()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"model": "gpt2"}, "model must be a torch.nn.Module, not str."),
        ({"model": nn.Linear}, "model must be a torch.nn.Module, not the class Linear itself."),
        ({"config": FSDP2Config}, "not the class FSDP2Config itself."),
        ({"optimizer": 3}, "optimizer must be an Optimizer, several of them, or None, not int."),
        ({"world_size": "8"}, "world_size must be a positive integer, not '8'."),
        ({"world_size": 0}, "world_size must be a positive integer, not 0."),
    ],
)
def test_what_is_of_a_wrong_type_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ParallelismTypeError, match=re.escape(text)):
        plan_parallelism(**({"model": nn.Linear(2, 2), "config": "fsdp"} | wrong))
