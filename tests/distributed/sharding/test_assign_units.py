"""Which unit manages which parameter, on the meta device and without a process group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from composer_dist import ParallelismConfig, Rule
from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.sharding.assign_units import Assignment, assign
from composer_dist.distributed.sharding.choose_units import choose_units
from composer_dist.distributed.wishes import Request, Wishes
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit import models


def _assign(model: nn.Module, *rules: Rule, policy: Any = None) -> Assignment:
    structure = read_structure(model)
    request = Request(config=ParallelismConfig(rules=rules), wrap_policy=policy)
    return assign(structure, choose_units(structure, Wishes.read(request, structure)), shards=2)


def _units(model: nn.Module, *rules: Rule, policy: Any = None) -> dict[str, list[str]]:
    """The first module of each unit to its parameters."""
    return {group.modules[0]: group.parameters for group in _assign(model, *rules, policy=policy).groups}


def test_every_parameter_has_one_home() -> None:
    for build in (models.B, models.tied, models.bert, models.EncoderDecoder, models.dtypes):
        model = build()
        assignment = _assign(model)
        managed = [name for group in assignment.groups for name in group.parameters]
        assert sorted([*managed, *assignment.plain]) == sorted(dict(model.named_parameters()))


@pytest.mark.promise(21)
def test_fsdp1_is_refused_by_name() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    model = models.B()
    model.layers[1] = FullyShardedDataParallel(model.layers[1], device_id=torch.device("cpu"))
    with pytest.raises(ParallelismTypeError, match=r"layers.1 is wrapped in FSDP1 .*, which FSDP2 replaces"):
        plan_parallelism(model, "fsdp")


@pytest.mark.promise(22)
def test_a_tie_goes_to_the_nearest_common_unit() -> None:
    units = _units(models.tied())
    assert units[""] == ["embed.weight", "norm.weight", "norm.bias"]
    assert _units(models.EncoderDecoder())[""] == ["shared.weight"]
    assert {"embed.weight", "head.bias"} <= set(_units(models.bert())[""])
    units = _units(models.tied_blocks())
    assert {"layers.0.norm.weight", "layers.0.norm.bias"} <= set(units[""])
    assert len(units["layers.0"]) == len(units["layers.2"]) == len(units["layers.1"]) - 2


A, B, C, PARENT = "m2.a.weight", "m2.b.weight", "m5.a.weight", "m2.weight"


@pytest.mark.promise(22)
def test_without_a_common_unit_the_owners_units_become_one() -> None:
    assignment = _assign(models.tied(), Rule("embed", shard=True), Rule("head", shard=True))
    groups = {tuple(group.modules): group for group in assignment.groups}
    assert set(groups) == {("",), ("embed", "head")}
    assert groups["embed", "head"].parameters == ["embed.weight"]
    assert groups[("",)].parameters == []
    assert groups[("",)].choice.reason == "it coordinates units of several modules"
    assert "norm.weight" in assignment.plain


@pytest.mark.promise(22)
def test_units_with_other_options_are_not_joined() -> None:
    rules = [Rule("embed", shard=True, reshard_after_forward=False), Rule("head", shard=True)]
    with pytest.raises(ParallelismValueError) as caught:
        _assign(models.tied(), *rules)
    assert "embed.weight and head.weight are one parameter" in str(caught.value)
    assert "units embed and head have different options" in str(caught.value)


@pytest.mark.promise(22)
def test_joined_units_absorb_what_lies_inside_them() -> None:
    model = models.composers({"m5.b.weight": A})
    model.m2.weight = model.m5.weight = nn.Parameter(torch.randn(10, 10))
    rules = [Rule(name, shard=True) for name in ("m2.a", "m2", "m5.b", "m5")]
    groups = {tuple(group.modules): group.parameters for group in _assign(model, *rules).groups}
    assert groups[("m2", "m5")][:1] == ["m2.weight"]
    assert sorted(name for names in groups.values() for name in names) == sorted(
        dict(model.named_parameters())
    )


@pytest.mark.promise(84)
@pytest.mark.parametrize(
    ("ties", "wrapped", "homes"),
    [
        ({}, ["", "m2", "m5"], {"m2.a.weight": "m2", "m5.b.bias": "m5"}),
        # Composer refuses these; here each tie lies in the nearest unit that has all its owners.
        ({B: A}, ["", "m2.a", "m2.b"], {A: "", "m2.a.bias": "m2.a"}),
        ({B: A}, ["", "m2.a"], {A: "", "m2.a.bias": "m2.a"}),
        ({B: A}, ["", "m2"], {A: "m2"}),
        ({C: A}, ["", "m2"], {A: "", B: "m2"}),
        ({C: A}, [""], {A: ""}),
        ({PARENT: A}, ["", "m2"], {PARENT: "m2"}),
        ({PARENT: A}, ["", "m2", "m2.a"], {PARENT: "m2", "m2.a.bias": "m2.a"}),
        ({PARENT: A}, ["", "m2.a"], {PARENT: "", "m2.a.bias": "m2.a"}),
        ({PARENT: A, C: A}, ["", "m2"], {PARENT: ""}),
        ({"m2.a.bias": "m2.b.bias"}, ["", "m2.a", "m2.b"], {"m2.a.bias": "", B: "m2.b"}),
    ],
)
def test_composer_s_ties(ties: dict[str, str], wrapped: list[str], homes: dict[str, str]) -> None:
    model = models.composers(ties)
    units = _units(model, *[Rule(name, shard=True) for name in wrapped])
    found = {parameter: name for name, parameters in units.items() for parameter in parameters}
    assert {name: found[name] for name in homes} == homes
    assert found.keys() == dict(model.named_parameters()).keys()


@pytest.mark.promise(84)
def test_a_tie_that_leads_out_of_all_units_stays_whole() -> None:
    assignment = _assign(models.composers({C: A}), Rule("m2", shard=True))
    assert assignment.plain[A] == "no unit contains it (Rule('', shard=True) makes the root one)"
    assert [group.modules for group in assignment.groups] == [["m2"]]


@pytest.mark.promise(18)
def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="the model has no parameters"):
        _assign(nn.Sequential(nn.ReLU()))
    with pytest.raises(ParallelismValueError, match="no unit gets a parameter"):
        _assign(models.B(), Rule("layers.0.mlp", shard=False), Rule("", shard=False))


def test_parameterless_modules_are_skipped_with_the_reason() -> None:
    assignment = _assign(models.M(), policy=lambda module: isinstance(module, (nn.ReLU, nn.Linear)))
    assert dict(assignment.skipped) == {"1": "it has no parameters"}
    assignment = _assign(models.tied(), Rule("", shard=True), Rule("head", shard=True))
    assert assignment.skipped["head"] == "its parameters stay plain or belong to outer units"


def test_scalars_empty_parameters_and_ties_with_replicated_modules_stay_whole() -> None:
    model = models.scalar()
    model.nothing = nn.Parameter(torch.empty(0, 3))
    plain = dict(_assign(model).plain)
    assert plain.pop("nothing") == "it is empty"
    assert set(plain.values()) == {"a scalar has no dimension to shard"}
    assert list(plain) == [f"layers.{i}.gain" for i in range(3)]
    assignment = _assign(models.tied(), Rule("head", shard=False))
    assert dict(assignment.plain) == {"embed.weight": "rule 'head' leaves it replicated"}


def test_dtypes_are_split_by_submodule() -> None:
    assignment = _assign(models.dtypes())
    groups = {group.modules[0]: group for group in assignment.groups}
    assert groups["layers.0"].parameters == ["layers.0.linear.weight", "layers.0.linear.bias"]
    inner = groups["layers.0.norm"]
    assert inner.split
    assert inner.parameters == ["layers.0.norm.weight", "layers.0.norm.bias"]
    assert inner.choice.reason == "it trains float64 where layers.0 trains float32"
    assert list(groups).index("layers.0") < list(groups).index("layers.0.norm")
    # Options follow.
    rule = Rule(r"re:layers\.\d", shard=True, reshard_after_forward=False)
    groups = {group.modules[0]: group for group in _assign(models.dtypes(), rule).groups}
    assert groups["layers.1.norm"].choice.options == {"reshard_after_forward": False}


def test_which_parameters_a_split_moves() -> None:
    model = models.B(blocks=2)
    model.layers[0].attention.bfloat16()
    assert "layers.0.attention" in _units(model)  # the outermost submodule of one dtype
    units = _units(models.own_dtype())  # a module's own parameter stays with it
    assert units["layers.0"] == ["layers.0.scale"]
    assert units["layers.0.linear"] == ["layers.0.linear.weight", "layers.0.linear.bias"]
    model = models.dtypes()
    model.layers[0].norm.requires_grad_(False)  # frozen parameters need no unit of their dtype
    frozen = [f"layers.0.{n}.{p}" for n in ("linear", "norm") for p in ("weight", "bias")]
    assert _units(model)["layers.0"] == frozen


def test_dtypes_that_no_submodule_holds_apart_are_refused_by_name() -> None:
    model = models.B(blocks=2)
    model.layers[1].mlp.up.bias = nn.Parameter(torch.zeros(16, dtype=torch.float64))
    with pytest.raises(ParallelismValueError) as caught:
        _assign(model)
    assert "layers.1 trains float32 parameters, and also layers.1.mlp.up.bias (float64)" in str(caught.value)
    assert "Rule(..., shard=False)" in str(caught.value)


def test_a_tie_of_another_dtype_is_split_off_with_the_module_around_it() -> None:
    model = models.composers({B: A})
    model.m2.bfloat16()
    units = _units(model, Rule("", shard=True))
    assert set(units["m2"]) == {"m2.a.weight", "m2.a.bias", "m2.b.bias"}


class Shared(nn.Module):
    """A layer of one module called by another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = models.Mlp(), nn.Module()
        self.b.inner = self.a.up


@pytest.mark.promise(82)
@pytest.mark.parametrize(
    ("rules", "home"), [(["a"], None), (["a", "b"], "a, b"), (["a.up"], "a.up"), (["", "a"], "")]
)
def test_a_duplicate_is_held_where_all_its_places_are(rules: list[str], home: str | None) -> None:
    assignment = _assign(Shared(), *[Rule(name, shard=True) for name in rules])
    found = [", ".join(g.modules) for g in assignment.groups if "a.up.weight" in g.parameters]
    assert found == ([] if home is None else [home])


@pytest.mark.parametrize(
    "build", [models.mamba, models.moe, models.parent_child, models.borrowed, models.Shell]
)
def test_odd_structures_have_plain_units(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = build()
    assignment = _assign(model)
    assert assignment.plain == {}
    assert assignment.warnings == ()
    assert assignment.groups[0].modules == [""]
