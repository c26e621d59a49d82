"""Preparation as a whole: all or none, on every rank, whatever fails and wherever."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from composer_dist.config import presets
from composer_dist.config.rule import Rule
from composer_dist.distributed import (
    clip_grad_norm,
    init_context,
    named_parameters_canonical,
    parallelize_model,
    plan_parallelism,
    prepare,
)
from composer_dist.distributed.moving import way as transport
from composer_dist.distributed.ranks import agreement
from composer_dist.distributed.weights import fill as weights
from composer_dist.errors import (
    ParallelismError,
    ParallelismKeyError,
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)
from tests.kit.compare import full, same, values
from tests.kit.meshes import config
from tests.kit.toy import Toy, built, tokens, train
from tests.kit.world import WorkerError, run

Outcome = tuple[type, str]


def attempt(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    """What preparing raises, on every rank within ten seconds."""
    start = time.monotonic()
    try:
        parallelize_model(model, *(args or (config(),)), **kwargs)
    except BaseException as error:
        assert time.monotonic() - start < 10
        return type(error), str(error)
    return type(None), ""


def untouched(model: nn.Module, before: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    """The model is what it was, and can still be prepared."""
    now = [*model.parameters(), *model.buffers()]
    assert type(model) is Toy
    assert [id(tensor) for tensor in now] == [id(tensor) for tensor in before]
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(now, copies, strict=True))


def unusable(model: nn.Module, cause: str) -> None:
    """Every later call names the cause."""
    uses: list[Callable[[], Any]] = [
        lambda: model(tokens()),
        lambda: parallelize_model(model, config()),
        lambda: clip_grad_norm(model, 1.0),
    ]
    for use in uses:
        with pytest.raises(ParallelismRuntimeError, match="unusable") as error:
            use()
        assert cause in str(error.value)


# Before anything is touched. Other structure, dtype, frozen set and configuration: test_sources.


@pytest.mark.promise(12)
@pytest.mark.parametrize(
    ("stage", "kind", "text"),
    [
        ("config", ParallelismValueError, "Rank 1: There is no strategy 'fdsp'"),
        ("config type", ParallelismTypeError, "Rank 1: config must be an FSDP2Config"),
        ("mesh", ParallelismValueError, "The ranks ask for different meshes: "),
        ("policy", ParallelismKeyError, "Rank 1: KeyError: 'no such block'"),
        ("checkpointing", ParallelismRuntimeError, "Rank 1: RuntimeError: cannot say"),
        ("duplicate", ParallelismValueError, "Rank 1: The model has duplicate module references"),
        ("optimizer", ParallelismTypeError, "Rank 1: optimizer 0 is a dict, not an Optimizer."),
        ("class", ParallelismTypeError, "Rank 1: optimizer must be an Optimizer, several of them, or None"),
        ("tracing", ParallelismValueError, "Rank 1: ValueError: bad init"),
        (
            "no initializer",
            ParallelismValueError,
            "Rank 1: These tensors are on the meta device and nothing initializes them",
        ),
        ("plan", ParallelismValueError, "Rank 1: The plan was made for a model with structure"),
    ],
)
def test_whatever_is_wrong_on_one_rank_is_raised_on_all_before_anything_is_touched(
    stage: str, kind: type, text: str
) -> None:
    results = run(wrong_on_one_rank, 2, stage)
    assert results[0] == results[1]
    assert results[0][0] is kind
    assert results[0][1].startswith(text)


def wrong_on_one_rank(stage: str) -> Outcome:
    bad = dist.get_rank() == 1
    on_meta = stage in {"tracing", "no initializer"}
    model = built(device="meta" if on_meta else "cpu")
    before = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in before]

    def policy(module: nn.Module) -> bool:
        if bad:
            raise KeyError("no such block")
        return isinstance(module, nn.Linear)

    def chooses(module: nn.Module) -> bool:
        if bad:
            raise RuntimeError("cannot say")
        return isinstance(module, nn.Linear)

    def init(module: Any) -> None:
        if bad and stage == "tracing":
            raise ValueError("bad init")
        if not (bad and isinstance(module, nn.Embedding)):
            module.reset_parameters()

    args: list[Any] = [config()]
    options: dict[str, Any] = {}
    if stage == "config":
        args = ["fdsp" if bad else "fsdp"]
    elif stage == "config type":
        args = [3 if bad else config()]
    elif stage == "mesh":
        args = [config(replicas=2 if bad else 1)]
    elif stage == "policy":
        options["fsdp_wrap_policy"] = policy
    elif stage == "checkpointing":
        args = [config(activation_checkpointing="composable")]
        options["activation_checkpointing_check_fn"] = chooses
    elif stage == "duplicate" and bad:
        model.layers.append(model.layers[0])
    elif stage == "optimizer":
        args.append([{}] if bad else None)
    elif stage == "class":
        args.append(torch.optim.AdamW if bad else None)
    elif stage == "plan":
        args = [plan_parallelism(Toy(3 if bad else 2), config(), world_size=2)]
    elif on_meta:
        options["param_init_fn"] = init
        if stage == "no initializer":
            model.head.weight = nn.Parameter(torch.empty(16, 8, device="meta"))
            before = [*model.parameters(), *model.buffers()]
            copies = before
    outcome = attempt(model, *args, **options)
    untouched(model, before, copies)
    return outcome


@pytest.mark.promise(12)
def test_after_a_refusal_the_model_can_still_be_prepared() -> None:
    model = built()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    for outcome, found in run(second_attempt, 2):
        assert outcome[0] is ParallelismValueError
        for name, value in values(model).items():
            torch.testing.assert_close(found[name], value)


def second_attempt() -> tuple[Outcome, dict[str, torch.Tensor]]:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outcome = attempt(model, "fdsp" if dist.get_rank() else "fsdp")
    parallelize_model(model, config(), optimizer)
    train(model, optimizer, 1)
    return outcome, values(model)


@pytest.mark.promise(83)
def test_a_ready_plan_does_not_let_a_foreign_optimizer_pass() -> None:
    model = built()
    plan = plan_parallelism(model, config(), world_size=1)
    before = list(model.parameters())
    with pytest.raises(ParallelismValueError, match="holds 1 parameters"):
        parallelize_model(model, plan, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


# After that: the same error everywhere, and a model that says so.


@pytest.mark.promise(12)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("stage", ["init", "parallelize_fn", "delivery", "checkpointing"])
def test_what_fails_later_on_one_rank_makes_the_model_unusable_on_all(stage: str, failing: int) -> None:
    results = run(fails_later, 2, stage, failing)
    assert results[0] == results[1]
    assert results[0] == (ParallelismRuntimeError, f"Rank {failing}: MemoryError: no room")


def fails_later(stage: str, failing: int) -> Outcome:
    bad = dist.get_rank() == failing
    model = built(device="meta" if stage == "init" or (stage == "delivery" and dist.get_rank()) else "cpu")
    really = False

    def init(module: Any) -> None:
        if really and bad:
            raise MemoryError("no room")
        module.reset_parameters()

    def step(module: nn.Module, mesh: Any) -> None:
        if bad:
            raise MemoryError("no room")

    def fail(*args: Any) -> Any:
        raise MemoryError("no room")

    options: dict[str, Any] = {}
    originals = transport.Transport._copy, weights.run_component, prepare.divide
    if stage == "init":
        options["param_init_fn"] = init
        original = weights.run_component

        def run_component(*args: Any) -> Any:
            nonlocal really
            really = True
            return original(*args)

        weights.run_component = run_component
    elif stage == "parallelize_fn":
        options["parallelize_fn"] = step
    elif stage == "delivery" and bad:
        transport.Transport._copy = fail
    elif stage == "checkpointing" and bad:
        prepare.divide = fail
    try:
        outcome = attempt(model, config(), **options)
    finally:
        transport.Transport._copy, weights.run_component, prepare.divide = originals
    unusable(model, outcome[1])
    return outcome


@pytest.mark.promise(21)
def test_parallelize_fn_returns_a_module_or_nothing() -> None:
    for outcome in run(wrong_return, 2):
        assert outcome == (
            ParallelismTypeError,
            "parallelize_fn must return a module or None, but returned int.",
        )


def wrong_return() -> Outcome:
    model = built()
    outcome = attempt(model, config(), parallelize_fn=lambda model, mesh: 3)
    unusable(model, "returned int")
    return outcome


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def own_step(returns: bool) -> list[str]:
    """The caller shards one block and wraps the model; rules for what then is there apply to the rest."""
    model, reference = built(), built()
    calls = []

    def step(given: nn.Module, mesh: DeviceMesh) -> nn.Module | None:
        calls.append((given, mesh.mesh_dim_names))
        fully_shard(given.layers[1], mesh=mesh["dp_shard"])  # type: ignore[index, operator]
        return Around(given) if returns else None

    prefix = "inner." if returns else ""
    rules = [Rule([presets.layers(), ""], shard=True)]
    with pytest.warns(UserWarning, match=rf"^Already sharded, left unchanged: {prefix}layers\.1"):
        done = parallelize_model(model, config(rules=rules), parallelize_fn=step)
    assert calls == [(model, ("dp_shard",))]
    assert done.model is model if not returns else done.model.inner is model  # type: ignore[union-attr]
    whole = tokens()
    half = whole.chunk(2)[dist.get_rank()]
    for one, batch in ((reference, whole), (done.model, half)):
        one.eval()
        nn.functional.cross_entropy(one(batch), (batch * 7) % 16).backward()
    gradients = {n.removeprefix(prefix): p.grad for n, p in named_parameters_canonical(done.model)}
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(full(gradients[name]), parameter.grad)
    return [unit.name for unit in done.plan.units]


@pytest.mark.promise(21)
@pytest.mark.parametrize("returns", [True, False])
def test_parallelize_fn_runs_first_and_rules_after_it(returns: bool) -> None:
    layer = "inner.layers.0" if returns else "layers.0"
    assert run(own_step, 2, returns) == [["", layer]] * 2


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_is_named(absent: int) -> None:
    results = run(waits_in_vain, 2, absent)
    kind, text = results[1 - absent]
    assert kind is ParallelismRuntimeError
    assert text.startswith(f"Rank {absent} did not answer within")
    assert "'the mesh'" in text


def waits_in_vain(absent: int) -> Outcome:
    if dist.get_rank() == absent:
        return type(None), ""
    model = built()
    before = [*model.parameters(), *model.buffers()]
    limit, agreement._torch.collective_timeout = (
        agreement._torch.collective_timeout,
        lambda: timedelta(seconds=0.5),
    )
    margin, agreement.MARGIN = agreement.MARGIN, timedelta(seconds=0.1)
    try:
        outcome = attempt(model, config())
    finally:
        agreement._torch.collective_timeout, agreement.MARGIN = limit, margin
    untouched(model, before, [tensor.detach().clone() for tensor in before])
    return outcome


@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_dies_during_delivery_is_reported_alike(victim: int, way: str) -> None:
    with pytest.raises(WorkerError) as failure:
        run(dies, 4, victim, way)
    assert list(failure.value.errors) == [victim]
    survivors = list(failure.value.results.values())
    assert len(survivors) == 3
    assert len(set(survivors)) == 1
    assert survivors[0][0] is ParallelismRuntimeError
    assert f"Rank {victim}" in survivors[0][1]


def dies(victim: int, way: str) -> Outcome:
    agreement.GRACE = agreement.MARGIN = timedelta(seconds=1)
    model = built(device="cpu" if dist.get_rank() == 0 else "meta")
    original, calls = dist.batch_isend_irecv, 0

    def third(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and dist.get_rank() == victim:
            os._exit(9)
        return original(*args)

    def die(*args: Any) -> None:
        os._exit(9)

    dist.batch_isend_irecv = third
    copy = transport.Transport._copy
    if dist.get_rank() == victim and way == "memory":
        transport.Transport._copy = die
    try:
        outcome = attempt(model, config(bucket_bytes=64, transport=way))
    finally:
        dist.batch_isend_irecv = original
        transport.Transport._copy = copy
        agreement.GRACE = agreement.MARGIN = timedelta(seconds=4)
    check_marked(model, outcome[1])
    return outcome


def check_marked(model: nn.Module, cause: str) -> None:
    """The forward names the cause; ranks that are gone cannot be asked any more."""
    with pytest.raises(ParallelismRuntimeError, match="unusable") as error:
        model(tokens())
    assert cause in str(error.value)


@pytest.mark.parametrize("interrupted", [0, 1])
@pytest.mark.parametrize("where", ["policy", "init", "delivery"])
def test_ctrl_c_on_one_rank_ends_the_others_too(where: str, interrupted: int) -> None:
    results = run(interrupts, 2, where, interrupted)
    assert results[interrupted] == (KeyboardInterrupt, "")
    assert results[1 - interrupted] == (ParallelismRuntimeError, f"Rank {interrupted}: KeyboardInterrupt")


def interrupts(where: str, interrupted: int) -> Outcome:
    mine = dist.get_rank() == interrupted
    model = built(device="meta" if where == "init" or (where == "delivery" and dist.get_rank()) else "cpu")

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    options: dict[str, Any] = {}
    originals = transport.Transport._copy, weights.run_component
    if where == "policy":
        options["fsdp_wrap_policy"] = stop if mine else lambda module: isinstance(module, nn.Linear)
    elif mine and where == "init":
        weights.run_component = stop
    elif mine:
        transport.Transport._copy = stop
    try:
        outcome = attempt(model, config(), **options)
    finally:
        transport.Transport._copy, weights.run_component = originals
    if where != "policy":
        check_marked(model, "KeyboardInterrupt")
    return outcome


@pytest.mark.promise(15)
def test_promise_1_nothing_is_renamed_or_replaced() -> None:
    for found in run(in_place, 2):
        assert found == {"names": True, "state": True, "module": True, "model": True}


def in_place() -> dict[str, bool]:
    model = built()
    names, state = [n for n, _ in model.named_parameters()], list(model.state_dict())
    layer = model.layers[0]
    done = parallelize_model(model, config())
    return {
        "names": [n for n, _ in model.named_parameters()] == names,
        "state": list(model.state_dict()) == state,
        "module": model.layers[0] is layer,
        "model": done.model is model,
    }


def test_a_ready_plan_is_what_happens() -> None:
    results = run(by_plan, 2)
    for found in results:
        same(found, values(built()))


def by_plan() -> dict[str, torch.Tensor]:
    model = built()
    plan = plan_parallelism(model, config(), world_size=2)
    done = parallelize_model(model, plan)
    assert done.plan is plan
    return values(model)


def test_one_process_needs_no_launcher_and_no_group() -> None:
    with init_context():
        model = Toy()
    done = parallelize_model(model, "fsdp")
    assert done.mesh.size() == 1
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    with pytest.raises(ParallelismError, match="already sharded"):
        parallelize_model(model, "fsdp")
