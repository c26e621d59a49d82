"""Full optimizer states: gathered, carried by name, and loaded; steps go on bit for bit."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

from composer_dist.checkpoint import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    save_checkpoint,
)
from composer_dist.checkpoint.kinds.optimizer_names import named_optimizer_state
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model
from composer_dist.errors import CheckpointKeyError, CheckpointValueError, ParallelismValueError
from tests.kit.compare import equal, fails_alike
from tests.kit.decoder import Decoder
from tests.kit.grids import slow
from tests.kit.huggingface import gpt2
from tests.kit.measure import messages
from tests.kit.meshes import MESHES
from tests.kit.runs import give_gradients, train_by_name
from tests.kit.toy import built
from tests.kit.world import World, on_ranks

State = dict[str, Any]
MODELS: dict[str, Callable[[], nn.Module]] = {"decoder": Decoder, "gpt2": gpt2}


def made(kind: str = "decoder", seed: int = 0) -> Any:
    """A model whose first parameter is frozen."""
    model = built(MODELS[kind], seed)
    next(model.parameters()).requires_grad_(False)
    return model


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters, the frozen one too: matrices, and the rest at another learning rate."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.02, "betas": (0.8, 0.9)},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(two_groups(model), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5),
    "reversed": lambda model: torch.optim.AdamW(
        [{**group, "params": group["params"][::-1]} for group in two_groups(model)[::-1]], amsgrad=True
    ),
}


def reference(kind: str, name: str, steps: int, seed: int = 0) -> tuple[dict[str, Tensor], State]:
    """The plain model's state, and the optimizer's with names for numbers, after some steps."""
    model = made(kind, seed)
    optimizer = OPTIMIZERS[name](model)
    train_by_name(model, optimizer, 0, steps)
    return deepcopy((dict(model.state_dict()), named_optimizer_state(model, optimizer)))


def trained(name: str, steps: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Optimizer]:
    """A sharded model and an optimizer after some steps."""
    model = made().to(dtype)
    parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config()))
    optimizer = OPTIMIZERS[name](model)
    train_by_name(model, optimizer, 0, steps)
    return model, optimizer


def there_and_back(mode: str, kind: str, name: str, bucket_bytes: int) -> None:
    first, config = dist.get_rank() == 0, MESHES[mode][1]
    expected, later = (reference(kind, name, steps) if first else ({}, {}) for steps in (2, 3))
    model = made(kind)
    optimizer = OPTIMIZERS[name](model)
    parallelize_model(model, config, optimizer)
    train_by_name(model, optimizer, 0, 2)
    with messages(bucket_bytes) as sent:
        weights, state = full_model_state(model), full_optimizer_state(model, optimizer)
    equal([weights, state], [*expected])
    if first:
        assert (sum(sent) == 0) == (mode == "ddp"), "replicas need not send"
        frozen = next(name for name, _ in model.named_parameters())
        assert (frozen in state["state"]) == (name == "adagrad"), "Adagrad makes state at once"
        assert any(frozen in group["params"] for group in state["param_groups"])
        assert bool(state["state"]) == (name != "sgd"), "SGD without momentum has none"
    other = made(kind, seed=1)
    parallelize_model(other, config)
    fresh = OPTIMIZERS[name](other)
    with messages(bucket_bytes):
        results = [load_full_model_state(other, weights), load_full_optimizer_state(other, fresh, state)]
    assert results == [([], []), ([], [])]
    equal(state, expected[1])
    train_by_name(other, fresh, 2, 1)
    equal([full_model_state(other), full_optimizer_state(other, fresh)], [*later])


OFTEN = {"decoder": ["fsdp2", "hsdp", "ddp", "tp"], "gpt2": []}
"""The others take as long, and are alike."""


@pytest.mark.promise(47)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=() if mode in OFTEN[kind] else pytest.mark.slow)
        for kind in MODELS
        for mode in MESHES
        if MESHES[mode][0] > 1
    ],
)
@on_ranks(lambda mode, **_: MESHES[mode][0])
def test_state_is_that_of_one_process_and_training_goes_on_from_it(kind: str, mode: str) -> None:
    there_and_back(mode, kind, "adamw", 8000)


@pytest.mark.promise(48)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
@on_ranks(2)
def test_other_optimizers_go_on_as_well(name: str) -> None:
    there_and_back("fsdp2", "decoder", name, 1 << 20)


def one_process(model: nn.Module, optimizer: Optimizer, form: str) -> State:
    """The state of an optimizer on one device in a form that others write."""
    if form == "numbers":
        return deepcopy(optimizer.state_dict())
    if form == "named numbers":
        names = {id(p): name for name, p in model.named_parameters()}
        state = deepcopy(optimizer.state_dict())
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            group["param_names"] = [names[id(p)] for p in own["params"]]
        return state
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    return deepcopy(get_optimizer_state_dict(model, optimizer, options=options))


def of_rank_0(state: State) -> State:
    return {} if dist.get_rank() else state


@pytest.mark.promise(48)
@pytest.mark.parametrize(
    ("form", "name"),
    [  # numbers alone are places in the groups: the same groups in the same order
        ("numbers", "adamw"),
        ("named numbers", "reversed"),
        ("names", "reversed"),
        ("flattened", "reversed"),
    ],
)
def test_states_of_one_process_are_rekeyed_by_name(world2: World, form: str, name: str) -> None:
    model = made()
    optimizer = OPTIMIZERS["adamw"](model)
    train_by_name(model, optimizer, 0, 2)
    expected = deepcopy(named_optimizer_state(model, optimizer))
    found = world2(loaded, one_process(model, optimizer, form), name)[0]
    equal(found["state"], expected["state"])
    groups = expected["param_groups"]
    for group in found["param_groups"]:
        same = next(one for one in groups if set(one["params"]) == set(group["params"]))
        assert (group["lr"], group["betas"]) == (same["lr"], same["betas"])


def loaded(state: State, name: str) -> State:
    model, optimizer = trained(name, 0)
    assert load_full_optimizer_state(model, optimizer, of_rank_0(state)) == ([], [])
    return full_optimizer_state(model, optimizer)


@pytest.mark.promise(48)
@pytest.mark.parametrize("steps", [0, 1])
@on_ranks(2)
def test_over_state_and_pending_gradients(steps: int) -> None:
    _, given = reference("decoder", "adamw", steps)
    model, optimizer = trained("adamw", 2)
    give_gradients(model, 0)
    assert load_full_optimizer_state(model, optimizer, of_rank_0(given)) == ([], [])
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["embed.weight"], "they stay"
    equal(full_optimizer_state(model, optimizer), of_rank_0(given))  # the empty one takes away what was there


@pytest.mark.promise(48)
@on_ranks(2)
def test_frozen_parameters_keep_their_state() -> None:
    _, given = reference("decoder", "adamw", 1)
    name = given["param_groups"][0]["params"][0]
    given["state"] = {name: {"step": torch.tensor(1.0), "exp_avg": torch.ones(21, 16)}} | given["state"]
    equal(loaded(given, "adamw"), of_rank_0(given))


@pytest.mark.promise(48)
@on_ranks(2)
def test_what_is_missing_has_no_state_and_what_is_unexpected_is_passed_over() -> None:
    _, given = reference("decoder", "adamw", 1)
    gone = ["head.weight", "layers.0.mlp.0.weight"]
    for name in gone:
        del given["state"][name]
        given["param_groups"][0]["params"].remove(name)
    nope = {"nope": {"step": torch.tensor(3.0)}}
    model, optimizer = trained("adamw", 0)
    state = of_rank_0(given | {"state": given["state"] | nope})
    result = load_full_optimizer_state(model, optimizer, state, strict=False)
    assert (sorted(result.missing), result.unexpected) == (gone, ["nope"])
    equal(full_optimizer_state(model, optimizer).get("state", {}), of_rank_0(given["state"]))


@pytest.mark.promise(48)
@on_ranks(2)
def test_what_does_not_fit_is_refused_everywhere() -> None:
    def renamed(state: State) -> None:
        state["state"]["nope"] = state["state"].pop("head.weight")
        state["param_groups"][0]["params"].remove("head.weight")

    def replaced(value: Tensor) -> Callable[[State], None]:
        return lambda state: state["state"]["head.weight"].update(exp_avg=value)

    model, optimizer = trained("adamw", 1)
    before = full_optimizer_state(model, optimizer)
    without_values = torch.empty(21, 16, device="meta")
    for change, kind, text in (
        (renamed, CheckpointKeyError, "missing: head.weight. unexpected: nope"),
        (
            replaced(torch.zeros(16, 21)),
            CheckpointValueError,
            "exp_avg of head.weight: (16, 21) in the state",
        ),
        (replaced(without_values), CheckpointValueError, "sharded or without values: exp_avg of head.weight"),
    ):
        given = deepcopy(before)
        if dist.get_rank() == 0:
            change(given)
        with fails_alike(kind, text):
            load_full_optimizer_state(model, optimizer, given)
        equal(full_optimizer_state(model, optimizer), before)
    with fails_alike(CheckpointValueError, "not an optimizer's state: it has 'model'"):
        load_full_optimizer_state(model, optimizer, of_rank_0({"model": {}}), strict=False)
    equal(full_optimizer_state(model, optimizer), before)


@pytest.mark.promise(48)
def test_numbers_that_do_not_fit_the_groups_are_refused() -> None:
    model = made()
    optimizer = OPTIMIZERS["adamw"](model)
    train_by_name(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    state["param_groups"][1]["params"].pop()
    with pytest.raises(CheckpointValueError, match=r"its group 1 has 20 parameters, the optimizer's 21"):
        load_full_optimizer_state(model, optimizer, state)
    with pytest.raises(CheckpointValueError, match="must be a mapping, not a list"):
        load_full_optimizer_state(model, optimizer, [state])  # type: ignore[arg-type]
    with pytest.raises(CheckpointKeyError, match=r"missing: embed\.weight"):
        load_full_optimizer_state(model, optimizer, {})


def test_a_plain_model_needs_no_process_group_and_keeps_its_own_ways() -> None:
    model, other = made(), made(seed=1)
    optimizer = torch.optim.AdamW(two_groups(model), foreach=True)
    train_by_name(model, optimizer, 0, 2)
    state = full_optimizer_state(model, optimizer)
    before = deepcopy(state)
    fresh = torch.optim.AdamW(two_groups(other), lr=torch.tensor(0.5), foreach=False)
    rate = fresh.param_groups[0]["lr"] = torch.tensor(0.3)
    load_full_optimizer_state(other, fresh, state)
    other.load_state_dict(model.state_dict())
    assert fresh.param_groups[0]["lr"] is rate, "a compiled step holds it"
    assert rate == torch.tensor(0.01)
    assert [group["foreach"] for group in fresh.param_groups] == [False, False]
    train_by_name(model, optimizer, 2, 1)
    train_by_name(other, fresh, 2, 1)
    equal(other.state_dict(), dict(model.state_dict()))
    equal(state, before)  # a copy, on both sides
    assert torch.equal(full_optimizer_state(other, fresh)["state"]["head.weight"]["step"], torch.tensor(3.0))


@on_ranks(2)
def test_moments_take_the_parameter_s_dtype_as_torch_s_own_optimizers_want_them() -> None:
    model, optimizer = trained("adamw", 0, torch.bfloat16)
    load_full_optimizer_state(model, optimizer, reference("decoder", "adamw", 1)[1])
    train_by_name(model, optimizer, 1, 1)
    found = named_optimizer_state(model, optimizer)["state"]["head.weight"]
    assert (found["step"], found["step"].dtype) == (2, torch.float32)
    assert found["exp_avg"].dtype == torch.bfloat16


class PerShard(torch.optim.SGD):
    """Keeps state as plain tensors of each rank's part."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["mine"] = torch.zeros_like(p.to_local())


@pytest.mark.promise(48)
@on_ranks(2)
def test_state_of_each_rank_s_own_is_refused_by_name(tmp_path: Path) -> None:
    model, _ = trained("sgd", 0)
    optimizer = PerShard(model.layers.parameters(), 0.1)
    optimizer.step()
    text = "plain tensors that have no full value: mine of layers.0.attention_norm.weight, mine of"
    with pytest.raises(CheckpointValueError, match=text):
        full_optimizer_state(model, optimizer)
    with pytest.raises(CheckpointValueError, match="plain tensors that have no full value"):
        save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})


@on_ranks(2)
def test_ranks_with_different_state_say_which() -> None:
    model, optimizer = trained("momentum", 1)
    if dist.get_rank() == 1:
        optimizer.state.pop(model.head.weight)
    with fails_alike(ParallelismValueError, "momentum_buffer of head.weight (21, 16)"):
        full_optimizer_state(model, optimizer)


@pytest.mark.promise(103)
@pytest.mark.parametrize(
    ("ranks", "reshard_after_forward"), [(2, True), (2, False), (4, 2), slow(4, True), slow(4, False)]
)
@on_ranks("ranks")
def test_states_after_an_eval_forward(ranks: int, reshard_after_forward: Any) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(torch.arange(8).view(1, 8))

    model = made()
    optimizer = OPTIMIZERS["adamw"](model)
    config = ParallelismConfig(fsdp2=FSDP2Config(reshard_after_forward=reshard_after_forward))
    parallelize_model(model, config, optimizer)
    train_by_name(model, optimizer, 0, 1)
    evaluate()
    state = full_optimizer_state(model, optimizer)
    evaluate()
    load_full_optimizer_state(model, optimizer, state)
    train_by_name(model, optimizer, 1, 1)
    evaluate()
    equal(full_optimizer_state(model, optimizer), of_rank_0(reference("decoder", "adamw", 2)[1]))
