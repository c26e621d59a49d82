"""The worker pool: values, tracebacks, and recovery from workers that die or hang."""

import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.kit import world
from tests.kit.world import World


def rank_times(factor: int, offset: int = 0) -> int:
    return dist.get_rank() * factor + offset


def summed() -> float:
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return value.item()


def failure_of(run: World, fn: Any, *args: Any, **options: Any) -> world.WorkerError:
    """The failure of a run, after which the world works again."""
    with pytest.raises(world.WorkerError) as failure:
        run(fn, *args, **options)
    assert run(summed) == [3.0, 3.0]
    return failure.value


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_back_by_rank(size: int) -> None:
    assert world.run(rank_times, size, 10, offset=1) == [10 * rank + 1 for rank in range(size)]


def test_collectives_work_on_two_and_four_ranks(world2: World, world4: World) -> None:
    assert world2(summed) == [3.0, 3.0]
    assert world4(summed) == [10.0] * 4
    assert world2(summed) == [3.0, 3.0]


def test_workers_are_kept_between_runs(world2: World, world4: World) -> None:
    first = world2(os.getpid)
    assert world4(os.getpid)[:2] == first
    assert world2(os.getpid) == first
    assert os.getpid() not in first


def tensor_and_text(tensor: torch.Tensor, text: str) -> dict[str, Any]:
    return {"tensor": tensor + dist.get_rank(), "text": text, "dtype": torch.bfloat16}


def test_arguments_and_results_travel_by_value(world2: World) -> None:
    tensor = torch.arange(3.0)
    results = world2(tensor_and_text, tensor, text="a")
    for rank, result in enumerate(results):
        assert torch.equal(result["tensor"], tensor + rank)
        assert (result["text"], result["dtype"]) == ("a", torch.bfloat16)
    assert torch.equal(tensor, torch.arange(3.0))


def raises_on(bad: int) -> str:
    if dist.get_rank() == bad:
        raise ValueError(f"no luck on rank {bad}")
    return "fine"


def test_traceback_of_the_failing_rank_is_reported(world2: World) -> None:
    failure = failure_of(world2, raises_on, 1)
    assert (list(failure.errors), failure.results) == ([1], {0: "fine"})
    for text in ("--- rank 1", "ValueError: no luck on rank 1", "in raises_on"):
        assert text in str(failure)


def differs_on(bad: int) -> None:
    held = {"rank": dist.get_rank(), "step": 3}
    assert held == {"rank": 1 - bad, "step": 3}


def test_a_failed_assertion_on_a_rank_shows_its_values(world2: World) -> None:
    ((rank, text),) = failure_of(world2, differs_on, 1).errors.items()
    assert rank == 1
    assert "assert {'rank': 1, 'step': 3} == {'rank': 0, 'step': 3}" in text
    assert "{'rank': 1} != {'rank': 0}" in text


def raises_while_the_others_wait() -> None:
    dist.barrier()  # until then, the others may still be connecting
    if dist.get_rank() == 0:
        raise KeyError("left the others alone")
    dist.barrier()


def test_a_peer_of_a_failing_rank_does_not_wait_for_it(world2: World) -> None:
    errors = failure_of(world2, raises_while_the_others_wait).errors
    assert list(errors) == [0, 1], "the cause comes first"
    assert "KeyError: 'left the others alone'" in errors[0]
    assert "in raises_while_the_others_wait" in errors[1]
    assert "barrier" in errors[1]


def exits(code: int) -> None:
    if dist.get_rank() == 1:
        print("on my way out", flush=True)
        os._exit(code)
    dist.barrier()


def test_a_dying_worker_is_reported_and_replaced(world2: World) -> None:
    before = world2(os.getpid)
    errors = failure_of(world2, exits, 7).errors
    assert "died with exit code 7" in errors[1]
    assert "on my way out" in errors[1]
    assert not set(before) & set(world2(os.getpid))


def hangs() -> int:
    if dist.get_rank() == 0:
        threading.Event().wait()
    return dist.get_rank()


def test_a_hanging_worker_is_ended_with_its_stack_and_replaced(world2: World) -> None:
    before = world2(os.getpid)
    failure = failure_of(world2, hangs, timeout=0.5)
    assert failure.results == {1: 1}
    assert "did not return in 0.5 s" in failure.errors[0]
    assert "in hangs" in failure.errors[0]
    assert not set(before) & set(world2(os.getpid))


def returns_unpicklable() -> object:
    return lambda: None


def test_what_cannot_be_pickled_is_an_error(world2: World) -> None:
    with pytest.raises((AttributeError, TypeError), match="local object|pickle"):
        world2(lambda: None)
    assert "pickle" in str(failure_of(world2, returns_unpicklable))


def spoil() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    draws()


def draws() -> tuple[float, float, float]:
    return torch.rand(1, device="cpu").item(), random.random(), float(numpy.random.rand())


def state() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_default_device().type,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        os.environ.get("LEFT_BEHIND"),
        os.environ["HF_HUB_OFFLINE"],
        os.getcwd(),
    )


def test_every_function_starts_from_the_same_state(world2: World) -> None:
    state_before, drawn_before = world2(state), world2(draws)
    world2(spoil)
    assert world2(state) == state_before
    assert world2(draws) == drawn_before
    assert drawn_before[0] == drawn_before[1]
    assert state_before[0][:6] == (torch.float32, True, "cpu", False, 1, None)


def warns() -> None:
    warnings.warn("worker", UserWarning, stacklevel=1)


def test_a_warning_in_a_worker_is_an_error(world2: World) -> None:
    assert "UserWarning: worker" in str(failure_of(world2, warns))


@pytest.mark.filterwarnings("ignore:worker:UserWarning")
def test_a_filter_of_the_test_counts_in_the_workers(world2: World) -> None:
    world2(warns)


def prints() -> None:
    print("hello\nfrom here")


def test_output_is_passed_on_with_its_rank(world2: World, capsys: pytest.CaptureFixture[str]) -> None:
    world2(prints)
    expected = "".join(f"[rank {rank}] hello\n[rank {rank}] from here\n" for rank in range(2))
    assert capsys.readouterr().out == expected


def group_and_environment() -> tuple[bool, str | None]:
    return dist.is_initialized(), os.environ.get("RANK")


def test_setup_gives_a_group_an_environment_or_nothing(world2: World) -> None:
    assert world2(group_and_environment) == [(True, None)] * 2
    assert world2(group_and_environment, setup="nothing") == [(False, None)] * 2
    assert world2(group_and_environment, setup="environment") == [(False, "0"), (False, "1")]


def initializes_from_the_environment() -> float:
    dist.init_process_group("gloo")
    return summed()


def test_environment_serves_a_process_group_each_time(world2: World) -> None:
    for _ in range(2):
        assert world2(initializes_from_the_environment, setup="environment") == [3.0, 3.0]


def threads_of_groups() -> list[int]:
    groups = (dist.group.WORLD, dist.new_group([0, 1]))
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


@pytest.mark.promise(105)
def test_gloo_groups_have_one_thread(world2: World) -> None:
    """Two could end a worker: see `one_gloo_thread`."""
    assert world2(threads_of_groups) == [[1, 1]] * 2


def sums_over_a_mesh(extra_groups: int) -> float:
    for _ in range(extra_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    value = distribute_tensor(torch.arange(4.0), mesh["b"], [Shard(0)])
    return value.sum().full_tensor().item()


def test_meshes_of_earlier_runs_are_forgotten(world4: World) -> None:
    """Equal meshes over other groups: DTensor's caches must not bring back the old ones."""
    for extra_groups in (0, 1, 3, 0):
        assert world4(sums_over_a_mesh, extra_groups) == [6.0] * 4


def module_names() -> bool:
    return "torch" in sys.modules and __name__ == "tests.test_world"


def test_functions_are_imported_under_their_own_name(world2: World) -> None:
    assert world2(module_names) == [True, True]


SLEEPERS = """
import os, sys, time
from pathlib import Path
from tests.kit.forked import as_script, outcomes

def body(folder):
    Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} ")
    time.sleep(600)

as_script(lambda: list(outcomes([("", body, 3)], lambda folder: [], 600.0)))
"""


@pytest.mark.slow
def test_forked_ranks_end_with_the_process_that_forked_them(tmp_path: Path) -> None:
    main = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS, tmp_path], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    files = [tmp_path / str(rank) for rank in range(3)]
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(one.exists() and one.read_text().endswith(" ") for one in files):
        time.sleep(0.05)
    ranks = [psutil.Process(int(one.read_text())) for one in files]
    main.kill()
    main.wait()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
