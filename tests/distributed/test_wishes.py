"""Which modules a rule selects, and what several rules say together."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from composer_dist import Precision
from composer_dist.config import presets
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.sharding.assign_units import assign
from composer_dist.distributed.wishes import Request, Wishes
from composer_dist.errors import ParallelismError, ParallelismTypeError, ParallelismValueError
from composer_dist.structure.select import select, spell
from composer_dist.structure.structure import read_structure
from composer_dist.trainer.finetuning.schedule import Phase
from composer_dist.trainer.finetuning.selection import select as select_phases
from composer_dist.wording import HINTS
from tests.kit import models
from tests.kit.compare import fails
from tests.kit.planning import BLOCKS, choose


@pytest.mark.promise(84)
@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (ModuleWrapPolicy({nn.Linear}), "but ModuleWrapPolicy takes other arguments: missing a required"),
        (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
            "but transformer_auto_wrap_policy takes other arguments: missing a required argument: 'recurse'. "
            "To choose modules of a class, pass lambda module: isinstance(module, TheClass).",
        ),
        (nn.Linear, "fsdp_wrap_policy must be a function of a module, not <class 'torch.nn.modules.linear."),
        ("Linear", "fsdp_wrap_policy must be a function of a module, not 'Linear'. To choose"),
    ],
)
def test_a_policy_that_cannot_be_called_with_a_module_is_refused(policy: Any, text: str) -> None:
    with fails(ParallelismTypeError, text):
        Request(config=ParallelismConfig(), wrap_policy=policy)
    model = nn.Sequential(nn.Linear(2, 2))
    model.fsdp_wrap_fn = policy
    with fails(ParallelismTypeError, text.replace("policy must", "fn must")):
        choose(model)


@pytest.mark.promise(10)
@pytest.mark.parametrize(
    ("match", "names"),
    [
        ("layers.1", ["layers.1"]),
        ("", [""]),
        (r"re:layers\.\d", BLOCKS),
        (re.compile(r".*\.mlp\.up"), [f"{block}.mlp.up" for block in BLOCKS]),
        (models.Mlp, [f"{block}.mlp" for block in BLOCKS]),
        (lambda name, module: name.endswith("norm") and "." not in name, ["norm"]),
        (["head", "embed", nn.Embedding], ["embed", "head"]),
        ("layers", ["layers"]),
        (r"re:layers\.1", ["layers.1"]),
        ("re:ayers", []),
        ("type:Mlp", [f"{block}.mlp" for block in BLOCKS]),
        ("type:tests.kit.models.Mlp", [f"{block}.mlp" for block in BLOCKS]),
        ("type:torch.nn.modules.sparse.Embedding", ["embed"]),
        (["type:Embedding", re.compile("head")], ["embed", "head"]),
    ],
)
def test_each_kind_of_match(match: Any, names: list[str]) -> None:
    assert select(match, read_structure(models.B()).modules) == names


@pytest.mark.promise(11)
def test_a_name_is_the_whole_name() -> None:
    model = models.B(blocks=12)
    assert select("layers.1", read_structure(model).modules) == ["layers.1"]
    assert list(choose(model, Rule("layers.1", shard=True)).units) == ["layers.1"]


@pytest.mark.promise(10)
@pytest.mark.parametrize("match", [3, None, [], ["a", 3]])
def test_another_kind_of_match_is_refused(match: Any) -> None:
    with pytest.raises(ParallelismTypeError, match="A rule's match must be a module name, .* not "):
        Rule(match)


@pytest.mark.promise(10)
def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match=r"'re:\(a' is an invalid regular expression: missing \)"):
        Rule("re:(a", shard=True)
    with pytest.raises(ParallelismTypeError, match="b'a' is a pattern of bytes"):
        Rule(re.compile(b"a"))


@pytest.mark.promise(10, 107)
@pytest.mark.parametrize("pattern", [r"(\w+\.?)*x", "(a|aa)+b", "a*a*a*a*a*a*a*a*a*a*b"])
def test_a_pattern_that_takes_hours_is_refused(pattern: str) -> None:
    modules = dict.fromkeys(["layers", "a" * 200, "layers.0"], nn.Linear(1, 1))
    with pytest.raises(ParallelismValueError, match=r"takes too long to match: .* 'a+'"):
        select(f"re:{pattern}", modules)
    assert select(r"re:(layers\.)+[0-9]+", modules) == ["layers.0"]


@pytest.mark.promise(12)
def test_unmatched_rules_are_all_named_with_a_neighbor() -> None:
    with pytest.raises(ParallelismValueError) as caught:
        choose(models.B(), Rule("layer.1", shard=True), Rule("re:x", shard=True), Rule("head", shard=True))
    assert "No module matches 'layer.1'. Did you mean 'layers.1'?" in str(caught.value)
    assert "No module matches 're:x'." in str(caught.value)
    with pytest.raises(ParallelismValueError) as caught:
        choose(models.B(), Rule(r"re:layer\.\d+", shard=True), Rule(r"re:layer\.1", shard=True))
    assert r"No module matches 're:layer\\.\\d+'. Did you mean 're:layers\\.\\d+'?" in str(caught.value)
    assert r"No module matches 're:layer\\.1'. Did you mean 're:layers\\.1'?" in str(caught.value)
    assert "'head'" not in str(caught.value)


@pytest.mark.promise(12)
def test_each_rule_asks_each_module_once() -> None:
    model, asked = models.B(), list[str]()

    def is_a_block(name: str, module: nn.Module) -> bool:
        asked.append(name)
        return name in BLOCKS

    def is_the_head(name: str, module: nn.Module) -> bool:
        asked.append(name)
        return name == "head"

    choices = choose(model, Rule(is_a_block, shard=True), Rule([is_the_head, "embed"], shard=True))
    assert [name for name, one in choices.units.items() if "rule" in one.reason] == ["embed", *BLOCKS, "head"]
    assert asked == 2 * list(read_structure(model).modules)


@pytest.mark.parametrize("kind", ["rules", "styles", "phases"])
def test_only_the_first_unmatched_names_get_a_neighbor(kind: str) -> None:
    names, model = [f"block.{number}" for number in range(20)], models.B()

    styles = ParallelismConfig(mesh=MeshConfig(tp=2), tp=TPConfig(plan=dict.fromkeys(names, "colwise")))
    calls: dict[str, Callable[[], object]] = {
        "rules": lambda: choose(model, *(Rule(name, shard=True) for name in names)),
        "styles": lambda: plan_parallelism(model, styles, world_size=2),
        "phases": lambda: select_phases([Phase(params=names)], model).check(),
    }
    compare = mock.patch("difflib.get_close_matches", return_value=[])
    with compare as compared, fails(ParallelismValueError, *map(repr, names)):
        calls[kind]()
    assert compared.call_count == HINTS


def test_every_part_of_a_list_matches() -> None:
    match = ["layers.0", ["layer.1", "type:Mlpp", nn.Conv1d]]
    with pytest.raises(ParallelismValueError) as caught:
        choose(models.B(), Rule(match, shard=True))
    allow = "(Rule(..., optional=True) allows that.)"
    assert str(caught.value).splitlines() == [
        f"No module matches 'layer.1'. Did you mean 'layers.1'? {allow}",
        f"No module matches 'type:Mlpp'. Did you mean 'type:Mlp'? {allow}",
        f"No module matches Conv1d. {allow}",
    ]
    assert "layers.0" in choose(models.B(), Rule(match, shard=True, optional=True)).units
    assert list(choose(models.B(), Rule("nope", shard=True, optional=True)).units) == ["", *BLOCKS]


@pytest.mark.promise(12)
def test_a_rule_that_sets_nothing_is_refused() -> None:
    with pytest.raises(ParallelismValueError, match="The rule 'head' sets nothing; give it one of shard, "):
        choose(models.B(), Rule("head"))


@pytest.mark.promise(13)
def test_rules_merge_by_field_and_the_later_wins() -> None:
    rules = (
        Rule(r"re:layers\.\d", shard=True, reshard_after_forward=True, mixed_precision="FULL"),
        Rule("layers.1", reshard_after_forward=False),
        Rule("layers.1", offload=True),
    )
    choices = choose(models.B(), *rules)
    assert choices.units["layers.0"].options == {"reshard_after_forward": True, "mixed_precision": "FULL"}
    assert choices.units["layers.1"].options == {
        "reshard_after_forward": False,
        "mixed_precision": "FULL",
        "offload": True,
    }
    request = Request(config=ParallelismConfig(rules=rules))
    wishes = Wishes.read(request, read_structure(models.B()))
    assert wishes.ruled("reshard_after_forward")["layers.1"] == (False, "rule 'layers.1'")


@pytest.mark.promise(14)
def test_containers_give_their_children_or_are_skipped() -> None:
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)])})
    assert list(choose(nested, Rule("a", shard=True)).units) == ["a.0.0", "a.1"]
    model = models.B()
    model.extra = nn.ParameterList([torch.ones(3)])
    for name, kind, options in (
        ("layers", "ModuleList", {"containers": "skip"}),
        ("extra", "ParameterList", {}),
    ):
        choices = choose(model, Rule(name, shard=True), Rule("head", shard=True), **options)
        assert list(choices.units) == ["head"]
        text = f"{name} is a {kind}, which has no forward of its own; it is skipped."
        assert choices.warnings == (text,)
    plain = dict(choose(model, Rule("extra", shard=False)).plain)
    assert plain == {"extra": "rule 'extra' leaves it replicated"}


@pytest.mark.promise(20)
def test_a_pattern_for_numbered_layers() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([models.Block()])
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([models.Block(), models.Block()])
    model.encoder = nn.Module()
    model.encoder.layers = nn.ModuleList([models.Block()])
    modules = read_structure(model).modules
    numbered = ["layers.0", "decoder.layers.0", "decoder.layers.1", "encoder.layers.0"]
    assert select(presets.layers(), modules) == numbered
    assert select(presets.layers("blocks", "layers"), modules) == numbered
    assert select(presets.layers("h"), modules) == []


@pytest.mark.promise(23)
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ParallelismError, {"shard": "yes"}),
        (ParallelismError, {"reshard_after_forward": "no"}),
        (ParallelismError, {"offload": "pinned"}),
        (ParallelismError, {"optional": 2}),
        (TypeError, {"reshard": True}),
    ],
)
def test_fields_and_values_that_do_not_exist_are_refused(kind: Any, values: Any) -> None:
    with pytest.raises(kind, match=next(iter(values))):
        Rule("a", **values)


def test_rules_are_spelt_alike_on_every_rank() -> None:
    def starts(prefix: str, name: str, module: nn.Module) -> bool:
        return name.startswith(prefix)

    assert spell(functools.partial(starts, "layers")) == "partial"
    assert spell(["a", re.compile("b+"), nn.Linear]) == "['a', 're:b+', Linear]"


def test_a_rule_for_any_name_of_a_module_counts() -> None:
    model = models.B()
    model.last = model.layers[2]
    assert list(choose(model, Rule("last", shard=True)).units) == ["layers.2"]
    both = Rule(["layers", "last"], shard=True), Rule(["layers.2", "last"], offload=True)
    assert choose(model, *both).units["layers.2"].options == {"offload": True}


@pytest.mark.promise(82)
@pytest.mark.parametrize(
    ("rules", "first", "second"),
    [
        ((Rule("layers.2", offload=True), Rule("last", offload=False)), "True", "'last' offload=False"),
        ((Rule("layers", shard=True), Rule("last", shard=False)), "True", "'last' shard=False"),
        ((Rule(models.Block, act_ckpt=True), Rule("last", act_ckpt="offload")), "True", "act_ckpt='offload'"),
    ],
)
def test_rules_that_contradict_each_other_about_one_module_are_refused(
    rules: tuple[Rule, ...], first: str, second: str
) -> None:
    model = models.B()
    model.last = model.layers[2]
    with fails(ParallelismValueError, "layers.2 and last are one module, but the rule", first, second):
        choose(model, *rules)


def test_a_module_that_a_rank_may_skip_under_one_name_is_no_unit() -> None:
    model = models.B()
    model.tower = nn.Sequential(model.layers[2])
    choices = choose(model, Rule("tower", skippable="replicate"))
    assert list(choices.units) == ["", "layers.0", "layers.1"]
    structure = read_structure(model)
    plain = assign(structure, choices, 2).plain
    assert {name for name in plain if name.startswith("layers.")} == {
        name for name in structure.parameters if name.startswith("layers.2.")
    }


@pytest.mark.promise(17)
def test_the_caller_s_list_of_rules_may_change() -> None:
    rules = [Rule("head", shard=True)]
    config = ParallelismConfig(rules=rules)
    rules.clear()
    assert config.rules == (Rule("head", shard=True),)


@pytest.mark.promise(91)
def test_everything_goes_through_yaml_and_back() -> None:
    config = ParallelismConfig(
        mesh=MeshConfig(dp_replicate=2, tp=2),
        fsdp2=FSDP2Config(reshard_after_forward=2, mixed_precision={"param_dtype": "bfloat16"}),
        rules=[
            Rule(presets.layers(), shard=True, offload=False),
            Rule(["type:Mlp", "head"], reshard_after_forward=False, optional=True),
        ],
        activation_checkpointing="composable",
        sync="rank0",
    )
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    assert "dp_shard" not in text  # defaults are left out
    assert ParallelismConfig.from_dict(yaml.safe_load(text)) == config
    assert ParallelismConfig().to_dict() == {}


@pytest.mark.promise(91)
def test_what_only_python_has_is_spelt_for_yaml() -> None:
    own = ParallelismConfig(
        fsdp2=FSDP2Config(mixed_precision={"param_dtype": torch.bfloat16, "reduce_dtype": Precision.FP32}),
        rules=[Rule([re.compile("LAYERS.0", re.I), models.Mlp], shard=True)],
        activation_checkpointing=("composable", None),
    )
    values = yaml.safe_load(yaml.safe_dump(own.to_dict()))
    assert values == {
        "fsdp2": {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "fp32"}},
        "rules": [{"match": ["re:(?i)LAYERS.0", "type:tests.kit.models.Mlp"], "shard": True}],
        "activation_checkpointing": ["composable", None],
    }
    read = ParallelismConfig.from_dict(values)
    assert choose(models.B(), *read.rules).units.keys() == choose(models.B(), *own.rules).units.keys()


@pytest.mark.promise(91)
def test_a_function_has_no_form_in_yaml() -> None:
    with pytest.raises(ParallelismTypeError, match="Rule.match cannot be written to a file: it is a f"):
        ParallelismConfig(rules=[Rule(lambda name, module: True, shard=True)]).to_dict()
