"""Weights on their way to an inference engine: what `export_pretrained` writes, bit for bit."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from composer_dist.checkpoint import export_pretrained, weight_source
from composer_dist.checkpoint.export import source as module
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.moving.gather import gather_each
from composer_dist.distributed.ranks.process_group import gather_objects
from composer_dist.errors import ParallelismError, ParallelismTypeError, ParallelismValueError
from tests.kit.compare import fails, fails_alike, same
from tests.kit.decoder import token_batch
from tests.kit.files import tensors
from tests.kit.grids import slow
from tests.kit.huggingface import (
    adapted,
    gpt2,
    llama,
    lora_gpt2,
    lora_llama,
    mixtral,
    phi3,
    qwen3,
    random,
    tied_llama,
)
from tests.kit.meshes import MESHES
from tests.kit.world import on_ranks

pytestmark = [
    pytest.mark.promise(119),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
PLAIN = {"phi3": phi3, "gpt2": gpt2, "qwen3": qwen3, "tied": tied_llama, "mixtral": mixtral}
ADAPTED: dict[str, Callable[[], Any]] = {
    "lora llama": lora_llama,
    "lora gpt2": lora_gpt2,
    "dora": lambda: adapted("dora"),
}
ADAPTED["tokens"] = lambda: adapted("tokens")


def built(kind: str) -> Any:
    torch.manual_seed(1)
    make: Any = (PLAIN | ADAPTED)[kind]
    return random(make()) if kind in PLAIN else make()


def assembled(source: Any) -> dict[str, Tensor]:
    """What the parts that all ranks push are together; every element must come from one rank."""
    mine: list[tuple[str, tuple[int, ...], Tensor]] = []
    source.push_shards(lambda name, start, part: mine.append((name, start, part.clone())))
    found = {row.name: torch.zeros(row.shape, dtype=row.dtype) for row in source.metadata()}
    pushed = {name: torch.zeros(value.shape, dtype=torch.int) for name, value in found.items()}
    for name, start, part in (one for rank in gather_objects(mine) for one in rank):
        window = tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))
        found[name][window] = part
        pushed[name][window] += 1
    assert [name for name, count in pushed.items() if not bool((count == 1).all())] == []
    return found


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("fsdp2", ["phi3", "tied", "mixtral", "lora llama"]),
        slow("fsdp_tp", ["gpt2", "lora llama"]),
        slow("fsdp2", ["gpt2", "qwen3", "lora gpt2", "dora", "tokens"]),
        slow("plain", [*PLAIN, *ADAPTED]),
        slow("ddp", [*PLAIN, *ADAPTED]),
        slow("hsdp", [*PLAIN, *ADAPTED]),
        slow("tp", ["phi3", "gpt2", "tied", "lora llama"]),
        slow("hsdp_tp", ["phi3", "gpt2", "tied", "lora llama"]),
        slow("fsdp_cp", ["tied", "lora llama"]),
    ],
)
@on_ranks(lambda mode, **rest: MESHES[mode][0], timeout=240)
def test_it_is_what_an_export_writes(tmp_path: Path, mode: str, kinds: list[str]) -> None:
    """In iteration, in shards, and in the description of both; from buckets that hold little."""
    warnings.simplefilter("ignore")
    for kind in kinds:
        model = built(kind)
        if MESHES[mode][1] is not None:
            parallelize_model(model, MESHES[mode][1])
        export_pretrained(model, tmp_path / kind, merge_adapters=kind in ADAPTED)
        expected = tensors(tmp_path / kind)
        source = weight_source(model, bucket_bytes=1 << 12)
        given = list(source)
        same(dict(given), expected)
        rows = [(name, value.dtype, tuple(value.shape)) for name, value in given]
        assert source.metadata() == rows
        same(assembled(source), expected)


@on_ranks(2)
def test_it_gives_the_weights_of_the_moment_in_the_dtype_asked_for() -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parallelize_model(model, FSDP2Config(), optimizer)
    source = weight_source(model, dtype=torch.bfloat16)
    before = dict(source)
    model(input_ids=token_batch(), labels=token_batch()).loss.backward()
    optimizer.step()
    after = dict(source)
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert {row.dtype for row in source.metadata()} == {torch.bfloat16}
    assert all(not torch.equal(after[name], before[name]) for name in before if "proj" in name)
    full = model.model.norm.weight.full_tensor()
    assert torch.equal(after["model.norm.weight"], full.bfloat16())
    same(assembled(source), after)


@on_ranks(2)
def test_adapters_can_be_left_out() -> None:
    """The base gets its own values, also where peft has put a trained copy beside them."""
    for kind in ("lora llama", "modules_to_save"):
        model = adapted(kind) if kind == "modules_to_save" else built(kind)
        peft: Any = model if kind == "lora llama" else model.model
        expected = {key: value.clone() for key, value in peft.unload().state_dict().items()}
        model = adapted(kind) if kind == "modules_to_save" else built(kind)
        parallelize_model(model, FSDP2Config())
        same(dict(weight_source(model, merge_adapters=False)), expected)


@on_ranks(2)
def test_a_bucket_is_gathered_before_the_one_in_front_is_handed_out() -> None:
    model = llama()
    parallelize_model(model, FSDP2Config())
    events: list[str] = []
    gathered = gather_each

    def noted(given: Any) -> Any:
        found = list(gathered(given))
        events.append(f"gathered {len(found)}")
        return iter(found)

    with mock.patch.object(module, "gather_each", noted):
        for _ in weight_source(model, bucket_bytes=1):
            events.append("handed out")
    count = len(list(model.parameters()))
    assert events[:4] == ["gathered 1", "gathered 1", "handed out", "gathered 1"]
    assert events.count("gathered 1") == events.count("handed out") == count


@on_ranks(2)
def test_at_most_two_buckets_are_held() -> None:
    model = llama()
    parallelize_model(model, FSDP2Config())
    buckets: list[list[StorageWeakRef]] = []
    gathered, most = gather_each, 0

    def noted(given: Any) -> Any:
        found = list(gathered(given))
        buckets.append([StorageWeakRef(full.untyped_storage()) for _, full in found])
        return iter(found)

    bucket_bytes = 4 * max(one.numel() for one in model.parameters())
    with mock.patch.object(module, "gather_each", noted):
        for _name, value in weight_source(model, bucket_bytes=bucket_bytes):
            del value
            most = max(most, sum(not all(one.expired() for one in bucket) for bucket in buckets))
    assert len(buckets) > 3
    assert most == 2


@on_ranks(2)
def test_a_rank_that_stops_early_ends_the_others() -> None:
    model = llama()
    parallelize_model(model, FSDP2Config())
    text = "Not all weights of weight_source were taken"
    if dist.get_rank() == 1:
        iterator = iter(weight_source(model, bucket_bytes=1))
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
    else:
        with fails(ParallelismError, "Rank 1", text):
            list(weight_source(model, bucket_bytes=1))


@on_ranks(2)
def test_a_push_that_fails_on_one_rank_fails_on_all() -> None:
    model = llama()
    parallelize_model(model, FSDP2Config())

    def push(name: str, start: Any, part: Tensor) -> None:
        if dist.get_rank() == 1:
            raise OSError("the engine is gone")

    with fails_alike(ParallelismError, "Rank 1", "the engine is gone"):
        weight_source(model).push_shards(push)
    same(assembled(weight_source(model)), dict(weight_source(model)))


def test_what_cannot_be_given_is_named() -> None:
    with fails(ParallelismTypeError, "not Linear"):
        weight_source(nn.Linear(2, 2))
    with fails(ParallelismValueError, "bucket_bytes must be positive, not 0"):
        weight_source(llama(), bucket_bytes=0)
