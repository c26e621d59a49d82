"""Which modules' activations are recomputed, and why."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist import FSDP2Config, ParallelismConfig, Rule
from composer_dist.distributed import apply_ac, parallelize_model, plan_parallelism
from composer_dist.distributed.activations.plan import ActivationPlan, Checkpointed
from composer_dist.distributed.activations.recompute import apply
from composer_dist.distributed.forwards import is_checkpointed
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit import models
from tests.kit.planning import BLOCKS


def _plan(model: nn.Module, check_fn: Any = None, **config: Any) -> tuple[Checkpointed, ...]:
    return plan_parallelism(
        model, ParallelismConfig(**config), world_size=2, activation_checkpointing_check_fn=check_fn
    ).checkpointing


@pytest.mark.promise(86)
def test_blocks_are_the_default_once_checkpointing_is_on() -> None:
    assert _plan(models.B()) == ()
    assert _plan(models.B(), activation_checkpointing=True) == tuple(
        Checkpointed(name, "composable", "it is a block") for name in BLOCKS
    )
    # Units that are split by dtype are not blocks.
    names = [one.module for one in _plan(models.dtypes(), activation_checkpointing="wrapped")]
    assert names == BLOCKS


@pytest.mark.promise(86)
@pytest.mark.parametrize(
    ("flags", "mode", "options"),
    [
        ({"activation_checkpointing": True}, "composable", {}),
        ({"activation_cpu_offload": True}, "offload", {}),
        ({"activation_checkpointing": True, "activation_cpu_offload": True}, "composable", {"offload": True}),
    ],
)
def test_composer_s_flags(flags: dict[str, bool], mode: str, options: dict[str, Any]) -> None:
    found = _plan(models.B(), fsdp2=FSDP2Config(**flags))
    pinned = {"pin_memory": torch.accelerator.is_available()} if "activation_cpu_offload" in flags else {}
    expected = [(name, mode, options | pinned) for name in BLOCKS]
    assert [(one.module, one.mode, dict(one.options)) for one in found] == expected


@pytest.mark.promise(86)
def test_a_check_function_or_attributes_choose() -> None:
    found = _plan(models.B(), lambda module: isinstance(module, models.Mlp), activation_checkpointing=True)
    assert [one.module for one in found] == [f"{name}.mlp" for name in BLOCKS]
    assert {one.reason for one in found} == {"activation_checkpointing_check_fn"}
    model = models.B()
    model.layers[1]._activation_checkpointing = True
    found = _plan(model, activation_checkpointing=True)
    (one,) = found
    assert (one.module, one.reason) == ("layers.1", "an attribute of the model asks for it")


@pytest.mark.promise(86)
def test_wishes_without_effect_are_refused_or_warned_about() -> None:
    with pytest.raises(ParallelismValueError, match="must be enabled"):
        _plan(models.B(), lambda module: True)
    with pytest.raises(ParallelismValueError, match="check_fn chooses no module"):
        _plan(models.B(), lambda module: False, activation_checkpointing=True)
    with pytest.raises(ParallelismValueError, match="no module is marked"):
        _plan(models.Composers(), activation_checkpointing=True)
    inside, all_of_them = [Rule("layers.0.mlp", act_ckpt=False)], [Rule("layers", act_ckpt=False)]
    with pytest.raises(ParallelismValueError, match="excludes nothing: .* chooses layers.0, layers.1"):
        _plan(models.B(), activation_checkpointing=True, rules=inside)
    with pytest.raises(ParallelismValueError, match="excludes nothing: activation_checkpointing is off"):
        _plan(models.B(), rules=inside)
    with pytest.raises(ParallelismValueError, match="activation_checkpointing has no effect, because"):
        _plan(models.B(), activation_checkpointing=True, rules=all_of_them)
    with pytest.warns(UserWarning, match="no module is marked"):
        assert _plan(models.Composers(), activation_checkpointing=True, strict=False) == ()


def test_rules_come_first_and_can_say_no() -> None:
    rules = [Rule("layers.0", act_ckpt=False), Rule("layers.1", act_ckpt="wrapped")]
    found = _plan(models.B(), activation_checkpointing="composable", rules=rules)
    assert {one.module: (one.mode, one.reason) for one in found} == {
        "layers.1": ("wrapped", "rule 'layers.1'"),
        "layers.2": ("composable", "it is a block"),
    }


@pytest.mark.promise(27)
def test_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ParallelismValueError, match="'composable', 'wrapped', 'offload'"):
        _plan(models.B(), activation_checkpointing="partial")
    with pytest.raises(ParallelismValueError, match="Did you mean 'wrapped'"):
        _plan(models.B(), activation_checkpointing=("wraped", {}))
    with pytest.warns(UserWarning, match="'partial'.*Using 'composable'"):
        found = _plan(models.B(), activation_checkpointing=("partial", {"a": 1}), strict=False)
    assert [(one.mode, dict(one.options)) for one in found] == [("composable", {})] * 3


def test_the_plan_is_carried_out() -> None:
    model = models.B()
    chosen = (
        Checkpointed("layers.0", "composable", ""),
        Checkpointed("layers.2", "wrapped", "", {"debug": False}),
    )
    apply(read_structure(model), ActivationPlan(chosen))
    assert [is_checkpointed(layer) for layer in model.layers] == [True, False, True]
    assert type(model.layers[2]).__name__ == "CheckpointWrapper"


@pytest.mark.promise(26)
def test_every_nth_block_beginning_with_the_first() -> None:
    found = _plan(models.B(), activation_checkpointing=("composable", {"every": 2, "early_stop": False}))
    reason = "it is a block, the first of every 2"
    assert found == tuple(
        Checkpointed(name, "composable", reason, {"early_stop": False}) for name in ("layers.0", "layers.2")
    )
    (one,) = _plan(models.B(), activation_checkpointing=("offload", {"every": 3}))
    assert one.module == "layers.0"


@pytest.mark.promise(26)
def test_a_rule_counts_its_own_modules() -> None:
    rules = [Rule("re:.*mlp", act_ckpt=("selective", {"every": 2})), Rule("layers.1", act_ckpt="offload")]
    found = _plan(models.B(), activation_checkpointing=("composable", {"every": 2}), rules=rules)
    assert [(one.module, one.mode) for one in found] == [
        ("layers.0.mlp", "composable"),
        ("layers.2.mlp", "composable"),
        ("layers.1", "offload"),
        ("layers.0", "composable"),
        ("layers.2", "composable"),
    ]


def test_the_plan_explains_what_becomes_of_activations() -> None:
    rules = [
        Rule("layers.0", act_ckpt="selective"),
        Rule("layers.1", act_ckpt=("wrapped", {"save": ["aten.mm", "aten.tanh"], "offload": True})),
        Rule("layers.2", act_ckpt="offload"),
    ]
    plan = plan_parallelism(models.B(), ParallelismConfig(rules=rules))
    for name, said in {
        "layers.0": "recomputed (composable) except for the results of matrix products, attention and "
        "collectives",
        "layers.1": "recomputed (wrapped) except for the results of aten.mm, aten.tanh; saved tensors are "
        "kept on the host",
        "layers.2": "offloaded to the host",
    }.items():
        assert plan.explain(name).endswith(f"Its activations are {said}, because rule '{name}'.")


def test_options_come_from_yaml() -> None:
    values = {"activation_checkpointing": ["selective", {"save": ["default", "aten.silu"], "every": 2}]}
    found = plan_parallelism(models.B(), values).checkpointing
    assert [one.options["save"] for one in found] == [["default", "aten.silu"]] * 2


def test_functions_among_the_options_have_one_spelling_on_every_rank() -> None:
    def context() -> None: ...

    config = ParallelismConfig(activation_checkpointing=("composable", {"context_fn": context}))
    plan = plan_parallelism(models.B(), config)
    (one, *_) = plan.to_dict()["activations"]["modules"]
    assert one["options"] == {"context_fn": context.__qualname__}


@pytest.mark.promise(27)
def test_what_cannot_be_checkpointed_is_named_when_planned() -> None:
    model = models.B()
    with pytest.raises(ParallelismValueError, match="the root cannot be wrapped, because no module"):
        _plan(model, rules=[Rule("", act_ckpt="wrapped")])
    with pytest.raises(ParallelismValueError, match="no option 'svae'; valid options: .*save"):
        _plan(model, rules=[Rule("layers.1", act_ckpt=("selective", {"svae": []}))])
    apply_ac(model, True, False, lambda module: module is model.layers[1])
    with pytest.raises(ParallelismValueError, match="'layers.1' is checkpointed already"):
        _plan(model, activation_checkpointing=True)


@pytest.mark.promise(29)
def test_pinning_without_an_accelerator_is_refused_before_anything_changes() -> None:
    model = models.B()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = ParallelismConfig(activation_checkpointing=("offload", {"pin_memory": True}))
    no_accelerator = mock.patch("torch.accelerator.is_available", return_value=False)
    with no_accelerator, pytest.raises(ParallelismRuntimeError, match="pin_memory=True .*accelerator"):
        parallelize_model(model, config)
    model(models.batch(model))  # as usable as before
