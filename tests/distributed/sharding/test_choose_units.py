"""Who chooses the units: rules, policies, attributes, structure."""

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy

from composer_dist import ParallelismConfig, Rule
from composer_dist.composer_model import ComposerClassifier
from composer_dist.distributed.sharding.choose_units import composer_children
from composer_dist.errors import ParallelismKeyError, ParallelismTypeError, ParallelismValueError
from composer_dist.models import ComposerModel
from composer_dist.structure.select import inherited
from composer_dist.structure.structure import read_structure
from tests.kit import models
from tests.kit.planning import BLOCKS, choose


@pytest.mark.promise(13)
def test_a_rule_comes_before_a_policy() -> None:
    mp, offload = MixedPrecisionPolicy(param_dtype=torch.bfloat16), CPUOffloadPolicy(pin_memory=False)
    given = {"reshard_after_forward": 2, "mp_policy": mp, "offload_policy": offload}
    rule = Rule("layers.1", mixed_precision="PURE", reshard_after_forward=True)
    choices = choose(models.B(), rule, policy=lambda m: isinstance(m, models.Block) and given)
    assert choices.units["layers.0"].options["mp_policy"] is mp
    options = choices.units["layers.1"].options
    assert "mp_policy" not in options
    assert (options["mixed_precision"], options["reshard_after_forward"]) == ("PURE", True)
    assert options["offload_policy"] is offload


@pytest.mark.promise(14)
@pytest.mark.parametrize("how", ["rule", "policy", "attribute"])
def test_a_container_stands_for_its_children(how: str) -> None:
    model = models.B()
    if how == "attribute":
        model.layers._fsdp_wrap = True
    rules = [Rule("layers", shard=True)] if how == "rule" else []
    policy = (lambda module: isinstance(module, nn.ModuleList)) if how == "policy" else None
    choices = choose(model, *rules, policy=policy)
    assert [name for name in choices.units if name] == BLOCKS
    assert choices.warnings == (
        "layers is a ModuleList, which has no forward of its own; its children are used.",
    )


@pytest.mark.promise(14)
def test_no_warning_where_the_children_are_chosen_themselves() -> None:
    assert choose(models.B(), policy=lambda module: True).warnings == ()
    assert choose(models.B(), Rule(r"re:layers.*", shard=True)).warnings == ()


@pytest.mark.promise(15)
def test_parents_and_children_in_any_order() -> None:
    rules = [Rule("layers.0", shard=True), Rule("layers.0.mlp", shard=True)]
    assert list(choose(models.B(), *rules).units) == ["layers.0", "layers.0.mlp"]
    assert list(choose(models.B(), *reversed(rules)).units) == ["layers.0", "layers.0.mlp"]


@pytest.mark.promise(17)
def test_the_same_config_serves_two_models() -> None:
    config = ParallelismConfig(rules=[Rule("layers", shard=True, mixed_precision={"param_dtype": "bf16"})])
    before = repr(config)
    first, second = (choose(models.B(), *config.rules) for _ in range(2))
    assert first == second
    assert repr(config) == before


@pytest.mark.promise(18)
def test_the_root_is_chosen_once() -> None:
    choices = choose(models.B(), policy=lambda module: True)
    assert next(iter(choices.units)) == ""
    assert choices.units[""].reason == "fsdp_wrap_policy"


@pytest.mark.promise(18, 84)
@pytest.mark.parametrize("answer", [False, {}])  # Composer takes an empty dictionary as False, too
@pytest.mark.parametrize("how", ["policy", "attribute"])
def test_a_policy_that_chooses_nothing_is_refused(how: str, answer: Any) -> None:
    model = models.B()
    if how == "attribute":
        model.fsdp_wrap_fn = lambda module: answer
    with pytest.raises(ParallelismValueError, match="Nothing would be sharded"):
        choose(model, policy=(lambda module: answer) if how == "policy" else None)


@pytest.mark.promise(19)
def test_rules_leave_the_root_out_and_policies_do_not() -> None:
    assert list(choose(models.B(), Rule("layers", shard=True)).units) == BLOCKS
    both = choose(models.B(), Rule("layers", shard=True), Rule("", shard=True))
    assert list(both.units) == ["", *BLOCKS]
    assert list(choose(models.B(), policy=lambda m: isinstance(m, models.Block)).units) == ["", *BLOCKS]


@pytest.mark.promise(84)
def test_attributes_choose_and_refuse() -> None:
    model = models.Composers()
    model._fsdp_wrap = model.m2._fsdp_wrap = model.m5._fsdp_wrap = True
    assert list(choose(model).units) == ["", "m2", "m5"]
    model._fsdp_wrap = model.m5._fsdp_wrap = False
    assert list(choose(model).units) == ["m2"]
    blocks = models.B()
    blocks.layers[1]._fsdp_wrap = False  # the others are found by the structure
    assert list(choose(blocks).units) == ["", "layers.0", "layers.2"]


@pytest.mark.promise(84)
def test_the_function_of_the_nearest_ancestor_decides() -> None:
    model = models.Composers()
    model.fsdp_wrap_fn = lambda module: isinstance(module, models.Pair)
    model.m5.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)
    assert list(choose(model).units) == ["", "m2", "m5.a", "m5.b"]
    model._fsdp_wrap = False
    assert list(choose(model).units) == ["m2", "m5.a", "m5.b"]


@pytest.mark.promise(84)
def test_a_function_that_chooses_children_of_a_composer_model_chooses_nothing_else() -> None:
    model = ComposerClassifier(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), num_classes=4)
    children = composer_children(model)
    assert list(choose(model, children=children).units) == ["", "module", "module.0", "module.1"]
    model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Sequential)
    assert list(choose(model, children=children).units) == ["", "module"]


@pytest.mark.promise(84)
@pytest.mark.parametrize("wrap", [CustomPolicy, lambda function: function])
def test_policies_return_options_per_module(wrap: Any) -> None:
    def function(module: nn.Module) -> Any:
        return {"reshard_after_forward": False} if isinstance(module, models.Pair) else False

    choices = choose(models.Composers(), policy=wrap(function))
    assert choices.units["m2"].options == {"reshard_after_forward": False}
    assert choices.units[""].options == {}


@pytest.mark.promise(23, 84)
@pytest.mark.parametrize("key", ["tacos", "device_mesh", "verbose", "mesh"])
@pytest.mark.parametrize("how", ["policy", "attribute"])
def test_a_key_that_fully_shard_cannot_take_is_refused(how: str, key: str) -> None:
    model = models.Composers()
    if how == "attribute":
        model.fsdp_wrap_fn = lambda module: {key: False}
    with pytest.raises(
        ParallelismKeyError, match=f"'{key}'.*Valid keys are: reshard_after_forward, mp_policy"
    ):
        choose(model, policy=(lambda module: {key: False}) if how == "policy" else None)


@pytest.mark.promise(84)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "returned NoneType for module ''"),
        ("yes", "returned str"),
        ({"reshard_after_forward": "no"}, "must be bool or int, not str"),
        ({"mp_policy": "PURE"}, "must be MixedPrecisionPolicy, not str"),
    ],
)
def test_wrong_answers_are_refused(answer: Any, text: str) -> None:
    with pytest.raises(ParallelismTypeError, match=text):
        choose(models.B(), policy=lambda module: answer)


def test_a_replicated_module_keeps_blocks_inside_it_whole() -> None:
    choices = choose(models.EncoderDecoder(), Rule("encoder", shard=False))
    assert list(choices.units) == ["", "decoder.block.0", "decoder.block.1"]
    rules = [Rule("encoder", shard=False), Rule("encoder.block.1", shard=True)]
    deeper = choose(models.EncoderDecoder(), *rules)
    assert list(deeper.units) == ["encoder.block.1"]


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.module = models.M()
        self.other = models.Pair()
        self.listed = nn.ModuleList([nn.Linear(2, 2)])
        self.loss_metric, listed = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.loss_metric.net, listed.net = nn.Linear(2, 2), nn.Linear(2, 2)  # as metrics with a model have
        self.metrics = torchmetrics.MetricCollection([listed])

    def forward(self, batch: Any) -> Any:
        return self.module(batch)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs.mean()


@pytest.mark.promise(85)
def test_a_composer_model_s_children_are_units_and_its_metrics_stay_whole() -> None:
    model = Model()
    assert composer_children(model) == ("module", "other")
    choices = choose(model, children=composer_children(model))
    assert list(choices.units) == ["", "module", "module.0", "module.2", "other"]
    assert choices.units["other"].reason == "it is a direct child of the ComposerModel"
    assert {"loss_metric", "metrics", "metrics.MeanMetric"} == set(choices.plain)


@pytest.mark.promise(85)
def test_a_child_s_attribute_counts_and_its_function_does_not_judge_the_child() -> None:
    model = Model()
    model.other._fsdp_wrap = False
    model.module.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear) and module.out_features == 4
    assert list(choose(model, children=composer_children(model)).units) == ["", "module", "module.2"]


@pytest.mark.promise(85)
def test_another_model_is_refused() -> None:
    with pytest.raises(ParallelismTypeError, match="not a Sequential"):
        composer_children(models.M())


def test_attributes_are_inherited() -> None:
    model = models.Composers()
    model.m2.color = "red"
    found = inherited(read_structure(model).modules, "color")
    assert found["m2.a"] == "red"
    assert found["m5.a"] is None
