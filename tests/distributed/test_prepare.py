"""Preparation as a whole: all or none, on every rank, whatever fails and wherever.

Longer than other files: all cases look at one state before and after a failure.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

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
from composer_dist.distributed.moving import transport
from composer_dist.distributed.ranks import agreement
from composer_dist.distributed.weights import fill as weights
from composer_dist.errors import (
    ParallelismError,
    ParallelismKeyError,
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)
from tests.kit.compare import close, fails, fails_alike, full, same, values
from tests.kit.grids import crossed, in_the_default_run
from tests.kit.meshes import config
from tests.kit.toy import Toy, built, tokens, train
from tests.kit.world import WorkerError, on_ranks, run

Outcome = tuple[type, str]


@contextmanager
def in_time() -> Iterator[None]:
    """No rank takes longer than ten seconds after all have come."""
    dist.barrier()
    start = time.monotonic()
    try:
        yield
    finally:
        assert time.monotonic() - start < 10


def attempt(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    """What preparing raises; its collectives may be unusable afterwards."""
    try:
        with in_time():
            parallelize_model(model, *args, **kwargs)
    except BaseException as error:
        return type(error), str(error)
    return type(None), ""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model is what it was, and can still be prepared."""
    before = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in before]
    yield
    now = [*model.parameters(), *model.buffers()]
    assert type(model) is Toy
    assert [id(tensor) for tensor in now] == [id(tensor) for tensor in before]
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(now, copies, strict=True))


def unusable(model: nn.Module, cause: str, everybody: bool = True) -> None:
    """Every later call names the cause; only the forward is called where a rank has left."""
    uses: list[Callable[[], Any]] = [
        lambda: model(tokens()),
        lambda: parallelize_model(model, config()),
        lambda: clip_grad_norm(model, 1.0),
    ]
    for use in uses[: None if everybody else 1]:
        with fails(ParallelismRuntimeError, "unusable", cause):
            use()


# Before anything is touched. Other structure, dtype, frozen set and configuration: test_sources.


@pytest.mark.promise(12, 104)
@pytest.mark.parametrize(
    ("stage", "kind", "text"),
    [
        ("config", ParallelismValueError, "Rank 1: There is no strategy 'fdsp'"),
        ("config type", ParallelismTypeError, "Rank 1: config must be an FSDP2Config"),
        ("mesh", ParallelismValueError, "The ranks ask for different meshes: "),
        ("policy", ParallelismKeyError, "Rank 1: KeyError: 'no such block'"),
        ("checkpointing", ParallelismRuntimeError, "Rank 1: RuntimeError: cannot say"),
        ("max norm", ParallelismValueError, "Rank 1: embed: an embedding with max_norm"),
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
@on_ranks(2)
def test_whatever_is_wrong_on_one_rank_is_raised_on_all_before_anything_is_touched(
    stage: str, kind: type, text: str
) -> None:
    bad = dist.get_rank() == 1
    model = built(device="meta" if stage in {"tracing", "no initializer"} else "cpu")
    if stage == "max norm" and bad:
        model.embed.max_norm = 1.0
    elif stage == "no initializer":
        model.head.weight = nn.Parameter(torch.empty(16, 8, device="meta"))

    def choose(module: nn.Module, error: Exception) -> bool:
        if bad:
            raise error
        return isinstance(module, nn.Linear)

    def init(module: Any) -> None:
        if bad and stage == "tracing":
            raise ValueError("bad init")
        if not (bad and isinstance(module, nn.Embedding)):
            module.reset_parameters()

    args: list[Any] = {
        "config": ["fdsp" if bad else "fsdp"],
        "config type": [3 if bad else config()],
        "mesh": [config(replicas=2 if bad else 1)],
        "checkpointing": [config(activation_checkpointing="composable")],
        "optimizer": [config(), [{}] if bad else None],
        "class": [config(), torch.optim.AdamW if bad else None],
        "plan": [plan_parallelism(Toy(3 if bad else 2), config(), world_size=2)],
    }.get(stage, [config()])
    options: dict[str, Any] = {
        "policy": {"fsdp_wrap_policy": partial(choose, error=KeyError("no such block"))},
        "checkpointing": {
            "activation_checkpointing_check_fn": partial(choose, error=RuntimeError("cannot say"))
        },
        "tracing": {"param_init_fn": init},
        "no initializer": {"param_init_fn": init},
    }.get(stage, {})
    with untouched(model), fails_alike(kind, text), in_time():
        parallelize_model(model, *args, **options)


@pytest.mark.promise(12)
@on_ranks(2)
def test_after_a_refusal_the_model_can_still_be_prepared() -> None:
    model, single = built(), built()
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, single))
    with fails_alike(ParallelismValueError):
        parallelize_model(model, "fdsp" if dist.get_rank() else "fsdp")
    parallelize_model(model, config(), optimizer)
    train(model, optimizer, 1)
    train(single, other, 1, whole=True)
    close(values(model), values(single))


@pytest.mark.promise(83)
def test_a_ready_plan_does_not_let_a_foreign_optimizer_pass() -> None:
    model = built()
    plan = plan_parallelism(model, config(), world_size=1)
    before = list(model.parameters())
    with pytest.raises(ParallelismValueError, match="holds 1 parameters"):
        parallelize_model(model, plan, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


# After that: the same error everywhere, and a model that says so.


def fails_at(stage: str, failing: int, error: BaseException) -> Outcome:
    bad = dist.get_rank() == failing
    on_meta = stage == "init" or (stage == "delivery" and dist.get_rank() > 0)
    model = built(device="meta" if on_meta else "cpu")
    run_component, tracing = weights.run_component, True

    def fail(*args: Any) -> Any:
        if bad:
            raise error

    def really(*args: Any) -> Any:
        nonlocal tracing
        tracing = False
        return run_component(*args)

    def init(module: Any) -> None:
        tracing or fail()
        module.reset_parameters()

    options: dict[str, Any] = {
        "policy": {"fsdp_wrap_policy": lambda module: fail() or isinstance(module, nn.Linear)},
        "init": {"param_init_fn": init},
        "parallelize_fn": {"parallelize_fn": fail},
    }.get(stage, {})
    patched: dict[str, tuple[Any, str, Any]] = {"init": (weights, "run_component", really)}
    if bad:
        patched["delivery"] = (transport.Transport, "_copy", fail)
        patched["checkpointing"] = (prepare, "divide", fail)
    with mock.patch.object(*patched[stage]) if stage in patched else nullcontext():
        way: Any = "memory" if stage == "delivery" else "auto"
        outcome = attempt(model, config(transport=way), **options)
    if stage != "policy":
        interrupted = isinstance(error, KeyboardInterrupt)
        unusable(model, "KeyboardInterrupt" if interrupted else outcome[1], everybody=not interrupted)
    return outcome


@pytest.mark.promise(12)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("stage", ["init", "parallelize_fn", "delivery", "checkpointing"])
def test_what_fails_later_on_one_rank_makes_the_model_unusable_on_all(stage: str, failing: int) -> None:
    (kind, text), other = run(fails_at, 2, stage, failing, MemoryError("no room"))
    assert (kind, text) == other
    assert issubclass(kind, ParallelismRuntimeError)
    assert re.fullmatch(rf"Rank {failing}: MemoryError: no room \(at '[\w ]+'\)", text)


@crossed({"interrupted": [0, 1], "where": ["policy", "init", "delivery"]})
def test_ctrl_c_on_one_rank_ends_the_others_too(where: str, interrupted: int) -> None:
    results = run(fails_at, 2, where, interrupted, KeyboardInterrupt())
    assert results[interrupted] == (KeyboardInterrupt, "")
    kind, text = results[1 - interrupted]
    assert issubclass(kind, ParallelismRuntimeError)
    assert re.fullmatch(rf"Rank {interrupted}: KeyboardInterrupt( \(at '[\w ]+'\))?", text)


@pytest.mark.parametrize(
    "name", ["fsdp_wrap_policy", "activation_checkpointing_check_fn", "param_init_fn", "parallelize_fn"]
)
@on_ranks(2)
def test_what_is_no_function_is_refused_by_the_name_of_its_argument(name: str) -> None:
    model = built()
    with fails_alike(ParallelismTypeError, f"{name} must be a function of a mod"):
        parallelize_model(model, config(), **{name: 3})
    parallelize_model(model, config())


@pytest.mark.promise(21)
@on_ranks(2)
def test_parallelize_fn_returns_a_module_or_nothing() -> None:
    model = built()
    with fails_alike(ParallelismTypeError, "parallelize_fn must return a module or None, but returned int."):
        parallelize_model(model, config(), parallelize_fn=lambda model, mesh: 3)
    unusable(model, "returned int")


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


@pytest.mark.promise(21)
@pytest.mark.parametrize("returns", [True, False])
@on_ranks(2)
def test_parallelize_fn_runs_first_and_rules_after_it(returns: bool) -> None:
    """The caller shards one block and wraps the model; rules for what then is there apply to the rest."""
    model, reference = built(), built()
    calls = []

    def step(given: nn.Module, mesh: DeviceMesh) -> nn.Module | None:
        calls.append((given, mesh.mesh_dim_names))
        fully_shard(given.layers[1], mesh=mesh["dp_shard"])  # type: ignore[index, operator]
        return Around(given) if returns else None

    prefix = "inner." if returns else ""
    rules = [Rule([presets.layers(), ""], shard=True)]
    with pytest.warns(UserWarning, match=rf"^Already sharded, left unchanged: {prefix}layers\.1") as caught:
        done = parallelize_model(model, config(rules=rules), parallelize_fn=step)
    assert {one.filename for one in caught} == {__file__}
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
    assert [unit.name for unit in done.plan.units] == ["", f"{prefix}layers.0"]


@pytest.mark.promise(108)
@pytest.mark.parametrize("absent", [0, 1])
@on_ranks(2)
def test_a_rank_that_never_comes_is_named(absent: int) -> None:
    if dist.get_rank() == absent:
        dist.barrier()
        return
    model = built()
    with (
        mock.patch.object(agreement._torch, "collective_timeout", return_value=timedelta(seconds=0.5)),
        mock.patch.object(agreement, "MARGIN", timedelta(seconds=0.1)),
        untouched(model),
    ):
        kind, text = attempt(model, config())
    assert issubclass(kind, ParallelismRuntimeError)
    assert text.startswith(f"Rank {absent} did not answer within")
    assert "'the mesh'" in text


@pytest.mark.promise(108)
@pytest.mark.parametrize(
    ("victim", "way"),
    in_the_default_run(
        *((0, "messages"), (1, "memory"), (3, "messages")),
        among=itertools.product((0, 1, 3), ("memory", "messages")),
    ),
)
def test_a_rank_that_dies_during_delivery_is_reported_alike(victim: int, way: str) -> None:
    with pytest.raises(WorkerError) as failure:
        run(dies, 4, victim, way)
    assert list(failure.value.errors) == [victim]
    survivors = list(failure.value.results.values())
    assert len(survivors) == 3
    assert len(set(survivors)) == 1
    assert issubclass(survivors[0][0], ParallelismRuntimeError)
    assert f"Rank {victim}" in survivors[0][1]


def dies(victim: int, way: str) -> Outcome:
    model = built(device="cpu" if dist.get_rank() == 0 else "meta")
    original, calls = dist.batch_isend_irecv, 0
    mine = dist.get_rank() == victim

    def third(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return die() if calls == 3 and mine else original(*args)

    def die(*args: Any) -> None:
        os._exit(9)

    copy = die if mine and way == "memory" else transport.Transport._copy
    with (
        mock.patch.multiple(agreement, GRACE=timedelta(seconds=1), MARGIN=timedelta(seconds=1)),
        mock.patch.object(dist, "batch_isend_irecv", third),
        mock.patch.object(transport.Transport, "_copy", copy),
    ):
        outcome = attempt(model, config(bucket_bytes=64, transport=way))
    unusable(model, outcome[1], everybody=False)
    return outcome


@pytest.mark.promise(15)
@on_ranks(2)
def test_promise_1_nothing_is_renamed_or_replaced() -> None:
    model = built()
    names, state = [n for n, _ in model.named_parameters()], list(model.state_dict())
    layer = model.layers[0]
    done = parallelize_model(model, config())
    assert done.model is model
    assert model.layers[0] is layer
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == state


@on_ranks(2)
def test_a_ready_plan_is_what_happens() -> None:
    model = built()
    plan = plan_parallelism(model, config(), world_size=2)
    done = parallelize_model(model, plan)
    assert done.plan is plan
    same(values(model), values(built()))


def test_one_process_needs_no_launcher_and_no_group() -> None:
    with init_context():
        model = Toy()
    done = parallelize_model(model, "fsdp")
    assert done.mesh.size() == 1
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    with pytest.raises(ParallelismError, match=r"already sharded.*unparallelize_model\(model\) makes"):
        parallelize_model(model, "fsdp")
