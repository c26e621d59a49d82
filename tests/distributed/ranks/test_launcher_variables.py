"""Ranks as Slurm, Open MPI and Kubernetes tell them."""

import pytest

from composer_dist.distributed.ranks.launcher_variables import first_host, torchrun_variables
from composer_dist.errors import ParallelismRuntimeError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_torchruns_own_variables_stay() -> None:
    assert torchrun_variables(SLURM | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) == {}
    assert torchrun_variables({}) == {}


def test_slurm_counts_for_what_srun_has_started() -> None:
    assert torchrun_variables(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "30111",
    }
    batch_shell = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert torchrun_variables(batch_shell) == {}
    assert torchrun_variables(SLURM | {"SLURM_NTASKS": "1"}) == {}
    assert torchrun_variables(SLURM | {"MASTER_ADDR": "h", "MASTER_PORT": "1"})["MASTER_ADDR"] == "h"
    uneven = torchrun_variables(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,2"})
    assert "LOCAL_WORLD_SIZE" not in uneven


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("gpu[003-006,9],login", "gpu003"),
        ("a1,a2", "a1"),
        ("rack[1,3]-node", "rack1-node"),
        ("gpu-1-[12]", "gpu-1-12"),
    ],
)
def test_the_first_host_of_slurms_notation(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_open_mpi() -> None:
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    found = torchrun_variables(mpi)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", "localhost")
    with pytest.raises(ParallelismRuntimeError, match="several hosts"):
        torchrun_variables(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_kubernetes() -> None:
    operator = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    assert torchrun_variables(operator) == {}
    assert torchrun_variables(operator | {"KUBERNETES_SERVICE_HOST": "h"}) == {"LOCAL_RANK": "0"}
    indexed = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}
    with pytest.raises(ParallelismRuntimeError, match="MASTER_ADDR"):
        torchrun_variables(indexed)
    found = torchrun_variables(indexed | {"MASTER_ADDR": "train-0.train"})
    assert found == {"RANK": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29400"}
    assert torchrun_variables({"JOB_COMPLETION_INDEX": "1"}) == {}
