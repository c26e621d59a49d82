"""Full states against the plain model's `state_dict()`."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint import LoadResult, full_model_state, load_full_model_state
from composer_dist.checkpoint import full_state as state_module
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import parallelize_model
from composer_dist.errors import (
    CheckpointError,
    CheckpointValueError,
    ParallelismRuntimeError,
    ParallelismValueError,
)
from tests.kit.compare import equal
from tests.kit.huggingface import gpt2
from tests.kit.measure import messages
from tests.kit.meshes import MESHES
from tests.kit.toy import sharded, six_tokens, stateful, train_step
from tests.kit.world import World, run

# full_model_state


DDP = pytest.param("ddp", marks=pytest.mark.promise(61))
RANKS = {"one": 1, "fsdp": 2, "ddp": 2, "hsdp": 4}


def prepared(model: nn.Module, mesh: str) -> nn.Module:
    if mesh == "ddp":
        parallelize_model(model, DDPConfig())
        return model
    return sharded(model, replicas=2 if mesh == "hsdp" else 1)


def gathered(mesh: str, ranks: Any) -> dict[str, Any]:
    return full_model_state(prepared(stateful(), mesh), ranks=ranks)


@pytest.mark.promise(42)
@pytest.mark.parametrize("ranks", ["zero", "all"])
@pytest.mark.parametrize("mesh", ["one", "fsdp", DDP, "hsdp"])
def test_rank_0_or_all_ranks_get_the_plain_state_dict(mesh: str, ranks: str) -> None:
    for rank, state in enumerate(run(gathered, RANKS[mesh], mesh, ranks)):
        equal(state, stateful().state_dict() if ranks == "all" or rank == 0 else {})


def tied_and_owned() -> tuple[bool, list[str], list[str]]:
    model = sharded(stateful())
    state = full_model_state(model, ranks="all")
    tied = state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    before = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
    changed = [name for name, value in before.items() if not torch.equal(value, state[name])]
    padded = [name for name in before if state[name].untyped_storage().nbytes() != state[name].nbytes]
    return tied, changed, padded


@pytest.mark.parametrize("size", [1, 2])
def test_a_state_is_a_copy_with_ties(world1: World, world2: World, size: int) -> None:
    assert (world1, world2)[size - 1](tied_and_owned) == [(True, [], [])] * size


def test_a_plain_model_needs_no_process_group() -> None:
    model = stateful()
    state = full_model_state(model)
    equal(state, model.state_dict())
    with torch.no_grad():
        model.scale.add_(1)
    assert not torch.equal(state["scale"], model.scale)


def gathered_after_eval(reshard_after_forward: Any) -> tuple[dict[str, Any], bool]:
    model = sharded(stateful(), reshard_after_forward=reshard_after_forward).eval()
    with torch.no_grad():
        model(six_tokens())
    state = full_model_state(model)
    return state, all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.promise(103)
@pytest.mark.parametrize(("ranks", "reshard_after_forward"), [(2, True), (2, False), (4, 2)])
def test_after_an_eval_forward(ranks: int, reshard_after_forward: bool | int) -> None:
    reference = stateful().eval()
    reference(six_tokens())
    state, resharded = run(gathered_after_eval, ranks, reshard_after_forward)[0]
    equal(state, reference.state_dict())
    assert resharded


def count_gathers(select: Any, bucket_bytes: int) -> tuple[dict[str, Any], list[int]]:
    model = sharded(stateful())
    with messages(bucket_bytes) as sent:
        state = full_model_state(model, select=select)
    return state, sent


@pytest.mark.promise(43)
def test_what_is_not_selected_is_not_gathered(world2: World) -> None:
    reference = stateful().state_dict()
    (state, everything), other = world2(count_gathers, None, 1 << 20)
    equal(state, reference)
    assert other == ({}, everything)
    assert len(everything) == 1, "one collective per bucket"
    (state, some), _ = world2(count_gathers, "trainable", 1 << 20)
    names = [name for name, p in stateful().named_parameters(remove_duplicate=False) if p.requires_grad]
    assert list(state) == [name for name in reference if name in names]
    assert everything[0] - some[0] == 8 * 4 // 2, "only the frozen scale is left out; ties go once"
    (state, few), _ = world2(count_gathers, uneven_matrices, 1 << 20)
    assert list(state) == [f"layers.{i}.{m}.weight" for i in range(2) for m in ("up", "down")]
    shards = [3 * 8 * 4, 4 * 5 * 4]  # bytes, of the first rank
    assert few == [2 * sum(shards)]
    (state, none), _ = world2(count_gathers, buffers, 1 << 20)
    assert list(state) == [n for n in reference if "running" in n or "tracked" in n or n == "shift"]
    assert none == []


@pytest.mark.promise(42)
@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 1000])
def test_buckets_of_any_size_give_the_same(world2: World, world4: World, bucket_bytes: int) -> None:
    for world in world2, world4:
        (state, sent), *_ = world(count_gathers, None, bucket_bytes)
        equal(state, stateful().state_dict())
        size = 2 if world is world2 else 4
        assert max(sent) <= max(bucket_bytes // size, 4) + 16 * len(state), "a share, and padding"
        assert (
            len(sent)
            >= sum(p.nbytes for p in stateful().parameters()) // size // max(bucket_bytes // size, 4) // 2
        )


def buffers(name: str, tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter)


def uneven_matrices(name: str, tensor: Tensor) -> bool:
    return tensor.shape in ((5, 8), (8, 5))


def cast() -> dict[str, Any]:
    return full_model_state(sharded(stateful()), dtype=torch.bfloat16)


def test_dtype_casts_floating_point_only(world2: World) -> None:
    expected = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in stateful().state_dict().items()
    }
    equal(world2(cast)[0], expected)


def wrapped_names() -> dict[str, Any]:
    model = stateful()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return full_model_state(sharded(model))


@pytest.mark.promise(28)
def test_names_have_no_wrapper_segments(world2: World) -> None:
    equal(world2(wrapped_names)[0], stateful().state_dict())


def test_a_compiled_model_has_the_plain_names() -> None:
    compiled: Any = torch.compile(stateful(), backend="eager")
    assert list(full_model_state(compiled)) == list(stateful().state_dict())


def bad_selection(kind: str) -> str:
    rank = torch.distributed.get_rank()

    def select(name: str, tensor: Tensor) -> bool:
        if kind == "raises" and rank == 1:
            raise RuntimeError("out of luck")
        return name.startswith("layers") or rank == 0

    with pytest.raises(ParallelismValueError if kind == "differs" else Exception) as failure:
        full_model_state(sharded(stateful()), select=select)
    return str(failure.value)


@pytest.mark.parametrize(("kind", "text"), [("differs", "embed.weight"), ("raises", "out of luck")])
def test_a_selection_that_differs_or_raises_does_so_on_every_rank(
    world2: World, kind: str, text: str
) -> None:
    first, second = world2(bad_selection, kind)
    assert first == second
    assert text in first


def test_options_are_checked() -> None:
    with pytest.raises(ParallelismValueError, match="'some'"):
        full_model_state(stateful(), ranks="some")  # type: ignore[arg-type]
    with pytest.raises(ParallelismValueError, match="'lora'"):
        full_model_state(stateful(), select="lora")  # type: ignore[arg-type]
    with pytest.raises(CheckpointValueError, match="no adapters"):
        full_model_state(stateful(), select="adapters")
    with torch.device("meta"), pytest.raises(CheckpointValueError, match=r"meta device: .*weight"):
        full_model_state(nn.Linear(2, 2))


# load_full_model_state


def loaded(
    seed: int, mesh: str, meta: bool, source: Any, dtype: Any
) -> tuple[dict[str, Any], LoadResult, bool, bool]:
    given = stateful(seed).state_dict() if source == "all" or torch.distributed.get_rank() == 0 else {}
    with torch.device("meta" if meta else "cpu"):
        model = stateful(7).to(dtype)
    prepared(model, mesh)
    before = list(model.parameters())
    result = load_full_model_state(model, given, source=source)
    same = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    if meta:
        model.table = stateful(seed).table
    model.eval()
    state = full_model_state(model, ranks="all")
    model(six_tokens())  # it runs, and a forward brings no other values
    again = full_model_state(model, ranks="all")
    unchanged = all(torch.equal(state[n], again[n]) for n in state if isinstance(state[n], Tensor))
    return state, result, same, unchanged


CASES = itertools.product([False, True], ["rank0", "all"], ["float32", "bfloat16"])


@pytest.mark.promise(44)
@pytest.mark.parametrize(
    ("mesh", "meta", "source", "dtype"),
    [
        *(("fsdp", *case) for case in CASES),
        *(("hsdp", meta, "rank0", "float32") for meta in (False, True)),
        pytest.param("ddp", False, "rank0", "float32", marks=pytest.mark.promise(61)),
    ],
)
def test_a_full_state_loads_into_shards(mesh: str, meta: bool, source: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for state, result, same, unchanged in run(loaded, RANKS[mesh], 3, mesh, meta, source, kind):
        equal(state, stateful(3).to(kind).state_dict())
        assert result == ([], [])
        assert same
        assert unchanged


def everywhere(mesh: str) -> dict[str, Any]:
    model = decoder(7)
    parallelize_model(model, MESHES[mesh][1])
    assert load_full_model_state(model, decoder(3).state_dict(), source="all") == ([], [])
    return full_model_state(model, ranks="all")


def decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return gpt2()


@pytest.mark.promise(44)
@pytest.mark.parametrize(
    "mesh", ["tp", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("ddp", "hsdp", "fsdp_tp"))]
)
def test_from_every_rank_s_own_copy_on_every_mesh(mesh: str) -> None:
    for state in run(everywhere, MESHES[mesh][0], mesh):
        equal(state, decoder(3).state_dict())


def trained_after_load() -> dict[str, Any]:
    """An optimizer that was there before the load moves what was loaded."""
    model = sharded(stateful(7))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    load_full_model_state(model, stateful(3).state_dict())
    model(six_tokens()).logsumexp(-1).mean().backward()
    optimizer.step()
    return full_model_state(model)


@pytest.mark.promise(44)
def test_training_goes_on_from_the_loaded_state(world2: World) -> None:
    reference = stateful(3)
    train_step(reference)
    state = world2(trained_after_load)[0]
    for name, expected in reference.state_dict().items():
        if isinstance(expected, Tensor):
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6)


def offloaded() -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    model = stateful(7)
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    before = full_model_state(model, ranks="all")
    load_full_model_state(model, stateful(3).state_dict())
    return before, full_model_state(model, ranks="all"), {p.device.type for p in model.parameters()}


@pytest.mark.promise(45)
def test_offloaded_shards(world2: World) -> None:
    for before, after, devices in world2(offloaded):
        equal(before, stateful(7).state_dict())
        equal(after, stateful(3).state_dict())
        assert devices == {"cpu"}


def loaded_leniently() -> tuple[LoadResult, dict[str, Any]]:
    state: dict[str, Any] = stateful(3).state_dict()
    del state["embed.weight"], state["layers.0.up.weight"], state["shift"]
    state["nope"] = torch.zeros(1)
    model = sharded(stateful(7))
    result = load_full_model_state(model, state, strict=False)
    return result, full_model_state(model, ranks="all")


@pytest.mark.promise(44)
def test_missing_and_unexpected_are_exact_and_ties_count_once(world2: World) -> None:
    expected = stateful(7).state_dict() | {
        name: value
        for name, value in stateful(3).state_dict().items()
        if name not in ("layers.0.up.weight", "shift")
    }
    for result, state in world2(loaded_leniently):
        assert result.missing == ["shift", "layers.0.up.weight"]
        assert result.unexpected == ["nope"]
        equal(state, expected)


def refused(change: str) -> tuple[str, str, bool]:
    state: dict[str, Any] = stateful(3).state_dict()
    if change == "names":
        del state["layers.0.up.weight"]
        state["nope"] = torch.zeros(1)
    else:
        state["layers.0.up.weight"] = torch.zeros(8, 5)
    model = sharded(stateful(7))
    before = full_model_state(model, ranks="all")
    with pytest.raises(CheckpointError) as failure:
        load_full_model_state(model, state if torch.distributed.get_rank() == 0 else {})
    after = full_model_state(model, ranks="all")
    untouched = all(torch.equal(before[n], after[n]) for n in before if isinstance(before[n], Tensor))
    kinds = [kind.__name__ for kind in (KeyError, ValueError) if isinstance(failure.value, kind)]
    return str(failure.value), kinds[0], untouched


@pytest.mark.promise(44)
@pytest.mark.parametrize(("change", "kind"), [("names", "KeyError"), ("shape", "ValueError")])
def test_what_does_not_fit_is_refused_by_name_everywhere(world2: World, change: str, kind: str) -> None:
    (text, first_kind, untouched), other = world2(refused, change)
    assert other == (text, kind, True)
    assert (first_kind, untouched) == (kind, True)
    assert "layers.0.up.weight" in text
    assert ("nope" in text) == (change == "names")


def fail_halfway() -> str:
    model = sharded(stateful())
    with (
        mock.patch.object(state_module, "fill", side_effect=OSError("out of memory")),
        pytest.raises(OSError, match="out of memory"),
    ):
        load_full_model_state(model, stateful(1).state_dict())
    with pytest.raises(ParallelismRuntimeError) as caught:
        model(six_tokens())
    return str(caught.value)


@pytest.mark.promise(44)
def test_a_model_that_was_loaded_half_says_so(world2: World) -> None:
    assert all("out of memory" in text for text in world2(fail_halfway))


def test_a_plain_model_loads_without_a_process_group() -> None:
    model = stateful(7)
    assert load_full_model_state(model, stateful(3).state_dict()) == ([], [])
    equal(full_model_state(model), stateful(3).state_dict())
    with torch.device("meta"):
        model = stateful()
    load_full_model_state(model, stateful(3).state_dict())
    equal(full_model_state(model), stateful(3).state_dict())
    assert model.head.weight is model.embed.weight
