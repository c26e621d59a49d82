"""Whose values count: rank 0's, everybody's own, or the initializers'; and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismError, ParallelismValueError
from tests.kit.compare import same, values
from tests.kit.meshes import config
from tests.kit.toy import Buffers, Kinds, Toy, built
from tests.kit.world import run
from tests.zoo import toy

MODELS = {"Toy": Toy, "Kinds": Kinds}
MODELS["Buffers"] = Buffers


def make(name: str, device: str, seed: int = 0) -> nn.Module:
    return built(MODELS[name], seed, device) if name in MODELS else toy.build(name, device)


@pytest.mark.promise(41)
@pytest.mark.parametrize("name", ["Toy", "Kinds", "Buffers", "llama", "t5"])
def test_rank_0s_values_reach_ranks_on_meta(name: str) -> None:
    expected = values(make(name, "cpu"))
    for size, replicas in ((2, 1), (4, 2)):
        for found in run(mixed, size, name, replicas):
            same(found, expected)


def mixed(name: str, replicas: int = 1) -> dict[str, torch.Tensor]:
    model = make(name, "cpu" if dist.get_rank() == 0 else "meta")
    done = parallelize_model(model, config(replicas=replicas))
    assert done.bytes_moved > 0
    return values(model)


@pytest.mark.promise(80)
def test_ties_and_aliases_stay_one_object() -> None:
    for found in run(tied_and_aliased, 2):
        assert found == (True, True)


def tied_and_aliased() -> tuple[bool, bool]:
    device = "cpu" if dist.get_rank() == 0 else "meta"
    model, buffers = make("Toy", device), make("Buffers", device)
    parallelize_model(model, config())
    parallelize_model(buffers, config())
    return model.head.weight is model.embed.weight, buffers.alias is buffers.int_True  # type: ignore[union-attr]


@pytest.mark.promise(80)
def test_rank_0_on_meta_while_others_are_real_is_refused() -> None:
    results = run(reversed_roles, 2)
    assert results[0] == results[1]
    assert (
        results[0].startswith("Rank 0 holds scale, ") or "on the meta device while other ranks" in results[0]
    )


def reversed_roles() -> str:
    model = make("Toy", "meta" if dist.get_rank() == 0 else "cpu")
    return refusal(model)


def refusal(model: nn.Module, **options: Any) -> str:
    """The error, after a look at the model: it is as it was."""
    kind, objects = type(model), [id(t) for t in [*model.parameters(), *model.buffers()]]
    copies = [t.detach().clone() for t in model.parameters() if not t.is_meta]
    with pytest.raises(ParallelismValueError) as error:
        parallelize_model(model, config(**options))
    assert type(model) is kind
    assert [id(t) for t in [*model.parameters(), *model.buffers()]] == objects
    now = [t for t in model.parameters() if not t.is_meta]
    assert all(torch.equal(a, b) for a, b in zip(copies, now, strict=True))
    return str(error.value)


SYNC = {
    # (sync, how the other ranks hold the model): what comes of it
    ("auto", "meta"): "rank 0",
    ("auto", "equal"): "rank 0",
    ("auto", "other"): "refused",
    ("rank0", "meta"): "rank 0",
    ("rank0", "equal"): "rank 0",
    ("rank0", "other"): "rank 0",
    ("verify", "meta"): "refused",
    ("verify", "equal"): "rank 0",
    ("verify", "other"): "refused",
}


@pytest.mark.promise(81)
@pytest.mark.parametrize(("sync", "others"), SYNC)
def test_sync(sync: str, others: str) -> None:
    expected = SYNC[sync, others]
    results = run(synced, 2, sync, others, expected)
    if expected == "rank 0":
        for found in results:
            same(found, values(make("Toy", "cpu")))
        return
    assert results[0] == results[1]
    remedy = "sync='auto'" if others == "meta" else "sync='rank0'"
    assert remedy in results[0]
    # The first tensors that differ, in order of their names; norms are equal at their start.
    named = "embed.weight, layers.0.down.weight, layers.0.up.bias" if others == "other" else "embed.weight"
    assert named in results[0]


def synced(sync: str, others: str, expected: str) -> Any:
    first = dist.get_rank() == 0
    seed = 1 if others == "other" and not first else 0
    model = make("Toy", "meta" if others == "meta" and not first else "cpu", seed)
    if expected == "refused":
        return refusal(model, sync=sync)
    parallelize_model(model, config(sync=sync))
    return values(model)


@pytest.mark.promise(81)
def test_one_differing_bit_in_any_kind_of_tensor_is_named() -> None:
    for name in ("int_True", "bool_False", "complex_True", "scalar_False", "turned_True"):
        results = run(one_bit, 2, name)
        assert results[0] == results[1]
        assert results[0].startswith(f"The ranks hold different values of {name}. ")


def one_bit(name: str) -> str:
    model = make("Buffers", "cpu")
    if dist.get_rank() == 1:
        value: Any = getattr(model, name)
        element = value[(0,) * value.ndim]
        element.copy_(~element if value.dtype is torch.bool else element + 1)
    return refusal(model)


@pytest.mark.promise(80)
@pytest.mark.parametrize("sync", ["auto", "rank0"])
def test_tensor_by_tensor(sync: str) -> None:
    """Rank 1 holds only some tensors on meta, and others are on meta everywhere."""
    for size in (2, 4):
        results = run(piecewise, size, sync)
        expected = values(make("Toy", "cpu"))
        for found in results:
            same(found, results[0])
            for name, value in expected.items():
                if not name.startswith("layers.1.up"):
                    assert torch.equal(found[name], value), name
            assert found["layers.1.up.weight"].abs().max() <= 8**-0.5


def piecewise(sync: str) -> dict[str, torch.Tensor]:
    model: Any = make("Toy", "cpu")
    model.layers[1].up.to("meta")
    if dist.get_rank() % 2:
        model.layers[0].to("meta")
    parallelize_model(model, config(sync=sync))
    return values(model)


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("shape", "different model:\n  extra.weight: shape is [4, 8] on rank 0, [5, 8] on rank 1"),
        ("missing", "different model:\n  extra.weight: rank 0 has it, rank 1 does not"),
        ("dtype", "different model:\n  row: dtype is torch.float32 on rank 0, torch.bfloat16 on rank 1"),
        ("frozen", "different model:\n  scale: requires_grad is True on rank 0, False on rank 1"),
        (
            "untied",
            "different model:\n  embed.weight: names is ['embed.weight', 'head.weight'] on rank 0, ['emb",
        ),
        (
            "config",
            "configuration:\n  unit layers.0: reshard_after_forward is True on rank 0, False on rank 1\n",
        ),
        ("bucket", "different configuration:\n  bucket_bytes is 512 on rank 0, 1024 on rank 1\nBuild"),
        ("order", "different configuration:\n  check_order is True on rank 0, False on rank 1\nBuild"),
        ("methods", "configuration:\n  forward_methods is [] on rank 0, ['encode'] on rank 1\nBuild"),
        ("strict", "different configuration:\n  strict is True on rank 0, False on rank 1\nBuild"),
        ("policy", "different configuration:"),
    ],
)
def test_ranks_that_were_given_something_else_are_told_what(what: str, expected: str) -> None:
    results = run(different, 2, what)
    assert results[0] == results[1]
    assert expected in results[0]


def different(what: str) -> str:
    other = dist.get_rank() == 1
    model: Any = make("Toy", "cpu")
    options: dict[str, Any] = {}
    if what in {"shape", "missing"} and not (what == "missing" and other):
        model.extra = nn.Linear(8, 5 if other else 4, bias=False)
    if other and what == "dtype":
        model.to(torch.bfloat16)
    elif other and what == "frozen":
        model.requires_grad_(False)
    elif other and what == "untied":
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    elif other and what == "config":
        options["fsdp2"] = FSDP2Config(reshard_after_forward=False)
    elif other and what == "bucket":
        options["bucket_bytes"] = 1024
    elif other and what == "order":
        options["check_order"] = False
    elif other and what == "methods":
        type(model).encode = type(model).forward
        options["forward_methods"] = ["encode"]
    elif other and what == "strict":
        options["strict"] = False
    elif other and what == "policy":
        model.layers[0]._fsdp_wrap = False
    if what == "policy":
        return refused_policy(model)
    return refusal(model, **options)


def refused_policy(model: nn.Module) -> str:
    rank = dist.get_rank()
    with pytest.raises(ParallelismError) as error:
        parallelize_model(
            model, config(), fsdp_wrap_policy=lambda m: isinstance(m, nn.Linear if rank else nn.Embedding)
        )
    return str(error.value)
