"""What Composer's own FSDP2 tests assert, on two gloo ranks: the same here, or better.

Where Composer refuses (ties across units) training is compared with one process instead.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassAccuracy

from composer_dist.checkpoint import full_model_state, load_full_model_state
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import (
    init_context,
    parallelize_composer_model,
    parallelize_model,
    plan_parallelism,
    summon_full_params,
)
from composer_dist.errors import ParallelismError, ParallelismKeyError, ParallelismValueError
from composer_dist.models import ComposerClassifier
from composer_dist.trainer.evaluation import fresh_metrics
from tests.kit import models
from tests.kit.compare import assert_same_training, close, full, weights
from tests.kit.training import quiet
from tests.kit.world import World

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

WIDTH = 10


class Mlp(nn.Module):
    """Composer's SimpleMLP; its first and last weight may be one."""

    def __init__(self, bias: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=bias), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=bias)
        )
        if tied:
            self.net[2].weight = self.net[0].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _classifier(module: nn.Module) -> ComposerClassifier:
    return ComposerClassifier(module, num_classes=WIDTH, train_metrics={}, val_metrics={})


def simple(seed: int = 0) -> ComposerClassifier:
    """Composer's SimpleWeightTied."""
    torch.manual_seed(seed)
    return _classifier(nn.Sequential(Mlp(), nn.Softmax(dim=-1)))


def partial(seed: int = 0) -> ComposerClassifier:
    """Composer's PartialWeightTied."""
    torch.manual_seed(seed)
    layers = nn.Sequential(Mlp(), nn.Linear(WIDTH, WIDTH), nn.Softmax(dim=-1))
    model = _classifier(layers)
    layers.param_init_fn = _init
    return model


def untied(seed: int = 0) -> ComposerClassifier:
    """Composer's SimpleComposerMLP with biases."""
    torch.manual_seed(seed)
    return _classifier(nn.Sequential(Mlp(bias=True, tied=False)))


def wrap_children(model: ComposerClassifier) -> ComposerClassifier:
    """As Composer's `add_fsdp_wrap_attribute_to_children`."""
    model.module._fsdp_wrap = False
    for child in model.module.children():
        child._fsdp_wrap = True
    return model


def batches(parts: int, part: int) -> list[Any]:
    """Ten batches of four samples, this part of each."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(4, WIDTH, generator=generator) for _ in range(10)]
    return [(x.chunk(parts)[part], x.argmax(1).chunk(parts)[part]) for x in rows]


def fit(model: Any, optimizer: Any, config: Any = None, **options: Any) -> Any:
    """Trains for ten batches, split over the ranks where there is a config."""
    mine = batches(dist.get_world_size(), dist.get_rank()) if config else batches(1, 0)
    options = {"max_duration": "1ep", "device": "cpu"} | options
    trainer, _ = quiet(
        model, optimizers=optimizer, train_dataloader=mine, parallelism_config=config, **options
    )
    trainer.fit()
    return trainer


MODELS: dict[str, Callable[..., ComposerClassifier]] = {"simple": simple, "partial": partial}


# test_fsdp2: tied parameters, from real and meta models


def initialize(name: str, on_meta: bool) -> dict[str, Any]:
    with init_context(empty=on_meta):
        model = wrap_children(MODELS[name]())
    torch.manual_seed(5)
    config = FSDP2Config()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer, _ = quiet(
        model,
        optimizers=optimizer,
        train_dataloader=batches(2, dist.get_rank()),
        max_duration="1ep",
        parallelism_config=config,
        device="cpu",
    )
    net = model.module[0].net
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.shape[0] == 2 * parameter.to_local().shape[0]
    before = net[0].weight.full_tensor().clone()
    trainer.fit()
    assert net[0].weight is net[2].weight
    assert net[0].weight is optimizer.param_groups[0]["params"][0]
    assert not torch.equal(net[0].weight.full_tensor(), before)
    return {
        "units": [unit.name for unit in trainer.preparation.plan.units],
        "weight": net[0].weight.full_tensor().detach(),
    }


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("name", "units"), [("simple", ["", "module.0"]), ("partial", ["", "module.0", "module.1"])]
)
def test_tied_parameters_are_sharded_once_and_stay_tied_through_a_fit(
    world2: World, name: str, units: list[str], on_meta: bool
) -> None:
    first, second = world2(initialize, name, on_meta)
    assert first["units"] == units
    assert torch.equal(first["weight"], second["weight"])


def reload(on_meta: bool) -> None:
    model = simple()
    fit(model, torch.optim.Adam(model.parameters(), lr=0.1), "fsdp")
    state = full_model_state(model)
    with init_context(empty=on_meta):
        other = simple(1)
    parallelize_composer_model(other, None, FSDP2Config())
    load_full_model_state(other, state)
    ours, theirs = list(model.parameters()), list(other.parameters())
    assert all(isinstance(p, DTensor) for p in theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one.to_local(), two.to_local())
    net = other.module[0].net
    assert net[0].weight is net[2].weight


@pytest.mark.parametrize("on_meta", [False, True])
def test_weights_reload_into_another_prepared_model_and_stay_tied(world2: World, on_meta: bool) -> None:
    world2(reload, on_meta)


# test_fsdp2: the optimizer


def groups(kind: str, on_meta: bool) -> list[Any]:
    with init_context(empty=on_meta):
        model = partial()
    tied, last = model.module[0].net[0].weight, list(model.module[1].parameters())
    asked: list[dict[str, Any]] = {
        "all": [{"params": list(model.parameters()), "lr": 0.01}],
        "subset": [{"params": [tied], "lr": 0.02}],
        "several": [{"params": [tied], "lr": 0.01}, {"params": last, "lr": 0.02}],
    }[kind]
    optimizer = torch.optim.Adam(asked)
    dicts = list(optimizer.param_groups)
    before = [{k: v for k, v in group.items() if k != "params"} for group in dicts]
    counts = [len(group["params"]) for group in dicts]
    if kind == "subset":
        for parameter in last:
            parameter.requires_grad_(False)
    fit(model, optimizer, "fsdp")
    after = optimizer.param_groups
    assert all(a is b for a, b in zip(after, dicts, strict=True))
    assert [{k: v for k, v in group.items() if k != "params"} for group in after] == before
    held = [p for group in after for p in group["params"]]
    assert all(isinstance(p, DTensor) for p in held)
    assert {id(p) for p in held} <= {id(p) for p in model.parameters()}
    assert all(optimizer.state[p]["exp_avg"].to_local().any() for p in held)
    return [len(group["params"]) for group in after], counts


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(("kind", "counts"), [("all", [3]), ("subset", [1]), ("several", [1, 2])])
def test_optimizers_keep_their_groups(world2: World, kind: str, counts: list[int], on_meta: bool) -> None:
    assert world2(groups, kind, on_meta) == [(counts, counts)] * 2


def foreign_optimizer() -> str:
    model, other = simple(), partial()
    with pytest.raises(ParallelismValueError) as error:
        parallelize_composer_model(model, torch.optim.Adam(other.parameters()), FSDP2Config())
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(error.value)


def test_an_optimizer_of_another_model_is_refused_before_anything_is_sharded(world2: World) -> None:
    first, second = world2(foreign_optimizer)
    assert first == second
    assert "Adam holds 3 parameters (of 3) that are not this model's" in first


# test_fsdp2: rank 0 real, the others on meta


def mixed(build: Callable[..., ComposerClassifier], reverse: bool = False) -> ComposerClassifier:
    with init_context(empty=(dist.get_rank() == 0) == reverse):
        return build()


def reversed_placement() -> str:
    model = mixed(untied, reverse=True)
    with pytest.raises(ParallelismValueError) as error:
        parallelize_composer_model(model, None, FSDP2Config())
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(error.value)


def test_meta_on_rank_0_only_is_refused_on_every_rank(world2: World) -> None:
    first, second = world2(reversed_placement)
    assert first == second
    assert "rank 0" in first.lower()
    assert "meta" in first


def references(how: str) -> str:
    build = {"mixed": mixed, "real": lambda fn: fn()}[how]
    model = build(untied)
    model.again = model.module[0].net[0]
    with pytest.raises(ParallelismValueError) as error:
        parallelize_composer_model(model, None, FSDP2Config())
    return str(error.value)


@pytest.mark.parametrize("how", ["mixed", "real"])
def test_duplicate_module_references_are_refused(world2: World, how: str) -> None:
    for text in world2(references, how):
        assert "duplicate module references" in text
        assert "module.0.net.0 = again" in text


def delivered() -> list[Tensor]:
    model = mixed(untied)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(2 if "bias" in name else 1)
    parallelize_composer_model(model, None, FSDP2Config())
    return [full(p.detach()) for p in model.parameters()]


def test_rank_0s_weights_and_biases_reach_the_others(world2: World) -> None:
    for found in world2(delivered):
        assert [float(value.unique()) for value in found] == [1, 2, 1, 2]


def mixed_fit(name: str) -> None:
    model = mixed(wrap_all := MODELS[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reference = wrap_all()
    fit(model, optimizer, "fsdp")
    net = model.module[0].net
    assert net[0].weight is net[2].weight
    held = optimizer.param_groups[0]["params"][0]
    assert held is net[0].weight
    assert not torch.equal(net[0].weight.full_tensor(), reference.module[0].net[0].weight)


@pytest.mark.parametrize("name", ["simple", "partial"])
def test_mixed_initialization_keeps_ties_and_the_optimizer_holds_them(world2: World, name: str) -> None:
    world2(mixed_fit, name)


def trained(parallel: bool) -> dict[str, Tensor]:
    model = mixed(untied) if parallel else untied()
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), "fsdp" if parallel else None)
    return weights(model)


def test_mixed_initialization_trains_like_one_process(world2: World) -> None:
    expected = trained(False)
    for found in world2(trained, True):
        close(found, expected)


def measured(on_meta: str) -> list[str]:
    """The default metrics of a classifier that was built on meta, on all ranks or on all but rank 0."""
    with init_context(empty=on_meta == "all" or dist.get_rank() > 0):
        torch.manual_seed(0)
        model = ComposerClassifier(Mlp(bias=True, tied=False), num_classes=WIDTH)
    metrics = model.get_metrics(is_train=True) | model.get_metrics(is_train=False)
    return sorted({str(value.device) for metric in metrics.values() for value in metric._defaults.values()})


@pytest.mark.parametrize("on_meta", ["all", "others"])
def test_metrics_of_a_model_built_on_meta_can_count(world2: World, on_meta: str) -> None:
    assert world2(measured, on_meta) == [["cpu"]] * 2


def metered_fit() -> dict[str, float]:
    with init_context():
        model = ComposerClassifier(Mlp(bias=True, tied=False), num_classes=WIDTH)
    trainer = fit(model, torch.optim.SGD(model.parameters(), lr=0.1), "fsdp")
    return {name: float(metric.compute()) for name, metric in trainer.state.train_metrics.items()}


def test_a_classifier_built_on_meta_trains_with_its_default_metrics(world2: World) -> None:
    for found in world2(metered_fit):
        assert set(found) == {"MulticlassAccuracy"}


def metrics_on_meta_elsewhere() -> str:
    with init_context(empty=dist.get_rank() > 0):
        metric = MulticlassAccuracy(num_classes=WIDTH)
    with pytest.raises(ParallelismError) as error:
        fresh_metrics({"accuracy": metric}, torch.device("cpu"))
    return str(error.value)


def test_metrics_that_one_rank_made_on_meta_are_refused_on_all(world2: World) -> None:
    first, second = world2(metrics_on_meta_elsewhere)
    assert first == second
    assert first.startswith("Rank 1: The metrics accuracy were made on the meta device")


# check_param_tying


class Untying(nn.Module):
    """An initializer that gives a tied head a weight of its own, as old code does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids)) * 2
        return out


def untie(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.ones(16, 8))
    else:
        module.reset_parameters()  # type: ignore[operator]


def untied_by_init() -> str:
    with init_context():
        model = Untying()
    with pytest.raises(ParallelismError) as error:
        parallelize_model(model, FSDP2Config(), param_init_fn=untie)
    return str(error.value)


def test_an_initializer_that_breaks_a_tie_is_refused_by_name(world2: World) -> None:
    first, second = world2(untied_by_init)
    assert first == second
    assert "head.weight" in first


# test_fsdp2: mixed precision


def precise(mixed_precision: str) -> dict[str, Any]:
    model = untied()
    parallelize_composer_model(
        model, None, FSDP2Config(mixed_precision=mixed_precision), precision="amp_bf16"
    )
    seen: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    inputs, targets = torch.randn(2, WIDTH), torch.arange(2)
    outputs = model((inputs, targets))
    model.loss(outputs, (inputs, targets)).backward()
    assert all(p.grad is not None for p in model.parameters())
    return {"seen": set(seen), "count": len(seen), "output": outputs.dtype}


@pytest.mark.parametrize(
    ("mixed_precision", "dtype"),
    [("DEFAULT", torch.bfloat16), ("PURE", torch.bfloat16), ("FULL", torch.float32)],
)
def test_precision_is_what_a_composer_model_computes_in(
    world2: World, mixed_precision: str, dtype: torch.dtype
) -> None:
    expected = {"seen": {dtype}, "count": 2, "output": dtype}
    assert world2(precise, mixed_precision) == [expected] * 2


# test_fsdp2_gradscaler


def overflow() -> tuple[bool, bool, float, bool]:
    """Rank 0's part of a gradient overflows, and no rank steps; the next step counts again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parallelize_model(model, FSDP2Config(), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight: Any = model[0].weight
    before = weight.full_tensor().clone()
    stayed, moved = False, False
    for step in range(2):
        scaler.scale(model(torch.ones(2, 2)).sum()).backward()
        if step == 0 and dist.get_rank() == 0:
            weight.grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        equal = torch.equal(weight.full_tensor(), before)
        stayed, moved = (equal, moved) if step == 0 else (stayed, not equal)
    return stayed, moved, scaler.get_scale(), isinstance(weight, DTensor)


def test_an_overflow_on_one_rank_stops_the_step_on_all(world2: World) -> None:
    assert world2(overflow) == [(True, True, 2.0, True)] * 2


# test_activation_checkpointing


class Counter(nn.Module):
    """Composer's CountModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers(x)
        return out


def counted(how: str, recompute: bool, offload: bool) -> tuple[list[int], dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = nn.Sequential(Counter(), nn.ReLU(), Counter())
    model = ComposerClassifier(layers, num_classes=WIDTH)
    if how == "attribute":
        layers[0]._activation_checkpointing = True
        layers._activation_checkpointing = False
    elif how == "function":
        layers.activation_checkpointing_fn = lambda module: isinstance(module, Counter)
    config = (
        FSDP2Config(activation_checkpointing=recompute, activation_cpu_offload=offload)
        if dist.is_initialized()
        else None
    )
    names = list(model.state_dict())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), config, max_duration="1ba")
    assert list(model.state_dict()) == names
    return [layers[0].calls, layers[2].calls], weights(model)


@pytest.mark.parametrize(
    ("recompute", "offload"), [(True, True), (True, False), (False, True), (False, False)]
)
@pytest.mark.parametrize("how", ["attribute", "function"])
def test_checkpointed_modules_of_a_composer_model_run_twice(
    world2: World, how: str, recompute: bool, offload: bool
) -> None:
    calls, expected = counted(how, False, False)
    assert calls == [1, 1]
    twice = 2 if recompute else 1
    for found, parameters in world2(counted, how, recompute, offload):
        assert found == [twice, twice if how == "function" else 1]
        close(parameters, expected)


# test_fsdp_summon_full_params, through a prepared ComposerModel


def summoned() -> None:
    model = wrap_children(partial())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_composer_model(model, optimizer, FSDP2Config())
    net = model.module[0].net
    sizes = [sum(p.to_local().numel() for p in model.parameters())]
    before = weights(model)
    with summon_full_params(model):
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes[1] == 2 * sizes[0] > 0
    with summon_full_params(model), torch.no_grad():
        net[0].weight.fill_(999)
        assert float(net[2].weight.unique()) == 999
    with summon_full_params(model, writeback=False), torch.no_grad():
        assert net[0].weight is net[2].weight
        for parameter in model.parameters():
            parameter.fill_(777)
        assert float(net[2].weight.unique()) == 777
    now = weights(model)
    assert float(now["module.0.net.0.weight"].unique()) == 999
    assert torch.equal(now["module.1.weight"], before["module.1.weight"])
    with summon_full_params(model, writeback=True), torch.no_grad():
        assert net[0].weight is net[2].weight
        for parameter in model.parameters():
            parameter.fill_(888)
    assert all(float(value.unique()) == 888 for value in weights(model).values())
    # Composer leaves an optimizer with the old objects here.
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    fit_one = (torch.randn(4, WIDTH), torch.arange(4))
    model.loss(model(fit_one), fit_one).backward()
    optimizer.step()
    changed = weights(model)["module.1.bias"]
    assert not bool((changed == 888).all())


def test_summoned_parameters_are_whole_tied_and_written_back(world2: World) -> None:
    world2(summoned)


class Nested(nn.Module):
    """Composer's NestedFSDPModel; each weight is filled with its number."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
        for number, layer in enumerate(layers, 1):
            nn.init.constant_(layer.weight, number)
        inner = nn.Sequential(layers[2], layers[3])
        self.module = nn.Sequential(layers[0], layers[1], inner, nn.Softmax(dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out


def nested(recurse: bool) -> list[float]:
    model = Nested()
    model.module._fsdp_wrap = model.module[1]._fsdp_wrap = model.module[2][1]._fsdp_wrap = True
    parallelize_model(model, FSDP2Config())
    with summon_full_params(model.module, recurse=recurse):
        return [float(p.detach().unique()) for p in model.parameters() if not isinstance(p, DTensor)]


@pytest.mark.parametrize(("recurse", "whole"), [(True, [1, 2, 3, 4]), (False, [1, 3])])
def test_without_recursion_units_below_stay_sharded(world2: World, recurse: bool, whole: list[float]) -> None:
    assert world2(nested, recurse) == [whole] * 2


# test_fsdp2_wrap_fsdp_attribute; ties that Composer refuses train


def _composers(ties: tuple[tuple[str, str], ...]) -> models.Composers:
    model = models.Composers()
    for target, source in ties:
        owner, _, key = target.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(source))
    return model


def wrapped(
    ties: tuple[tuple[str, str], ...], attributes: dict[str, bool], chosen: tuple[str, ...] | None
) -> tuple[dict[str, bool | int], list[str]]:
    def build() -> nn.Module:
        model = _composers(ties)
        for name, value in attributes.items():
            model.get_submodule(name)._fsdp_wrap = value
        if chosen is not None:
            modules = {model.get_submodule(name) for name in chosen}
            model.fsdp_wrap_fn = lambda module: (
                {"reshard_after_forward": False} if module in modules else False
            )
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = assert_same_training(build, FSDP2Config(), optimizer=torch.optim.Adam)
    assert not [w for w in caught if "view" not in str(w.message)]
    for name, parameter in done.model.named_parameters():
        assert isinstance(parameter, DTensor) == (name not in done.plain_parameters)
    return {unit.name: unit.reshard_after_forward for unit in done.plan.units}, list(done.plain_parameters)


A, B, C = "m2.a.weight", "m2.b.weight", "m5.a.weight"


@pytest.mark.parametrize(
    ("ties", "attributes", "chosen", "units", "plain"),
    [
        # 7: only m3; the others stay whole, averaged
        ((), {"": False, "m2": False, "m2.a": True}, None, ["m2.a"], 6),
        # 11: a chain of ties, the parent wrapped
        ((("m2.weight", A), (C, A)), {"": True, "m2": True}, None, ["", "m2"], 0),
        # 12: a tie across branches, one end wrapped
        (((C, A),), {"": True, "m2.a": False, "m5.a": True}, None, ["", "m5.a"], 0),
        # 13: every module
        ((), {}, ("", "m2", "m2.a", "m2.b", "m5", "m5.a", "m5.b"), ["", "m2.a", "m2.b", "m5.a", "m5.b"], 0),
        # 15: the function's target only, the root said no
        ((), {"": False}, ("m2",), ["m2"], 4),
        # 16: the function's target, tied across branches
        (((C, A),), {}, ("m2",), ["", "m2"], 0),
    ],
)
def test_wrapping_by_attribute_and_function_trains_like_one_process(
    world2: World,
    ties: Any,
    attributes: dict[str, bool],
    chosen: tuple[str, ...] | None,
    units: list[str],
    plain: int,
) -> None:
    for found, left in world2(wrapped, ties, attributes, chosen):
        assert set(found) == set(units)
        assert len(left) == plain
        if chosen is not None:  # 17
            assert {value for name, value in found.items() if name in chosen} == {False}


def unknown_key() -> str:
    model = models.Composers()
    model.fsdp_wrap_fn = lambda module: {"tacos": False}
    with pytest.raises(ParallelismKeyError) as error:
        parallelize_model(model, FSDP2Config())
    assert isinstance(error.value, KeyError)
    assert isinstance(error.value, ParallelismError)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(error.value)


def test_a_wrap_function_s_unknown_key_lists_the_valid_ones(world2: World) -> None:
    first, second = world2(unknown_key)
    assert first == second
    assert "'tacos'" in first
    assert "Valid keys are: reshard_after_forward" in first


# test_fsdp2_helpers, as plans of models on the meta device


def plan(model: nn.Module, *units: str) -> Any:
    rules = [Rule(name, shard=True) for name in units]
    return plan_parallelism(model, ParallelismConfig(rules=rules), world_size=2)


def linears(count: int, **ties: str) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    for index, source in ties.items():
        key = "weight" if source.endswith("weight") else "bias"
        setattr(model[int(index[1:])], key, model.get_parameter(source))
    return model


@pytest.mark.parametrize(
    ("ties", "chosen", "together"),
    [
        ({}, ["0", "1", "2"], []),
        ({"_2": "0.weight"}, ["0", "1", "2"], [["0", "2"]]),
        ({"_2": "0.weight"}, ["0", "1", "2", "3"], [["0", "2"]]),
        ({"_1": "0.bias"}, ["0", "1"], [["0", "1"]]),
        ({"_2": "0.weight"}, ["1"], []),
    ],
)
def test_units_tied_to_each_other_become_one(
    ties: dict[str, str], chosen: list[str], together: list[list[str]]
) -> None:
    found = plan(linears(4, **ties), *chosen)
    assert [list(unit.modules) for unit in found.units if len(unit.modules) > 1] == together
    modules = [name for unit in found.units for name in unit.modules if name]
    assert sorted(modules) == sorted(chosen)


def test_a_tie_inside_one_unit_is_nobody_else_s_business() -> None:
    model = nn.ModuleDict({"one": linears(2, _1="0.weight"), "other": nn.Linear(2, 2)})
    found = plan(model, "one", "other")
    assert [unit.name for unit in found.units] == ["one", "other"]
    assert found.ties == (("one.0.weight", "one.1.weight"),)


def test_a_tie_that_leads_outside_of_the_chosen_units_stays_whole() -> None:
    found = plan(linears(3, _2="0.weight"), "0")
    assert found.plain["0.weight"] == "no unit contains it (Rule('', shard=True) makes the root one)"
    assert found.explain("2.weight").startswith("2.weight, one parameter with 0.weight: replicated")


def test_modules_without_parameters_are_no_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    found = plan(model, "0", "1", "2")
    assert [unit.name for unit in found.units] == ["0", "2"]
    with pytest.raises(ParallelismValueError, match="Nothing would be sharded"):
        plan(nn.Sequential(nn.ReLU(), nn.ReLU()), "0", "1")


# test_fsdp2_config: every key of Composer's FSDP1 dictionary


def test_fsdp1_keys_are_kept_translated_or_warned_about() -> None:
    kept = {
        "activation_checkpointing": True,
        "activation_cpu_offload": True,
        "state_dict_type": "full",
        "load_monolith_rank0_only": True,
        "mixed_precision": "PURE",
        "verbose": True,
    }
    dropped = [
        "activation_checkpointing_reentrant",
        "auto_wrap",
        "te_checkpoint_wrapper",
        "te_shard_fp8_weight",
        "backward_prefetch",
        "backward_prefetch_limit",
        "data_parallel_shard_degree",
        "data_parallel_replicate_degree",
        "forward_prefetch",
        "forward_prefetch_limit",
        "ignored_modules",
        "keep_low_precision_grads",
        "limit_all_gathers",
        "load_planner",
        "process_group",
        "save_planner",
        "sharded_ckpt_prefix_dir",
        "sync_module_states",
        "use_orig_params",
    ]
    with pytest.warns(UserWarning, match="is ignored") as caught:
        config = FSDP2Config.from_compatible_attrs(
            kept | {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": False} | dict.fromkeys(dropped, None)
        )
    assert {key: getattr(config, key) for key in kept} == kept
    assert config.reshard_after_forward is False
    texts = [str(one.message) for one in caught]
    assert len(texts) == len(dropped)
    assert all(sum(f"'{key}: None' is ignored" in text for text in texts) == 1 for key in dropped)
