"""Whose values count: rank 0's, everybody's own, or the initializers'; and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismError
from tests.kit.compare import alike, fails_alike, full, same, values
from tests.kit.grids import crossed, in_the_default_run
from tests.kit.meshes import config
from tests.kit.toy import Buffers, Kinds, Toy, built
from tests.kit.world import on_ranks
from tests.zoo import toy

MODELS = {"Toy": Toy, "Kinds": Kinds, "Buffers": Buffers}


def make(name: str, device: str, seed: int = 0) -> nn.Module:
    return built(MODELS[name], seed, device) if name in MODELS else toy.build(name, device)


@pytest.mark.promise(41)
@pytest.mark.parametrize(
    ("name", "ranks", "replicas"),
    in_the_default_run(
        *((name, 2, 1) for name in ("Toy", "Buffers", "llama", "t5")),
        *(("Kinds", 4, 2), ("Toy", 4, 2)),
        among=[
            (name, *one) for name in ("Toy", "Kinds", "Buffers", "llama", "t5") for one in ((2, 1), (4, 2))
        ],
    ),
)
@on_ranks("ranks")
def test_rank_0s_values_reach_ranks_on_meta(name: str, ranks: int, replicas: int) -> None:
    model = make(name, "cpu" if dist.get_rank() == 0 else "meta")
    done = parallelize_model(model, config(replicas=replicas))
    assert done.bytes_moved > 0
    same(values(model), values(make(name, "cpu")))


@pytest.mark.promise(80)
@on_ranks(2)
def test_ties_and_aliases_stay_one_object() -> None:
    device = "cpu" if dist.get_rank() == 0 else "meta"
    model: Any = make("Toy", device)
    buffers: Any = make("Buffers", device)
    parallelize_model(model, config())
    parallelize_model(buffers, config())
    assert model.head.weight is model.embed.weight
    assert buffers.alias is buffers.int_True


def refused(model: nn.Module, *texts: str, **options: Any) -> None:
    """On all ranks with the same message, and the model is as it was."""
    kind, objects = type(model), [id(t) for t in [*model.parameters(), *model.buffers()]]
    copies = [t.detach().clone() for t in model.parameters() if not t.is_meta]
    with fails_alike(ParallelismError, *texts):
        parallelize_model(model, config(**options))
    assert type(model) is kind
    assert [id(t) for t in [*model.parameters(), *model.buffers()]] == objects
    now = [t for t in model.parameters() if not t.is_meta]
    assert all(torch.equal(a, b) for a, b in zip(copies, now, strict=True))


@pytest.mark.promise(80)
@on_ranks(2)
def test_rank_0_on_meta_while_others_are_real_is_refused() -> None:
    refused(make("Toy", "meta" if dist.get_rank() == 0 else "cpu"), "on the meta device while other ranks")


DIFFERENT = "embed.weight, layers.0.down.weight, layers.0.up.bias"
"""The first tensors that differ, in order of their names; norms are equal at their start."""


@pytest.mark.promise(81)
@pytest.mark.parametrize(
    ("sync", "others", "texts"),
    [
        ("auto", "meta", None),
        ("auto", "equal", None),
        ("auto", "other", ["sync='rank0'", DIFFERENT]),
        ("rank0", "meta", None),
        ("rank0", "equal", None),
        ("rank0", "other", None),
        ("verify", "meta", ["sync='auto'", "embed.weight"]),
        ("verify", "equal", None),
        ("verify", "other", ["sync='rank0'", DIFFERENT]),
    ],
)
@on_ranks(2)
def test_rank_0s_values_count_or_the_model_is_refused(
    sync: str, others: str, texts: list[str] | None
) -> None:
    first = dist.get_rank() == 0
    seed = 1 if others == "other" and not first else 0
    model = make("Toy", "meta" if others == "meta" and not first else "cpu", seed)
    if texts is not None:
        refused(model, *texts, sync=sync)
        return
    parallelize_model(model, config(sync=sync))
    same(values(model), values(make("Toy", "cpu")))


@pytest.mark.promise(81)
@pytest.mark.parametrize("name", ["int_True", "bool_False", "complex_True", "scalar_False", "turned_True"])
@on_ranks(2)
def test_one_differing_bit_in_any_kind_of_tensor_is_named(name: str) -> None:
    model = make("Buffers", "cpu")
    if dist.get_rank() == 1:
        value: Any = getattr(model, name)
        element = value[(0,) * value.ndim]
        element.copy_(~element if value.dtype is torch.bool else element + 1)
    refused(model, f"The ranks hold different values of {name}. ")


@pytest.mark.promise(80)
@crossed({"sync": ["auto", "rank0"], "ranks": [2, 4]})
@on_ranks("ranks")
def test_tensor_by_tensor(ranks: int, sync: str) -> None:
    """Odd ranks hold only some tensors on meta, and others are on meta everywhere."""
    model: Any = make("Toy", "cpu")
    model.layers[1].up.to("meta")
    if dist.get_rank() % 2:
        model.layers[0].to("meta")
    parallelize_model(model, config(sync=sync))
    assert alike(model, full)
    found = values(model)
    for name, value in values(make("Toy", "cpu")).items():
        assert name.startswith("layers.1.up") or torch.equal(found[name], value), name
    assert found["layers.1.up.weight"].abs().max() <= 8**-0.5


@pytest.mark.promise(5, 105)
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
@on_ranks(2)
def test_ranks_that_were_given_something_else_are_told_what(what: str, expected: str) -> None:
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
    elif other and what == "methods":
        type(model).encode = type(model).forward
    elif other and what == "policy":
        model.layers[0]._fsdp_wrap = False
    if other:
        options = {
            "config": {"fsdp2": FSDP2Config(reshard_after_forward=False)},
            "bucket": {"bucket_bytes": 1024},
            "order": {"check_order": False},
            "methods": {"forward_methods": ["encode"]},
            "strict": {"strict": False},
        }.get(what, {})
    if what != "policy":
        refused(model, expected, **options)
        return
    wrapped = nn.Linear if other else nn.Embedding
    with fails_alike(ParallelismError, expected):
        parallelize_model(model, config(), fsdp_wrap_policy=lambda m: isinstance(m, wrapped))
