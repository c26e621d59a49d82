"""Full states against the plain model's `state_dict()`."""

import itertools
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from composer_dist._torch import checkpoint_wrapper
from composer_dist.checkpoint import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
)
from composer_dist.checkpoint import full_state as state_module
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import parallelize_model
from composer_dist.errors import (
    CheckpointKeyError,
    CheckpointValueError,
    ParallelismRuntimeError,
    ParallelismValueError,
)
from composer_dist.tensors.inner import local_part
from tests.kit.compare import close, equal, fails_alike, tensors_of
from tests.kit.grids import crossed
from tests.kit.huggingface import gpt2
from tests.kit.measure import messages
from tests.kit.meshes import MESHES
from tests.kit.toy import sharded, six_tokens, stateful, train_step
from tests.kit.world import on_ranks

DDP = pytest.param("ddp", marks=pytest.mark.promise(61))
RANKS = {"one": 1, "fsdp": 2, "ddp": 2, "hsdp": 4}


def prepared(model: nn.Module, mesh: str) -> nn.Module:
    if mesh == "ddp":
        parallelize_model(model, DDPConfig())
        return model
    return sharded(model, replicas=2 if mesh == "hsdp" else 1)


@pytest.mark.promise(42)
@crossed({"ranks": ["zero", "all"], "mesh": ["one", "fsdp", DDP, "hsdp"]})
@on_ranks(lambda mesh, **_: RANKS[mesh])
def test_rank_0_or_all_ranks_get_the_plain_state_dict(mesh: str, ranks: Any) -> None:
    state = full_model_state(prepared(stateful(), mesh), ranks=ranks)
    equal(state, stateful().state_dict() if ranks == "all" or dist.get_rank() == 0 else {})


@pytest.mark.promise(42)
@pytest.mark.parametrize("source", ["rank0", "all"])
@on_ranks(2)
def test_models_for_different_meshes_in_one_module(source: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6))
    parallelize_model(model[0], "fsdp")
    parallelize_model(model[1], ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=1)))
    optimizer = torch.optim.AdamW(model.parameters())
    wanted = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    load_full_model_state(model, wanted, source=source)
    equal(full_model_state(model, ranks="all"), wanted)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = full_optimizer_state(model, optimizer)
    before = [local_part(one["exp_avg"]).clone() for one in optimizer.state.values()]
    for one in optimizer.state.values():
        one["exp_avg"].zero_()
    load_full_optimizer_state(model, optimizer, state)
    assert len(before) == 4
    for one, value in zip(optimizer.state.values(), before, strict=True):
        assert torch.equal(local_part(one["exp_avg"]), value)


@pytest.mark.promise(42)
@on_ranks(2)
def test_all_ranks_get_the_statistics_of_rank_0() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    parallelize_model(model, {})
    model(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    state = full_model_state(model, ranks="all")
    expected = torch.nn.functional.linear(torch.ones(3), state["0.weight"], state["0.bias"])
    torch.testing.assert_close(state["1.running_mean"], 0.1 * expected)
    assert torch.equal(model.state_dict()["1.running_mean"], state["1.running_mean"])


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_state_is_a_copy_with_ties(size: int) -> None:
    model = sharded(stateful())
    state = full_model_state(model, ranks="all")
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    before = deepcopy(state)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
    equal(state, before)
    for name, value in tensors_of(state).items():
        assert value.untyped_storage().nbytes() == value.nbytes, f"{name} is padded"


@pytest.mark.promise(103)
@pytest.mark.parametrize(("ranks", "reshard_after_forward"), [(2, True), (2, False), (4, 2)])
@on_ranks("ranks")
def test_after_an_eval_forward(ranks: int, reshard_after_forward: bool | int) -> None:
    model, reference = sharded(stateful(), reshard_after_forward=reshard_after_forward), stateful()
    with torch.no_grad():
        for one in (model, reference):
            one.eval()(six_tokens())
    state = full_model_state(model)
    equal(state, {} if dist.get_rank() else reference.state_dict())
    assert all(isinstance(p, DTensor) for p in model.parameters())


def count_gathers(select: Any, bucket_bytes: int) -> tuple[dict[str, Any], list[int]]:
    model = sharded(stateful())
    with messages(bucket_bytes) as sent:
        state = full_model_state(model, select=select)
    return state, sent


@pytest.mark.promise(43)
@on_ranks(2)
def test_what_is_not_selected_is_not_gathered() -> None:
    reference = stateful().state_dict()
    kept = [name for name, p in stateful().named_parameters(remove_duplicate=False) if p.requires_grad]
    whole, everything = count_gathers(None, 1 << 20)
    assert len(everything) == 1, "one collective per bucket"
    trainable, some = count_gathers("trainable", 1 << 20)
    assert everything[0] - some[0] == 8 * 4 // 2, "only the frozen scale is left out; ties go once"
    matrices, few = count_gathers(lambda name, tensor: tensor.shape in ((5, 8), (8, 5)), 1 << 20)
    buffers, none = count_gathers(lambda name, tensor: not isinstance(tensor, nn.Parameter), 1 << 20)
    assert none == []
    if dist.get_rank():
        assert whole == trainable == matrices == buffers == {}
        return
    equal(whole, reference)
    assert list(trainable) == [name for name in reference if name in kept]
    assert list(matrices) == [f"layers.{i}.{m}.weight" for i in range(2) for m in ("up", "down")]
    assert few == [2 * (3 * 8 * 4 + 4 * 5 * 4)], "bytes of the first rank's shards"
    assert list(buffers) == [n for n in reference if "running" in n or "tracked" in n or n == "shift"]


@pytest.mark.promise(42)
@crossed({"bucket_bytes": [1, 64, 200, 1000], "size": [2, 4]})
@on_ranks("size")
def test_buckets_of_any_size_give_the_same(size: int, bucket_bytes: int) -> None:
    state, sent = count_gathers(None, bucket_bytes)
    if dist.get_rank() == 0:
        equal(state, stateful().state_dict())
        share, total = max(bucket_bytes // size, 4), sum(p.nbytes for p in stateful().parameters())
        assert max(sent) <= share + 16 * len(state), "a share, and padding"
        assert len(sent) >= total // size // share // 2


@on_ranks(2)
def test_dtype_casts_floating_point_only() -> None:
    expected = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in stateful().state_dict().items()
    }
    equal(full_model_state(sharded(stateful()), dtype=torch.bfloat16, ranks="all"), expected)


@pytest.mark.promise(28)
@on_ranks(2)
def test_names_have_no_wrapper_segments() -> None:
    model = stateful()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    equal(full_model_state(sharded(model), ranks="all"), stateful().state_dict())


def test_a_compiled_model_has_the_plain_names() -> None:
    compiled: Any = torch.compile(stateful(), backend="eager")
    assert list(full_model_state(compiled)) == list(stateful().state_dict())


@on_ranks(2)
def test_a_selection_that_differs_or_raises_does_so_on_every_rank() -> None:
    def raises(name: str, tensor: Tensor) -> bool:
        if dist.get_rank() == 1:
            raise RuntimeError("out of luck")
        return True

    with fails_alike(Exception, "out of luck"):
        full_model_state(sharded(stateful()), select=raises)
    with fails_alike(ParallelismValueError, "embed.weight"):
        full_model_state(sharded(stateful()), select=lambda name, _: "layers" in name or dist.get_rank() == 0)


def test_options_are_checked() -> None:
    with pytest.raises(ParallelismValueError, match="'some'"):
        full_model_state(stateful(), ranks="some")  # type: ignore[arg-type]
    with pytest.raises(ParallelismValueError, match="'lora'"):
        full_model_state(stateful(), select="lora")  # type: ignore[arg-type]
    with pytest.raises(CheckpointValueError, match="no adapters"):
        full_model_state(stateful(), select="adapters")
    with torch.device("meta"), pytest.raises(CheckpointValueError, match=r"meta device: .*weight"):
        full_model_state(nn.Linear(2, 2))


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
@on_ranks(lambda mesh, **_: RANKS[mesh])
def test_a_full_state_loads_into_shards(mesh: str, meta: bool, source: Any, dtype: str) -> None:
    expected = stateful(3).to(getattr(torch, dtype)).state_dict()
    given = stateful(3).state_dict() if source == "all" or dist.get_rank() == 0 else {}
    with torch.device("meta" if meta else "cpu"):
        model = stateful(7).to(getattr(torch, dtype))
    prepared(model, mesh)
    before = list(model.parameters())
    assert load_full_model_state(model, given, source=source) == ([], [])
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    if meta:
        model.table = stateful(3).table
    model.eval()
    equal(full_model_state(model, ranks="all"), expected)
    model(six_tokens())  # it runs, and a forward brings no other values
    after = full_model_state(model, ranks="all")
    equal({name: after[name] for name in tensors_of(expected)}, tensors_of(expected))


def decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return gpt2()


@pytest.mark.promise(44)
@pytest.mark.parametrize(
    "mesh", ["tp", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("ddp", "hsdp", "fsdp_tp"))]
)
@on_ranks(lambda mesh: MESHES[mesh][0])
def test_from_every_rank_s_own_copy_on_every_mesh(mesh: str) -> None:
    model = decoder(7)
    parallelize_model(model, MESHES[mesh][1])
    assert load_full_model_state(model, decoder(3).state_dict(), source="all") == ([], [])
    equal(full_model_state(model, ranks="all"), decoder(3).state_dict())


@pytest.mark.promise(44)
@on_ranks(2)
def test_training_goes_on_from_the_loaded_state() -> None:
    """An optimizer that was there before the load moves what was loaded."""
    model, reference = sharded(stateful(7)), stateful(3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    load_full_model_state(model, stateful(3).state_dict())
    model(six_tokens()).logsumexp(-1).mean().backward()
    optimizer.step()
    train_step(reference)
    found = full_model_state(model, ranks="all")
    close(tensors_of(found), tensors_of(reference.state_dict()))


@pytest.mark.promise(45)
@on_ranks(2)
def test_offloaded_shards() -> None:
    model = stateful(7)
    for module in (*model.layers, model):
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
    equal(full_model_state(model, ranks="all"), stateful(7).state_dict())
    load_full_model_state(model, stateful(3).state_dict())
    equal(full_model_state(model, ranks="all"), stateful(3).state_dict())
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.promise(44)
@on_ranks(2)
def test_missing_and_unexpected_are_exact_and_ties_count_once() -> None:
    state: dict[str, Any] = stateful(3).state_dict()
    del state["layers.0.up.weight"], state["shift"]
    expected = stateful(7).state_dict() | state
    del state["embed.weight"]
    state["nope"] = torch.zeros(1)
    model = sharded(stateful(7))
    result = load_full_model_state(model, state, strict=False)
    assert result == (["shift", "layers.0.up.weight"], ["nope"])
    equal(full_model_state(model, ranks="all"), expected)


@pytest.mark.promise(44)
@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name_everywhere() -> None:
    misshapen: dict[str, Any] = stateful(3).state_dict() | {"layers.0.up.weight": torch.zeros(8, 5)}
    renamed = {name if name != "layers.0.up.weight" else "nope": v for name, v in misshapen.items()}
    model = sharded(stateful(7))
    for state, kind, texts in (
        (misshapen, CheckpointValueError, ["layers.0.up.weight"]),
        (renamed, CheckpointKeyError, ["layers.0.up.weight", "nope"]),
    ):
        with fails_alike(kind, *texts):
            load_full_model_state(model, state if dist.get_rank() == 0 else {})
        equal(full_model_state(model, ranks="all"), stateful(7).state_dict())


@pytest.mark.promise(44)
@on_ranks(2)
def test_a_model_that_was_loaded_half_says_so() -> None:
    model = sharded(stateful())
    with (
        mock.patch.object(state_module, "fill", side_effect=OSError("out of memory")),
        pytest.raises(OSError, match="out of memory"),
    ):
        load_full_model_state(model, stateful(1).state_dict())
    with pytest.raises(ParallelismRuntimeError, match="out of memory"):
        model(six_tokens())


@pytest.mark.promise(44)
@on_ranks(2)
def test_an_error_of_extra_state_on_one_rank_is_everybodys() -> None:
    model = sharded(stateful())

    def refuse(state: Any) -> None:
        raise ValueError("of rank 1 alone")

    if dist.get_rank() == 1:
        model.layers[0].set_extra_state = refuse
    with pytest.raises((ValueError, ParallelismRuntimeError), match="of rank 1 alone"):
        load_full_model_state(model, stateful(1).state_dict())
    with pytest.raises(ParallelismRuntimeError, match="of rank 1 alone"):
        model(six_tokens())


def test_a_plain_model_needs_no_process_group() -> None:
    model = stateful(7)
    state = full_model_state(model)
    equal(state, model.state_dict())
    assert load_full_model_state(model, stateful(3).state_dict()) == ([], [])
    equal(full_model_state(model), stateful(3).state_dict())
    equal(state, stateful(7).state_dict())  # a copy
    with torch.device("meta"):
        model = stateful()
    load_full_model_state(model, stateful(3).state_dict())
    equal(full_model_state(model), stateful(3).state_dict())
    assert model.head.weight is model.embed.weight
