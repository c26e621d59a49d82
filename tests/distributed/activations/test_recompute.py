"""Activation checkpointing: the same gradients from fewer saved tensors, names untouched."""

import copy
import inspect
import random
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import apply_ac, named_parameters_canonical, parallelize_model
from composer_dist.distributed.activations.options import ac_mode
from composer_dist.distributed.activations.plan import checkpointed_modules
from composer_dist.distributed.activations.recompute import checkpoint_modules
from composer_dist.distributed.forwards import is_checkpointed
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError, ParallelismValueError
from tests.kit.compare import same, same_parameters
from tests.kit.grids import crossed, in_the_default_run
from tests.kit.huggingface import dropping_gpt2, llama
from tests.kit.meshes import mine
from tests.kit.models import B, batch
from tests.kit.planning import BLOCKS, Dropping, DroppingBlock, checkpointed, dropping_gradients, ids
from tests.kit.toy import sharded
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)

MODES: list[Any] = [
    "composable",
    ("composable", None),
    "wrapped",
    ("wrapped", {"preserve_rng_state": True}),
    "offload",
    ["composable", {"offload": True}],
    ("wrapped", {"offload": True}),
    "selective",
    ("wrapped", {"save": ["aten.addmm"]}),
]


@pytest.mark.promise(26, 28)
@pytest.mark.parametrize("value", MODES, ids=str)
def test_every_mode_gives_the_same_gradients_under_the_same_names(value: Any) -> None:
    model, plain = checkpointed(value)
    same(dropping_gradients(model), dropping_gradients(plain))
    runs = 1 if value == "offload" else 2
    assert [layer.calls for layer in model.layers] == [runs] * 3
    assert [layer.calls for layer in plain.layers] == [1] * 3
    with torch.no_grad():
        assert torch.equal(model.eval()(ids()), plain.eval()(ids()))
    assert [layer.calls for layer in model.layers] == [runs + 1] * 3
    assert dict(named_parameters_canonical(model)).keys() == dict(plain.named_parameters()).keys()
    assert model.state_dict().keys() == plain.state_dict().keys()
    renamed = any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    assert renamed == ("wrapped" in (value, value[0]))
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@pytest.mark.promise(26)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler
@pytest.mark.parametrize(
    ("mode", "whole"),
    in_the_default_run(("composable", True), among=product(("composable", "wrapped"), (False, True))),
)
def test_models_and_blocks_that_the_user_has_compiled(mode: str, whole: bool) -> None:
    plain = B()
    model = copy.deepcopy(plain)
    if whole:
        prepared: Any = torch.compile(model, backend="aot_eager")
    else:
        prepared = model
        model.layers = nn.ModuleList([torch.compile(one, backend="aot_eager") for one in model.layers])
    parallelize_model(prepared, ParallelismConfig(activation_checkpointing=mode))
    for one in (prepared, plain):
        one(batch(plain)).square().mean().backward()
    same_parameters(prepared, plain, gradients=True)


def test_composable_keeps_objects_signatures_and_deep_copies() -> None:
    model, plain = checkpointed("composable")
    blocks = list(model.layers)
    assert [type(block) for block in blocks] == [DroppingBlock] * 3
    assert inspect.signature(blocks[0].forward) == inspect.signature(plain.layers[0].forward)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    same(dropping_gradients(copied), dropping_gradients(plain))
    assert [layer.calls for layer in copied.layers] == [2] * 3


@pytest.mark.promise(26)
@pytest.mark.parametrize("value", ["composable", "wrapped", "offload", "selective"])
def test_two_backwards_over_one_forward(value: str) -> None:
    model, plain = checkpointed(value)
    for each in (model, plain):
        torch.manual_seed(5)
        output = each(ids())
        output.mean().backward(retain_graph=True)
        output.square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    named = named_parameters_canonical(model)
    same({name: p.grad for name, p in named if p.grad is not None}, expected)


@pytest.mark.promise(26)
def test_hooks_of_the_user_run_once_and_may_change_inputs() -> None:
    model, plain = checkpointed("composable", [])
    for each in (model, plain):
        each.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        each.layers[1].register_forward_hook(lambda module, args, output: output * 3)
    checkpoint_modules(model, BLOCKS, "composable", {})
    same(dropping_gradients(model), dropping_gradients(plain))


@pytest.mark.promise(26)
@pytest.mark.parametrize("value", MODES, ids=str)
def test_nested_modules(value: Any) -> None:
    model, plain = checkpointed(value, [*BLOCKS, "layers.0.mlp", "layers.0.mlp.0"])
    same(dropping_gradients(model), dropping_gradients(plain))


@pytest.mark.promise(26)
def test_a_module_under_two_names_is_wrapped_as_one() -> None:
    model, plain = Dropping(), Dropping()
    for each in (model, plain):
        each.layers.append(each.layers[0])
    plain.load_state_dict(model.state_dict())
    checkpoint_modules(model, ["layers.0"], "wrapped", {})
    assert model.layers[3] is model.layers[0]
    same(dropping_gradients(model), dropping_gradients(plain))


@pytest.mark.promise(26)
@pytest.mark.parametrize("value", ["composable", "offload", ("wrapped", {"offload": True}), "selective"])
def test_an_error_in_forward_leaves_nothing_open(value: Any) -> None:
    model, plain = checkpointed(value)
    fails = mock.patch.object(nn.GELU, "forward", side_effect=ZeroDivisionError)
    with fails, pytest.raises(ZeroDivisionError):
        model(ids())
    for layer in model.layers:
        layer.calls = 0
    same(dropping_gradients(model), dropping_gradients(plain))


# Modes


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, None),
        (True, ("composable", {})),
        ("wrapped", ("wrapped", {})),
        (("composable", None), ("composable", {})),
        (["offload", {"pin_memory": False}], ("offload", {"pin_memory": False})),
        (("wrapped", {"early_stop": False}), ("wrapped", {"early_stop": False})),
        ("selective", ("composable", {"save": "default"})),
        (["selective", {"save": ["aten.mm"]}], ("composable", {"save": ["aten.mm"]})),
        (("memory_budget", {"budget": 0}), ("memory_budget", {"budget": 0})),
    ],
)
def test_every_spelling_of_a_mode(value: Any, expected: Any) -> None:
    assert ac_mode(value) == expected


@pytest.mark.promise(27)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (("composable", {"use_reentrant": True}), "no option 'use_reentrant'; valid options: context_fn"),
        (("composable", {"every": 0}), "needs every to be a positive integer, not 0"),
        (("composable", {"every": True}), "needs every to be a positive integer, not True"),
        (("composable", {"early_stop": "no"}), "needs early_stop to be True or False, not 'no'"),
        (("composable", {"pin_memory": True}), "uses pin_memory only with offload; set offload=True"),
        (("composable", {"save": "default", "context_fn": len}), "save or context_fn, not both"),
        (("wrapped", {"save": "default", "checkpoint_impl": "REENTRANT"}), "use NO_REENTRANT"),
        (("wrapped", {"checkpoint_impl": "reentrant"}), "'NO_REENTRANT' or 'REENTRANT', not 'reentrant'"),
        (("memory_budget", {"budget": 1.5}), "a number from 0 .recompute all. to 1 .nothing., not 1.5"),
        ("memory_budget", r"needs a budget: \('memory_budget', \{'budget': 0.5\}\) keeps half"),
        (("memory_budget", {"save": []}), "no option 'save'; valid options: every, budget; needs a"),
        (("offload", {"early_stop": True}), "no option 'early_stop'; valid options: every, pin_"),
    ],
)
def test_unknown_options_are_named(value: Any, says: str) -> None:
    with pytest.raises(ParallelismValueError, match=says):
        ac_mode(value)


@pytest.mark.promise(27)
@pytest.mark.parametrize("value", [3, ("composable",), ("composable", {}, 1), ("wrapped", 1)])
def test_other_kinds_of_values_are_refused(value: Any) -> None:
    with pytest.raises(ParallelismTypeError, match="a pair of a mode and its options"):
        ac_mode(value)


@pytest.mark.promise(27)
def test_faults_are_all_named_before_anything_changes() -> None:
    model, plain = checkpointed("composable", ["layers.0"])
    with pytest.raises(ParallelismValueError, match="no module 'x'.*root.*'layers.0' is check"):
        checkpoint_modules(model, ["layers.1", "x", "", "layers.0"], "wrapped", {})
    assert [is_checkpointed(layer) for layer in model.layers] == [True, False, False]
    same(dropping_gradients(model), dropping_gradients(plain))


# Which modules


def is_block(module: nn.Module) -> bool:
    return isinstance(module, DroppingBlock)


@pytest.mark.promise(86)
def test_check_fn_decides_alone() -> None:
    model = Dropping()
    model.head._activation_checkpointing = True
    assert checkpointed_modules(model, is_block) == BLOCKS
    assert checkpointed_modules(model, lambda module: module is model) == []


@pytest.mark.promise(86)
def test_attributes_and_the_nearest_function_are_honored() -> None:
    model = Dropping()
    assert checkpointed_modules(model) == []
    model.layers[1]._activation_checkpointing = True
    assert checkpointed_modules(model) == ["layers.1"]
    model.activation_checkpointing_fn = is_block
    model.layers[0]._activation_checkpointing = False
    assert checkpointed_modules(model) == BLOCKS[1:]
    model.layers[2].activation_checkpointing_fn = lambda module: isinstance(module, nn.GELU)
    assert checkpointed_modules(model) == ["layers.1", "layers.2.mlp.1"]


@pytest.mark.promise(86)
def test_a_container_stands_for_its_children() -> None:
    model = Dropping()
    model.layers._activation_checkpointing = True
    assert checkpointed_modules(model) == BLOCKS
    everything = checkpointed_modules(model, lambda module: True)
    assert "layers" not in everything
    assert {*BLOCKS, "embed", "layers.0.mlp", "layers.0.mlp.0"} < set(everything)


# apply_ac


@pytest.mark.promise(86)
@pytest.mark.parametrize(
    ("checkpointing", "offload", "runs"), [(True, False, 2), (True, True, 2), (False, True, 1)]
)
@pytest.mark.parametrize("mode", ["composable", "wrapped"])
def test_apply_ac_runs_a_block_twice(checkpointing: bool, offload: bool, runs: int, mode: Any) -> None:
    model = Dropping()
    plain = copy.deepcopy(model)
    apply_ac(model, checkpointing, offload, is_block, mode=mode)
    same(dropping_gradients(model), dropping_gradients(plain))
    assert [layer.calls for layer in model.layers] == [runs] * 3


@pytest.mark.promise(86)
def test_apply_ac_warns_where_nothing_is_marked_and_refuses_a_check_fn_alone() -> None:
    with pytest.raises(ParallelismValueError, match="activation_checkpointing_check_fn"):
        apply_ac(Dropping(), False, False, is_block)
    apply_ac(Dropping(), False, False)
    with pytest.warns(UserWarning, match="no module is marked"):
        apply_ac(Dropping(), True, False)


# Sharded


@pytest.mark.promise(26)
@pytest.mark.parametrize("value", MODES[::2], ids=str)
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_under_fully_shard(value: Any, reshard: bool) -> None:
    model, plain = checkpointed(value)
    sharded(model.eval(), reshard_after_forward=reshard)
    plain.eval()
    for step in range(2):
        model.zero_grad()
        plain.zero_grad()
        plain(ids() // (step + 1)).square().mean().backward()
        model(mine(ids() // (step + 1))).square().mean().backward()
        same_parameters(model, plain, gradients=True)
    runs = 2 if value == "offload" else 4
    assert [layer.calls for layer in model.layers] == [runs] * 3


# Hugging Face


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=16, dropout_rate=0.1, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


@pytest.mark.promise(26)
@crossed({"build": [t5, llama, dropping_gpt2], "mode": ["composable", "wrapped"]})
def test_models_with_a_cache_recompute_the_same(build: Any, mode: Any) -> None:
    model = build().train()
    plain = copy.deepcopy(model)
    names = checkpointed_modules(
        model, lambda module: type(module).__name__.endswith(("Block", "DecoderLayer"))
    )
    checkpoint_modules(model, names, mode, {})
    results = []
    for each in (model, plain):
        torch.manual_seed(2)
        output = each(input_ids=ids(), labels=ids(), use_cache=True)
        output.loss.backward()
        results.append({n: p.grad for n, p in named_parameters_canonical(each) if p.grad is not None})
    same(*results)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(each.eval().generate(ids(), **options) for each in (model, plain)))


@pytest.mark.promise(26)
def test_a_filled_cache_is_refused_under_grad() -> None:
    model = llama().train()
    with torch.no_grad():
        cache = model(input_ids=ids(), use_cache=True).past_key_values
    checkpoint_modules(model, ["model.layers.0", "model.layers.1"], "composable", {})
    with pytest.raises(ParallelismValueError, match="LlamaDecoderLayer got a key-value cache"):
        model(input_ids=ids(), past_key_values=cache)


class Updates(nn.Module):
    """Changes a buffer from its `since`-th call on, and uses it."""

    def __init__(self, how: Callable[[Any], object], since: int) -> None:
        super().__init__()
        self.linear, self._how, self.since = nn.Linear(4, 4), how, since
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.since <= STEP:
            self._how(self)
        return self.linear(x) * self.scale


STEP = 0


def _halve_array(block: Any) -> None:
    array = block.scale.numpy()
    array *= 0.5


UPDATES: dict[str, Callable[[Any], object]] = {
    "in place": lambda block: block.scale.mul_(0.5),
    "data": lambda block: block.scale.data.mul_(0.5),
    "another": lambda block: setattr(block, "scale", block.scale * 0.5),
    "numpy": _halve_array,
}


@pytest.mark.promise(26)
@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("mode", ["composable", "wrapped"])
@pytest.mark.parametrize("how", UPDATES.values(), ids=UPDATES)
def test_a_block_updates_its_buffer_once(
    how: Callable[[Any], object], mode: Any, since: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = nn.Sequential(Updates(how, since), nn.Linear(4, 1))
    model = copy.deepcopy(single)
    apply_ac(model, True, False, lambda module: isinstance(module, Updates), mode=mode)
    for step in range(1, 5):
        monkeypatch.setattr("tests.distributed.activations.test_recompute.STEP", step)
        x = torch.randn(3, 4)
        for one in (model, single):
            one(x).sum().backward()
        same_parameters(model, single, gradients=True)
        torch.testing.assert_close(next(model.buffers()), next(single.buffers()), rtol=0, atol=0)


@pytest.mark.promise(26)
def test_an_argument_changed_through_data_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Updates(lambda block: None, 9), nn.Linear(4, 1))
    block = model[1].forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)
        return block(x)

    model[1].forward = forward
    apply_ac(model, True, False, lambda module: isinstance(module, Updates))
    with pytest.raises(ParallelismRuntimeError, match="among its arguments in place"):
        model(torch.randn(3, 4))


class Remembers(nn.Module):
    """Changes what `how` changes, and uses what it returns."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self._how = nn.Linear(4, 4), how
        self.count, self.values, self.box = 0, [1.0], SimpleNamespace(values=[1.0])
        self.plain = torch.ones(4)
        self.generator, self.own = torch.Generator(), numpy.random.default_rng(3)
        self.first, self.second = nn.Module(), nn.Module()
        self.register_buffer("both", torch.ones(2, 4))
        self.second.register_buffer("row", self.get_buffer("both")[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self._how(self)).tanh()


def _count(block: Any) -> float:
    block.count += 1
    return 0.1 * block.count


def _appended(values: list[float]) -> float:
    values.append(1.0)
    return 0.1 * len(values)


REMEMBERED: dict[str, Callable[[Any], Any]] = {
    "a number": _count,
    "a list": lambda block: _appended(block.values),
    "a list in an object": lambda block: _appended(block.box.values),
    "a tensor": lambda block: block.plain.mul_(0.5).clone(),
    "a view of a buffer": lambda block: (block.both.mul_(0.5), block.second.row.clone())[1],
    "Python's random numbers": lambda block: random.random(),
    "numpy's random numbers": lambda block: float(numpy.random.rand()),
    "a generator": lambda block: torch.rand((), generator=block.generator),
    "a generator of numpy": lambda block: float(block.own.random()),
}


@pytest.mark.promise(26)
@pytest.mark.parametrize("mode", ["composable", "wrapped"])
@pytest.mark.parametrize("how", REMEMBERED.values(), ids=REMEMBERED)
def test_a_block_finds_again_what_its_first_forward_found(how: Callable[[Any], Any], mode: Any) -> None:
    single = nn.Sequential(Remembers(how), nn.Linear(4, 1))
    model = copy.deepcopy(single)
    model[0].second.row = model[0].both[1]
    apply_ac(model, True, False, lambda module: isinstance(module, Remembers), mode=mode)
    x = torch.randn(3, 4)
    for one in (model, single):
        random.seed(1)
        numpy.random.seed(1)
        for _ in range(3):
            one(x).sum().backward()
    same_parameters(model, single, gradients=True)


class Carries(nn.Module):
    """Keeps its output with its gradient, and begins its next forward with the value of it."""

    def __init__(self, begin: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.h, self._begin = nn.Linear(4, 4), torch.zeros(3, 4), begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.tanh(self.linear(x + self._begin(self)))
        return x + self.h


BEGINNINGS: dict[str, Callable[[Any], torch.Tensor]] = {
    "detach": lambda block: block.h.detach(),
    "detach_": lambda block: block.h.detach_(),
    "with its graph": lambda block: block.h.sin(),
}


@pytest.mark.promise(26)
@pytest.mark.parametrize("mode", ["composable", "wrapped", "selective"])
@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_block_finds_again_the_state_that_it_detaches(begin: Callable[[Any], Any], mode: Any) -> None:
    single = nn.Sequential(Carries(begin), nn.Linear(4, 1))
    model = copy.deepcopy(single)
    apply_ac(model, True, False, lambda module: isinstance(module, Carries), mode=mode)
    for _ in range(3):
        steps = [torch.randn(3, 4) for _ in range(2)]
        for one in (model, single):
            sum(one(x).sum() for x in steps).backward()
        kept, expected = (next(m for m in one.modules() if isinstance(m, Carries)) for one in (model, single))
        torch.testing.assert_close(kept.h, expected.h, rtol=0, atol=0)
        for block in (kept, expected):
            block.h = block.h.detach().requires_grad_()
        same_parameters(model, single, gradients=True)


def test_a_large_state_that_changes_in_place_is_refused() -> None:
    block = Carries(lambda block: block.h.detach_().mul_(0.5))
    model = nn.Sequential(block)
    apply_ac(model, True, False, lambda module: isinstance(module, Carries))
    x = torch.randn(2, 1 << 14, 4)
    block.h = torch.zeros_like(x).requires_grad_().clone()
    output = model(x)
    with pytest.raises(ParallelismRuntimeError, match="h of a Carries, in a recomputed block, was changed"):
        output.sum().backward()


class Adapts(nn.Module):
    """Takes a step of its own within its forward, which recomputes a part of it there already."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0.0
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1.0
        self.scale.mul_(0.5)
        inner = self.linear(x).tanh().square().mean() * self.count
        [gradient] = torch.autograd.grad(inner, self.linear.weight, create_graph=True)
        self.count += 1.0
        self.scale += 1.0
        return nn.functional.linear(x, self.linear.weight - gradient) * self.scale * self.count


@pytest.mark.promise(26)
@pytest.mark.parametrize("mode", ["composable", "wrapped", "selective", "offload"])
def test_a_backward_inside_of_a_recomputed_forward(mode: Any) -> None:
    single = nn.Sequential(Adapts(), nn.Linear(4, 1))
    model = copy.deepcopy(single)
    apply_ac(model, True, False, lambda module: isinstance(module, Adapts), mode=mode)
    for _ in range(3):
        x = torch.randn(3, 4)
        for one in (model, single):
            one(x).sum().backward()
        same_parameters(model, single, gradients=True)
        torch.testing.assert_close(next(model.buffers()), next(single.buffers()), rtol=0, atol=0)
    assert model[0].count == single[0].count
