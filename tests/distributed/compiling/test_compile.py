"""torch.compile, block by block: the same training, nothing renamed, one compilation for alike blocks.

Longer than other files: all cases count compilations of the same models.
"""

import copy
import inspect
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from composer_dist import DDPConfig, FSDP2Config, MeshConfig, ParallelismConfig, Rule, TPConfig
from composer_dist.distributed import named_parameters_canonical, parallelize_model, plan_parallelism
from composer_dist.distributed.activations import recompute
from composer_dist.distributed.compiling.apply import apply
from composer_dist.distributed.compiling.plan import Compiled, CompilePlan, compile_options
from composer_dist.distributed.forwards import is_checkpointed, is_compiled
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit import compare, models
from tests.kit.grids import slow
from tests.kit.huggingface import dropping_gpt2, llama
from tests.kit.meshes import mine
from tests.kit.planning import BLOCKS
from tests.kit.toy import built
from tests.kit.world import on_ranks

# Dynamo looks whether a non-leaf tensor has a gradient, and hides torch's warning by a filter of its own.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
AOT = {"backend": "aot_eager", "fullgraph": True}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    fresh()
    yield
    fresh()


def fresh() -> None:
    """Forget what has been compiled: all models of these tests share their code."""
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


class Block(nn.Module):
    """With dropout, and an activation that is cheap to keep away."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)).exp().sin()
        return x + nn.functional.dropout(self.down(hidden), 0.3, self.training)


def results(model: nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of one step with the dropout of one seed."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(torch.arange(12).view(3, 4)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same_bits(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for one, other in zip(results(model), expected, strict=True):
        assert torch.equal(one, other)


def compiled(ac: Any = None, blocks: int = 3, block: Any = Block, **config: Any) -> tuple[models.B, models.B]:
    """A model with compiled, maybe checkpointed blocks, and its copy without."""
    model = models.B(blocks=blocks, block=block)
    plain = copy.deepcopy(model)
    settings = ParallelismConfig(activation_checkpointing=ac, **{"compile": AOT} | config)
    plan = plan_parallelism(model, settings)
    recompute.apply(read_structure(model), plan.activations)
    apply(read_structure(model), plan.compiling)
    return model, plain


# The plan


def test_the_plan_lists_what_is_compiled_and_why() -> None:
    rules = [Rule("layers.1", compile=False), Rule("head", compile={"backend": "eager"})]
    plan = plan_parallelism(models.B(), ParallelismConfig(compile=AOT, rules=rules))
    assert plan.compiled == (
        Compiled("layers.0", "it is a block", AOT),
        Compiled("layers.2", "it is a block", AOT),
        Compiled("head", "rule 'head'", {"backend": "eager"}),
    )
    said = "Its forward is compiled (backend=aot_eager, fullgraph=True), because it is a block."
    assert said in plan.explain("layers.0")
    assert "compiled" not in plan.explain("layers.1")
    assert "compiled: 3 modules, each separately (aot_eager, eager)" in str(plan)
    compiled = plan.to_dict()["compiling"]["modules"]
    assert [one["module"] for one in compiled] == ["layers.0", "layers.2", "head"]
    assert plan.digest() != plan_parallelism(models.B(), ParallelismConfig(compile=True)).digest()


def test_blocks_are_found_where_they_are_no_units() -> None:
    config = ParallelismConfig(compile=True, activation_checkpointing=True, rules=[Rule("", True)])
    plan = plan_parallelism(models.B(), config)
    assert [one.module for one in plan.compiled] == BLOCKS
    assert [one.module for one in plan.checkpointing] == BLOCKS


@pytest.mark.promise(26)
def test_a_model_without_blocks_is_compiled_whole_as_by_a_rule() -> None:
    plan, ruled = (
        plan_parallelism(models.Composers(), ParallelismConfig(**config))
        for config in ({"compile": AOT}, {"rules": [Rule("", compile=AOT)]})
    )
    assert plan.compiled == (Compiled("", "the model has no repeated block", AOT),)
    assert [one.module for one in ruled.compiled] == [""]
    part = ParallelismConfig(compile=True, rules=[Rule("m2", compile=True)])
    assert [one.module for one in plan_parallelism(models.Composers(), part).compiled] == ["m2"]
    model, plain = models.Composers(), models.Composers()
    plain.load_state_dict(model.state_dict())
    apply(read_structure(model), plan.compiling)
    x = torch.randn(2, 10)
    assert torch.equal(model(x), plain(x))
    assert graphs() == 1


def test_every_spelling_of_compile() -> None:
    assert compile_options(False) is compile_options(None) is None
    assert compile_options(True) == {"backend": "inductor"}
    assert compile_options({"backend": "eager", "dynamic": None}) == {"backend": "eager"}
    for value in ({"mode": "max-autotune", "dynamic": False}, {"options": {"max_autotune": True}}):
        assert compile_options(value) == {"backend": "inductor", **value}


def test_compile_comes_from_yaml() -> None:
    values = {"compile": {"backend": "aot_eager"}, "rules": [{"match": "head", "compile": True}]}
    plan = plan_parallelism(models.B(), values)
    assert {one.options["backend"] for one in plan.compiled} == {"aot_eager"}
    assert [one.module for one in plan.compiled] == [*BLOCKS, "head"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"fulgraph": True}, "has no option 'fulgraph'.*Did you mean 'fullgraph'"),
        ({"backend": "inducter"}, "no backend 'inducter' here; valid backends: .*inductor"),
        ({"mode": "fast"}, "no mode 'fast'; valid modes: default, .*max-autotune"),
        (
            {"mode": "max-autotune", "backend": "aot_eager"},
            "only with backend 'inductor', not 'aot_eager'; leave",
        ),
        ({"mode": "default", "options": {}}, "mode or options, not both"),
        ({"options": {"max_autotun": True}}, "inductor option 'max_autotun'.*'max_autotune'"),
        ({"options": ["max_autotune"]}, "a mapping of inductor's options"),
        ({"dynamic": "yes"}, "needs dynamic to be True or False, not 'yes'"),
    ],
)
def test_bad_options_are_named_when_planned(value: Any, says: str) -> None:
    with pytest.raises(ParallelismValueError, match=says):
        plan_parallelism(models.B(), ParallelismConfig(compile=value))


def test_other_kinds_of_values_are_refused() -> None:
    with pytest.raises(ParallelismTypeError, match="a bool or a mapping of options, not 'inductor'"):
        plan_parallelism(models.B(), ParallelismConfig(compile="inductor"))  # type: ignore[arg-type]


BUDGET = ("memory_budget", {"budget": 0.5})
OFFLOADED = ("selective", {"offload": True})
EAGER = {"backend": "eager"}
CP: dict[str, Any] = {"mesh": MeshConfig(cp=2)}
TP: dict[str, Any] = {"mesh": MeshConfig(tp=2), "tp": TPConfig()}
NOTHING = {"rules": [Rule("head", compile=False)]}
WHOLE = {"rules": [Rule("", compile=False)]}
BLOCKLESS = {"rules": [Rule("re:layers..", compile=False)]}
PART = {"rules": [Rule("layers.0", act_ckpt="selective"), Rule("layers.0.mlp", compile=AOT)]}
ROOT = {"rules": [Rule("", True, compile=AOT), Rule("layers", True)]}


@pytest.mark.parametrize(
    ("build", "compiled", "ac", "config", "says"),
    [
        (
            models.B,
            True,
            None,
            NOTHING,
            "'head' sets compile=False, but excludes nothing: compile chooses layers.0",
        ),
        (models.B, None, None, NOTHING, "'head' sets compile=False, but excludes nothing: compile is off"),
        (models.Composers, True, None, WHOLE, r"compile has no effect, because rule '' sets .*\(root\)"),
        (models.B, True, None, BLOCKLESS, r"compile has no effect, .* 're:layers..' .*\(layers.0, layers.1"),
        (models.B, False, BUDGET, {}, "budget of layers.0, .* set compile=True"),
        (models.B, EAGER, BUDGET, {}, "layers.1, layers.2: backend 'eager' does not .* budget; inductor"),
        (models.B, EAGER, "selective", {}, r"other random numbers \(dropout\); use 'aot_eager'"),
        (models.B, AOT, OFFLOADED, {}, "saved results here; leave out save, or offload"),
        (models.B, False, None, PART, "layers.0.mlp: .* compile and checkpoint the same module"),
        (models.B, False, None, ROOT, "root: units inside"),
        (llama, AOT, True, CP, r"(?s)\(cp=2\) breaks the graph .* activation.*which fullgraph=True does"),
        (llama, AOT, True, TP, "model.layers.0, model.layers.1: .* the collectives of .*='selective'"),
        (llama, AOT, BUDGET, TP, "cannot recompute the collectives"),
        (models.dtypes, AOT, None, {}, "layers.0, layers.1, layers.2: .*which fullgraph=True"),
        (models.dtypes, True, True, {}, "which activation checkpointing does not support"),
    ],
)
def test_what_does_not_go_together_is_refused_when_planned(
    build: Any, compiled: Any, ac: Any, config: dict[str, Any], says: str
) -> None:
    settings = ParallelismConfig(compile=compiled, activation_checkpointing=ac, **config)
    with pytest.raises(ParallelismValueError, match=says):
        plan_parallelism(build(), settings, world_size=2)


def test_what_is_compiled_already_is_refused() -> None:
    model = models.B()
    model.layers[1].compile(backend="eager")
    with pytest.raises(ParallelismValueError, match="compile layers.1: it is compiled already"):
        plan_parallelism(model, ParallelismConfig(compile=True))


# In place


@pytest.mark.promise(26)
@pytest.mark.parametrize("ac", [None, "composable", "wrapped", "offload", "selective", BUDGET], ids=str)
def test_compiled_blocks_give_the_same_bits(ac: Any) -> None:
    model, plain = compiled(ac, blocks=12 if ac == "composable" else 3)  # Dynamo gives up after eight
    same_bits(model, results(plain))
    assert graphs() == 1, "alike blocks share one compilation"
    names = [name for name, _ in named_parameters_canonical(model)]
    assert names == [name for name, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    for layer in model.layers:
        assert is_compiled(layer)
        assert is_checkpointed(layer) == (ac in ("composable", "wrapped", "selective"))


@pytest.mark.promise(26)
def test_a_checkpointed_part_of_a_compiled_block_gives_the_same_bits() -> None:
    rules = [Rule("re:.*up", act_ckpt="composable"), Rule("layers", compile=AOT)]
    model, plain = compiled(compile=False, rules=rules)
    same_bits(model, results(plain))
    assert graphs() == 3, "each block for its own"


class Counting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.promise(26)
def test_what_forward_changes_about_objects_is_changed_once() -> None:
    model, plain = compiled("composable", block=Counting)
    same_bits(model, results(plain))
    assert [layer.calls for layer in (*model.layers, *plain.layers)] == [1] * 6


def test_hooks_stay_outside_and_run_once() -> None:
    model, plain = compiled("composable")
    seen: list[object] = []
    for each in (model, plain):
        # Neither an object's identity nor its printing could be traced with fullgraph=True.
        each.layers[1].register_forward_pre_hook(lambda module, args: seen.append(repr(module)))
        each.layers[1].register_forward_hook(lambda module, args, output: output * id(seen) / id(seen))
    same_bits(model, results(plain))
    assert len(seen) == 2


def test_deep_copies_and_pickles_compile_their_own() -> None:
    model, plain = compiled("composable")
    expected = results(plain)
    results(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for each in copies:
        assert is_compiled(each.layers[0])
        assert is_checkpointed(each.layers[0])
        same_bits(each, expected)
    first, second = (inspect.signature(each.layers[0].forward) for each in (model, plain))
    assert first == second


def saved_bytes(model: nn.Module) -> int:
    """What autograd keeps of the blocks between forward and backward."""
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(64, 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in model.layers:
            x = layer(x)
    x.sum().backward()
    return sum(saved.values())


def test_a_memory_budget_keeps_less() -> None:
    sizes = []
    for budget in (1.0, 0.5, 0.0):
        fresh()
        model, _ = compiled(("memory_budget", {"budget": budget}))
        sizes.append(saved_bytes(model))
    assert sizes[0] > sizes[1] > sizes[2]
    assert torch._functorch.config.activation_memory_budget == 1.0, "no other compilation is affected"


def test_each_module_may_have_a_budget_of_its_own() -> None:
    quarter = ("memory_budget", {"budget": 0.25})
    rules = [Rule("layers.0", act_ckpt=quarter), Rule("layers.1", act_ckpt=BUDGET)]
    plan = plan_parallelism(models.B(), ParallelismConfig(compile=AOT, rules=rules))
    assert [one.budget for one in plan.compiled] == [0.25, 0.5, None]
    said = "Its activations are kept or recomputed by torch.compile within 25% of the memory"
    assert said in plan.explain("layers.0")


def test_torch_s_eager_backend_recomputes_with_other_random_numbers() -> None:
    """Why the plan refuses it; where this fails, torch has learned it."""
    model, plain = compiled("composable")
    for layer in model.layers:
        layer.forward._options["backend"] = "eager"
    assert not all(torch.equal(*pair) for pair in zip(results(model), results(plain), strict=True))


# Sharded


def trained(build: Any, config: dict[str, Any]) -> tuple[int, int]:
    fresh()
    done = compare.assert_same_training(build, ParallelismConfig(**config))
    assert all(is_compiled(dict(done.model.named_modules())[one.module]) for one in done.plan.compiled)
    return graphs(), sum(counters["graph_break"].values())


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    ("build", "ac", "config", "compilations"),
    [
        (models.B, None, {"compile": {"backend": "eager", "fullgraph": True}}, 1),
        (models.tied, "composable", {}, 1),
        *(slow(models.B, ac, {}, 1) for ac in ("offload", "selective", "wrapped")),
        slow(models.bert, BUDGET, {}, 1),
        slow(models.scalar, None, {"rules": [Rule("layers.1", act_ckpt="selective")]}, 2),
    ],
)
@on_ranks(2)
def test_training_compiled_and_sharded_is_the_same(
    build: Any, ac: Any, config: dict[str, Any], compilations: int
) -> None:
    assert trained(build, {"compile": AOT, "activation_checkpointing": ac} | config) == (compilations, 0)


@pytest.mark.parametrize("build", [models.own_dtype, slow(models.dtypes)])
@on_ranks(2)
def test_a_block_around_a_unit_breaks_its_graph_and_trains_the_same(build: Any) -> None:
    config = {"compile": {"backend": "aot_eager"}, "fsdp2": FSDP2Config(reshard_after_forward=False)}
    parts, breaks = trained(build, config)
    assert parts > 0
    assert breaks > 0


@pytest.mark.promise(118)
@on_ranks(2)
def test_a_rule_compiles_its_module_under_ddp_too() -> None:
    fresh()
    reference, model = built(models.B), built(models.B)
    done = parallelize_model(model, ParallelismConfig(ddp=DDPConfig(), rules=[Rule("layers.1", compile=AOT)]))
    assert [one.module for one in done.plan.compiled] == ["layers.1"]
    x = models.batch(model)
    torch.testing.assert_close(model(mine(x)), mine(reference(x)))
    assert graphs() == 1


@pytest.mark.promise(26)
@on_ranks(2)
def test_replicas_compile_too() -> None:
    fresh()
    reference, model = built(models.B), built(models.B)
    parallelize_model(
        model, ParallelismConfig(ddp=DDPConfig(), compile=AOT, activation_checkpointing="selective")
    )
    x = models.batch(model)
    model(mine(x)).square().mean().backward()
    reference(x).square().mean().backward()
    compare.same_parameters(model, reference, gradients=True)
    assert graphs() == 1


@pytest.mark.slow
@on_ranks(2)
def test_a_replica_may_be_compiled_whole_after_the_preparation() -> None:
    """The compiler traced this library's hooks, down to their collectives, which it does not support."""
    fresh()
    reference, model = nn.Linear(8, 8), nn.Linear(8, 8)
    model.load_state_dict(reference.state_dict())
    parallelize_model(model, DDPConfig(), precision="amp_bf16")
    compiled, x = torch.compile(model, backend="aot_eager"), torch.arange(16.0).view(2, 8) / 8
    for scale in (1, 2):
        compiled(mine(x) * scale).square().mean().backward()
        reference(x * scale).square().mean().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad, rtol=0.05, atol=0.05)


@pytest.mark.promise(104)
@on_ranks(2)
def test_layers_of_torch_that_the_user_has_compiled_are_sharded() -> None:
    """The compiler gives such a layer's function the layer's own dictionaries of parameters."""
    fresh()
    reference, model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), nn.Sequential()
    for layer in copy.deepcopy(reference):
        model.append(torch.compile(layer, backend="aot_eager"))
    parallelize_model(model, FSDP2Config())
    x = torch.arange(16.0).view(2, 8) / 8
    for _ in range(2):
        for one, inputs in ((model, mine(x)), (reference, x)):
            one(inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
    compare.same_parameters(model, reference, gradients=True)


# Dynamo makes an object of an autograd function for itself.
@pytest.mark.slow
@pytest.mark.promise(30)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("ac", [slow(None), "selective", slow("offload")])
@on_ranks(2)
def test_tensor_parallel_blocks_compile_whole(ac: Any) -> None:
    fresh()
    deep = partial(llama, num_hidden_layers=10)
    reference, model = built(deep), built(deep)
    config = {"mesh": MeshConfig(tp=2), "tp": TPConfig(sequence_parallel=True), "compile": AOT}
    parallelize_model(model, ParallelismConfig(activation_checkpointing=ac, **config))
    for one, other in zip(one_step(model, False), one_step(reference, False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert graphs() == 1


# Hugging Face


def one_step(model: nn.Module, use_cache: bool) -> list[torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, use_cache=use_cache).loss
    loss.backward()
    return [loss.detach(), *(compare.full(p.grad) for p in model.parameters())]


DEEP, DEEP_GPT2 = partial(llama, num_hidden_layers=10), partial(dropping_gpt2, n_layer=10)


@pytest.mark.promise(26)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "ac", "use_cache"),
    [
        (DEEP, None, False),
        (DEEP, "composable", True),
        (DEEP_GPT2, "selective", True),
        slow(DEEP_GPT2, "wrapped", True),
    ],
)
@on_ranks(2)
def test_hugging_face_models_compile_once(build: Any, ac: Any, use_cache: bool) -> None:
    fresh()
    plain, model = built(build).train(), built(build).train()
    parallelize_model(model, ParallelismConfig(compile=AOT, activation_checkpointing=ac))
    for one, other in zip(one_step(model, use_cache), one_step(plain, use_cache), strict=True):
        torch.testing.assert_close(one, other)
    assert graphs() == 1


def test_training_with_a_cache_is_warned_about() -> None:
    model = llama().train()
    blocks = (Compiled(f"model.layers.{i}", "", {"backend": "eager"}) for i in (0, 1))
    apply(read_structure(model), CompilePlan(tuple(blocks)))
    with pytest.warns(UserWarning, match="with a key-value cache.*use_cache=False"):
        one_step(model, True)
    assert graphs() == 2


@pytest.mark.promise(26)
@pytest.mark.parametrize("ac", ["wrapped", slow("composable")])
def test_recomputed_blocks_share_one_graph_though_they_get_a_cache(ac: str) -> None:
    model = llama().train()
    parallelize_model(model, ParallelismConfig(compile=AOT, activation_checkpointing=ac))
    one_step(model, True)
    assert graphs() == 1


@pytest.mark.promise(26)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("ac", [None, "composable", "selective", ("memory_budget", {"budget": 0.2})], ids=str)
def test_inductor_gives_the_same_loss_and_gradients(ac: Any) -> None:
    model, plain = compiled(ac, compile=True)
    for each in (model, plain):
        each.eval()  # inductor's dropout draws from a stream of its own
    for one, other in zip(results(model), results(plain), strict=True):
        torch.testing.assert_close(one, other)
    assert graphs() == 1
