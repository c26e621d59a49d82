"""The facade over torch.distributed: the same calls on one process and on several."""

import os
import socket
import subprocess
import sys
from collections import namedtuple
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composer_dist.distributed.ranks import process_group as pg
from composer_dist.distributed.ranks.cpus import share_cpus, threads_per_process
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError, ParallelismValueError
from tests.kit.world import World

LAUNCHER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def one_and_three() -> float:
    return [1.0, 3.0][dist.get_rank()]


def reduce_tensor(op: str, dtype: torch.dtype, inplace: bool) -> tuple[Any, Any, bool]:
    value = torch.tensor([one_and_three(), 0.0], dtype=dtype, requires_grad=dtype.is_floating_point)
    result = pg.all_reduce(value, op, inplace=inplace)
    assert result.dtype == dtype
    return result.tolist(), value.tolist(), result is value


@pytest.mark.promise(4)
@pytest.mark.parametrize(
    ("op", "expected"), [("mean", 2.0), ("sum", 4.0), ("min", 1.0), ("max", 3.0), ("product", 3.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_all_reduce_of_tensors(world2: World, op: str, expected: float, dtype: torch.dtype) -> None:
    fresh = world2(reduce_tensor, op, dtype, inplace=False)
    assert fresh == [([expected, 0], [1, 0], False), ([expected, 0], [3, 0], False)]
    assert world2(reduce_tensor, op, dtype, inplace=True) == [([expected, 0],) * 2 + (True,)] * 2


def reduce_strided() -> list[list[float]]:
    value = torch.arange(4.0).reshape(2, 2).T * one_and_three()
    result = pg.all_reduce(value, inplace=True)
    assert result is value
    return value.tolist()


@pytest.mark.promise(4)
def test_inplace_reaches_a_strided_tensor(world2: World) -> None:
    assert world2(reduce_strided) == [[[0.0, 4.0], [2.0, 6.0]]] * 2


def reduce_narrow() -> tuple[int, float, int]:
    whole = torch.tensor(250, dtype=torch.uint8)
    half = torch.tensor(60000, dtype=torch.float16)
    odd = torch.tensor([1, 2][dist.get_rank()])
    return tuple(pg.all_reduce(value).item() for value in (whole, half, odd))


@pytest.mark.promise(4)
def test_mean_does_not_overflow_and_integers_round_toward_zero(world2: World) -> None:
    assert world2(reduce_narrow) == [(250, 60000.0, 1)] * 2


Pair = namedtuple("Pair", "left right")


def reduce_structure() -> Any:
    rank = dist.get_rank()
    value = {
        "loss": one_and_three(),
        "count": rank + 1,
        "name": f"rank {rank}",
        "pair": Pair(torch.tensor(one_and_three()), [rank, None]),
    }
    return pg.all_reduce(value), pg.all_reduce(rank + 1, "sum"), pg.all_reduce("as it is")


@pytest.mark.promise(4)
def test_numbers_and_containers_are_reduced_and_strings_are_not(world2: World) -> None:
    for rank, (structure, count, text) in enumerate(world2(reduce_structure)):
        assert structure["loss"] == 2.0
        assert structure["count"] == 1.5
        assert structure["name"] == f"rank {rank}"
        assert structure["pair"] == Pair(torch.tensor(2.0), [0.5, None])
        assert (count, text) == (3, "as it is")
        assert isinstance(count, int)


def reduce_in_subgroup() -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pg.all_reduce(float(dist.get_rank()), "sum", group=groups[dist.get_rank() // 2])


@pytest.mark.promise(4)
def test_all_reduce_stays_within_its_group(world4: World) -> None:
    assert world4(reduce_in_subgroup) == [1.0, 1.0, 5.0, 5.0]


def reduce_dtensor() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ParallelismTypeError) as failure:
        pg.all_reduce(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return str(failure.value)


@pytest.mark.promise(4)
def test_a_dtensor_is_refused(world2: World) -> None:
    for message in world2(reduce_dtensor):
        assert "DTensor of shape (4,)" in message
        assert "full_tensor()" in message


@pytest.mark.promise(4)
def test_without_a_group_the_input_comes_back() -> None:
    value = torch.ones(2)
    assert pg.all_reduce(value) is value
    assert pg.all_reduce(2.5, "sum") == 2.5


@pytest.mark.promise(4)
def test_an_unknown_op_is_an_error() -> None:
    with pytest.raises(ParallelismValueError, match="'average'; known: mean, sum, min, max"):
        pg.all_reduce(torch.ones(1), op="average")


def broadcast_settings() -> tuple[Any, Any]:
    mine = {"a": [1, 2]} if dist.get_rank() == 1 else None
    with pytest.raises(ParallelismValueError, match="no rank 2 in a world of 2"):
        pg.broadcast(mine, src=2)
    return pg.broadcast(mine, src=1), pg.broadcast(dist.get_rank())


@pytest.mark.promise(5)
def test_broadcast_reaches_every_rank(world2: World) -> None:
    assert world2(broadcast_settings) == [({"a": [1, 2]}, 0)] * 2


def agree() -> list[bool]:
    flags = (True, dist.get_rank() == 0, False)
    pg.barrier()
    return [answer for flag in flags for answer in (pg.all_ranks(flag), pg.any_rank(flag))]


@pytest.mark.promise(5)
def test_all_ranks_and_any_rank(world2: World) -> None:
    assert world2(agree) == [[True, True, False, True, False, False]] * 2


@pytest.mark.promise(5)
def test_nothing_happens_without_a_group() -> None:
    settings = {"a": [1, 2]}
    assert pg.broadcast(settings) is settings
    assert pg.all_ranks(True)
    assert pg.any_rank(True)
    assert not pg.all_ranks(False)
    assert not pg.any_rank(False)
    pg.barrier()
    pg.destroy()
    assert not dist.is_initialized()


@pytest.mark.promise(6)
def test_backend_for_a_device_type() -> None:
    assert pg.backend_for("cpu") == "gloo"
    assert pg.backend_for("cuda") == "nccl"
    assert pg.backend_for("cuda", cpu_ops=True) == "cuda:nccl,cpu:gloo"
    assert pg.backend_for("cpu", cpu_ops=True) == "cpu:gloo"
    with pytest.raises(ParallelismValueError, match="'abacus'; known: cpu, cuda"):
        pg.backend_for("abacus")


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ("cuda:nccl,cpu:gloo", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:gloo", "cpu"),  # what torch makes of plain "gloo"
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,xpu:xccl", "xpu:1"),
    ],
)
def test_the_device_is_the_groups(monkeypatch: pytest.MonkeyPatch, backends: str, expected: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert pg.device_of_group() == torch.device(expected)


def devices() -> tuple[torch.device, torch.device]:
    return pg.device_of_group(), pg.device_of_group(dist.new_group([0, 1]))


@pytest.mark.promise(6)
def test_gloo_works_on_the_cpu_whatever_the_machine_has(world2: World) -> None:
    assert world2(devices) == [(torch.device("cpu"), torch.device("cpu"))] * 2


@pytest.mark.promise(7)
@pytest.mark.parametrize("missing", [None, *LAUNCHER])
def test_is_distributed_needs_the_whole_environment(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    for name in LAUNCHER.keys() - {missing}:
        monkeypatch.setenv(name, LAUNCHER[name])
    assert pg.is_distributed() is (missing is None)


@pytest.mark.promise(7)
@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_half_an_environment_is_not_taken_for_one_process(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in {**LAUNCHER, "WORLD_SIZE": "2"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(ParallelismRuntimeError, match=f"WORLD_SIZE is 2 but {missing} is not set"):
        pg.init()
    assert not dist.is_initialized()


@pytest.mark.promise(7)
def test_one_process_needs_no_environment() -> None:
    assert pg.world_and_rank() == (1, 0)
    assert pg.local_rank() == 0
    pg.init(device="cpu")
    assert dist.is_initialized()
    assert pg.world_and_rank() == (1, 0)
    assert pg.local_rank() == 0
    assert pg.device_of_group() == torch.device("cpu")
    assert pg.all_reduce(torch.tensor([3.0])).tolist() == [3.0]
    assert pg.broadcast("a") == "a"
    pg.barrier()
    pg.destroy()
    assert not dist.is_initialized()


@pytest.mark.promise(7)
def test_a_second_init_is_an_error_unless_reused() -> None:
    pg.init("gloo")
    with pytest.raises(ParallelismRuntimeError, match=r"exists already \(backend gloo, 1 ranks\)"):
        pg.init("gloo")
    first = dist.group.WORLD
    pg.init("gloo", reuse=True)
    assert dist.group.WORLD is first
    pg.destroy()
    pg.init("gloo")


def from_environment() -> tuple[Any, ...]:
    assert pg.is_distributed()
    assert pg.world_and_rank() == (1, 0)
    pg.init(device="cpu")
    return pg.world_and_rank(), pg.local_rank(), pg.all_reduce(one_and_three(), "sum")


@pytest.mark.promise(7)
def test_init_follows_the_launcher(world2: World) -> None:
    assert world2(from_environment, setup="environment") == [((2, 0), 0, 4.0), ((2, 1), 1, 4.0)]


@pytest.mark.promise(7)
def test_local_rank_without_a_launcher(world2: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world2(pg.local_rank) == [0, 1]
    monkeypatch.setattr(pg, "world_and_rank", lambda: (8, 6))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert pg.local_rank() == 2
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pg.local_rank() == 3


@pytest.mark.promise(7)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_accelerator_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ParallelismRuntimeError, match="'cuda' was asked for"):
        pg.init(device="cuda")
    assert not dist.is_initialized()


def sum_over_mesh(extra_groups: int) -> float:
    for _ in range(extra_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return distribute_tensor(torch.arange(4.0), mesh["b"], [Shard(0)]).sum().full_tensor().item()


def setup_and_sum() -> list[float]:
    results = []
    for extra_groups in (0, 3, 1):
        pg.init(device="cpu")
        results.append(sum_over_mesh(extra_groups))
        pg.destroy()
    return results


@pytest.mark.promise(7)
def test_meshes_of_a_destroyed_group_are_forgotten(world4: World) -> None:
    """DTensor caches meshes by equality; an equal mesh over new groups must not meet an old one."""
    assert world4(setup_and_sum, setup="environment") == [[6.0, 6.0, 6.0]] * 4


@pytest.mark.promise(8)
def test_threads_per_process() -> None:
    assert threads_per_process(8, 2) == 4
    assert threads_per_process(2, 8) == 1
    assert threads_per_process(7, 2) == 3
    with pytest.raises(ParallelismValueError, match="got 0 CPUs, 2 processes"):
        threads_per_process(0, 2)


def share_among(processes: int, threads: str | None) -> tuple[int, str, int]:
    if threads is None:
        os.environ.pop("OMP_NUM_THREADS", None)
    else:
        os.environ["OMP_NUM_THREADS"] = threads
        torch.set_num_threads(int(threads))
    in_force = share_cpus(processes)
    assert in_force == torch.get_num_threads()
    return in_force, os.environ["OMP_NUM_THREADS"], len(os.sched_getaffinity(0))


@pytest.mark.promise(8)
def test_a_process_takes_its_share_unless_omp_num_threads_is_set(world1: World) -> None:
    [(in_force, inherited, cpus)] = world1(share_among, 2, None)
    assert (in_force, inherited) == (max(1, cpus // 2), str(max(1, cpus // 2)))
    assert world1(share_among, 10**6, None)[0][:2] == (1, "1")
    assert world1(share_among, 1, "3")[0][:2] == (3, "3")


@pytest.mark.promise(9)
@pytest.mark.parametrize("launched", [True, False])
def test_timeout_reaches_torch(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    if launched:
        for name, value in LAUNCHER.items():
            monkeypatch.setenv(name, value)
    with mock.patch.object(dist, "init_process_group") as called:
        pg.init(device="cpu", timeout=timedelta(seconds=30))
    assert called.call_args.args == ("gloo",)
    assert called.call_args.kwargs["timeout"] == timedelta(seconds=30)
    store = called.call_args.kwargs["store"]
    assert type(store) is (dist.PrefixStore if launched else dist.HashStore)
    assert not launched or store.timeout == timedelta(seconds=30)


LEAVING = """
from composer_dist.distributed import process_group
from composer_dist.distributed.ranks.agreement import Agreement

process_group.init()
if process_group.world_and_rank()[1] == 0:
    Agreement().reach("the work", None)
"""


def test_a_rank_that_ends_before_it_has_agreed_on_anything_is_noticed() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING],
            env=os.environ | LAUNCHER | {"MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1] for process in ranks]
    assert "Rank 1 died at 'the work'" in errors[0]
