"""The facade over torch.distributed: the same calls on one process and on several."""

import os
import subprocess
import sys
from collections import namedtuple
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composer_dist.distributed.ranks import process_group as pg
from composer_dist.distributed.ranks.cpus import share_cpus, threads_per_process
from composer_dist.distributed.ranks.gpus import check_own_gpu
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError, ParallelismValueError
from tests.kit.compare import fails, fails_alike
from tests.kit.ports import reserved_port
from tests.kit.world import World, on_ranks

LAUNCHER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def one_and_three() -> float:
    return [1.0, 3.0][dist.get_rank()]


@pytest.mark.promise(4)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("op", "expected"), [("mean", 2.0), ("sum", 4.0), ("min", 1.0), ("max", 3.0), ("product", 3.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@on_ranks(2)
def test_all_reduce_of_tensors(op: str, expected: float, dtype: torch.dtype, inplace: bool) -> None:
    value = torch.tensor([one_and_three(), 0.0], dtype=dtype, requires_grad=dtype.is_floating_point)
    result = pg.all_reduce(value, op, inplace=inplace)
    assert result.dtype == dtype
    assert result.tolist() == [expected, 0]
    assert value.tolist() == [expected if inplace else one_and_three(), 0]
    assert (result is value) == inplace


@pytest.mark.promise(4)
@on_ranks(2)
def test_inplace_reaches_a_strided_tensor() -> None:
    value = torch.arange(4.0).reshape(2, 2).T * one_and_three()
    assert pg.all_reduce(value, inplace=True) is value
    assert value.tolist() == [[0.0, 4.0], [2.0, 6.0]]


Pair = namedtuple("Pair", "left right")


@pytest.mark.promise(4)
@on_ranks(2)
def test_numbers_and_containers_are_reduced_and_strings_are_not() -> None:
    rank = dist.get_rank()
    pair = Pair(torch.tensor(one_and_three()), [rank, None])
    value = {"loss": one_and_three(), "count": rank + 1, "name": f"rank {rank}", "pair": pair}
    mean = Pair(torch.tensor(2.0), [0.5, None])
    assert pg.all_reduce(value) == {"loss": 2.0, "count": 1.5, "name": f"rank {rank}", "pair": mean}
    count = pg.all_reduce(rank + 1, "sum")
    assert count == 3
    assert isinstance(count, int)
    assert pg.all_reduce("as it is") == "as it is"
    # Means do not overflow, and integers round toward zero.
    assert pg.all_reduce(torch.tensor(250, dtype=torch.uint8)).item() == 250
    assert pg.all_reduce(torch.tensor(60000, dtype=torch.float16)).item() == 60000
    assert pg.all_reduce(torch.tensor(rank + 1)).item() == 1


@pytest.mark.promise(4)
@pytest.mark.parametrize("op", ["mean", "sum", "max"])
@on_ranks(1)
def test_a_group_of_one_rank_sends_nothing(op: str) -> None:
    value = torch.tensor([[1, 2], [3, 4]]).T
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError):
        result = pg.all_reduce(value, op)
        assert pg.all_reduce(value, op, inplace=True) is value
    assert torch.equal(result, value)
    assert result.data_ptr() != value.data_ptr()


@pytest.mark.promise(4)
@on_ranks(4)
def test_all_reduce_stays_within_its_group() -> None:
    half = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][half]
    assert pg.all_reduce(float(dist.get_rank()), "sum", group=group) == [1.0, 5.0][half]


@pytest.mark.promise(4)
@on_ranks(2)
def test_a_dtensor_is_refused() -> None:
    value = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with fails(ParallelismTypeError, "DTensor of shape (4,)", "full_tensor()"):
        pg.all_reduce(value)


@pytest.mark.promise(4)
def test_without_a_group_the_input_comes_back_and_an_unknown_op_is_an_error() -> None:
    value = torch.ones(2)
    assert pg.all_reduce(value) is value
    assert pg.all_reduce(2.5, "sum") == 2.5
    with pytest.raises(ParallelismValueError, match="'average'; known: mean, sum, min, max"):
        pg.all_reduce(value, op="average")


@pytest.mark.promise(5)
@on_ranks(2)
def test_broadcast_and_agreement_reach_every_rank() -> None:
    rank = dist.get_rank()
    mine = {"a": [1, 2]} if rank == 1 else None
    with pytest.raises(ParallelismValueError, match="no rank 2 in a world of 2"):
        pg.broadcast(mine, src=2)
    assert pg.broadcast(mine, src=1) == {"a": [1, 2]}
    assert pg.broadcast(rank) == 0
    pg.barrier()
    assert [pg.all_ranks(flag) for flag in (True, rank == 0, False)] == [True, False, False]
    assert [pg.any_rank(flag) for flag in (True, rank == 0, False)] == [True, True, False]


@pytest.mark.promise(5)
def test_nothing_happens_without_a_group() -> None:
    settings = {"a": [1, 2]}
    assert pg.broadcast(settings) is settings
    for flag in (True, False):
        assert pg.all_ranks(flag) is flag
        assert pg.any_rank(flag) is flag
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


@pytest.mark.promise(6)
@on_ranks(2)
def test_gloo_works_on_the_cpu_whatever_the_machine_has() -> None:
    for group in (None, dist.new_group([0, 1])):
        assert pg.device_of_group(group) == torch.device("cpu")


@pytest.mark.promise(7)
@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.parametrize("missing", [None, *LAUNCHER])
def test_half_an_environment_is_not_taken_for_one_process(
    monkeypatch: pytest.MonkeyPatch, missing: str | None, size: str
) -> None:
    for name, value in (LAUNCHER | {"WORLD_SIZE": size}).items():
        if name != missing:
            monkeypatch.setenv(name, value)
    assert pg.is_distributed() is (missing is None)
    if size == "2" and missing not in {None, "WORLD_SIZE"}:
        with pytest.raises(ParallelismRuntimeError, match=f"WORLD_SIZE is 2, .* not set: {missing}"):
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


def from_environment() -> None:
    rank = int(os.environ["RANK"])
    assert pg.is_distributed()
    assert pg.world_and_rank() == (1, 0)
    pg.init(device="cpu")
    assert pg.world_and_rank() == (2, rank)
    assert pg.local_rank() == rank
    assert pg.all_reduce(one_and_three(), "sum") == 4.0


@pytest.mark.promise(7)
def test_init_follows_the_launcher(world2: World) -> None:
    world2(from_environment, setup="environment")


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
    with pytest.raises(ParallelismValueError, match="'cuda' was asked for"):
        pg.init(device="cuda")
    assert not dist.is_initialized()


@pytest.mark.promise(7)
@on_ranks(2)
def test_ranks_that_share_a_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    device, uuids = torch.device("cuda", 0), [f"GPU-{dist.get_rank()}", "GPU-0"]
    own, shared = (
        mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(uuid=uuid))
        for uuid in uuids
    )
    with own:
        check_own_gpu(device)
    with shared, fails_alike(ParallelismValueError, "Ranks 0 and 1 would share one GPU", "device='cpu'"):
        check_own_gpu(device)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with shared:
        check_own_gpu(device)


def sums_over_equal_meshes() -> None:
    for extra_groups in (0, 3, 1):
        pg.init(device="cpu")
        for _ in range(extra_groups):
            dist.new_group([0])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert distribute_tensor(torch.arange(4.0), mesh["b"], [Shard(0)]).sum().full_tensor() == 6
        pg.destroy()


@pytest.mark.promise(7)
def test_meshes_of_a_destroyed_group_are_forgotten(world4: World) -> None:
    """DTensor caches meshes by equality; an equal mesh over new groups must not meet an old one."""
    world4(sums_over_equal_meshes, setup="environment")


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
    with reserved_port() as port, mock.patch.object(dist, "init_process_group") as called:
        if launched:
            for name, value in {**LAUNCHER, "MASTER_PORT": str(port)}.items():
                monkeypatch.setenv(name, value)
        pg.init(device="cpu", timeout=timedelta(seconds=30))
    assert called.call_args.args == ("gloo",)
    assert called.call_args.kwargs["timeout"] == timedelta(seconds=30)
    store = called.call_args.kwargs["store"]
    assert type(store) is (dist.PrefixStore if launched else dist.HashStore)
    assert not launched or store.timeout == timedelta(seconds=30)


@pytest.mark.promise(9)
def test_a_timeout_in_seconds_is_refused() -> None:
    with pytest.raises(ParallelismTypeError, match="timeout must be a datetime.timedelta, not 40"):
        pg.init(device="cpu", timeout=40)  # type: ignore[arg-type]


LEAVING = """
from composer_dist.distributed import process_group
from composer_dist.distributed.ranks.agreement import Agreement

process_group.init()
if process_group.world_and_rank()[1] == 0:
    Agreement().reach("the work", None)
"""


@pytest.mark.slow
def test_a_rank_that_ends_before_it_has_agreed_on_anything_is_noticed() -> None:
    with reserved_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", LEAVING],
                env=os.environ | LAUNCHER | {"MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [process.communicate(timeout=100)[1] for process in ranks]
    assert "Rank 1 died at 'the work'" in errors[0]
