"""Ranks as Slurm, MPI and Kubernetes tell them."""

import os

import pytest
import torch.distributed as dist
from torch import nn

from composer_dist.distributed import launch, parallelize_model
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.launcher_variables import check_alone, first_host, torchrun_variables
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.trainer import Trainer
from tests.kit.training import tagger

pytestmark = pytest.mark.promise(105)

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


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2"}.items()}
MVAPICH |= {f"MV2_COMM_WORLD_LOCAL_{name}": value for name, value in {"RANK": "1", "SIZE": "2"}.items()}


@pytest.mark.parametrize("mpi", [HYDRA, CRAY, MVAPICH, HYDRA | MVAPICH])
def test_other_mpi(mpi: dict[str, str]) -> None:
    assert torchrun_variables(mpi) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29400",
    }


def test_an_mpi_that_does_not_tell_local_ranks_needs_an_address() -> None:
    bare = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    with pytest.raises(ParallelismRuntimeError, match=r"MPI_LOCALNRANKS shows \(not set\); set MASTER_ADDR"):
        torchrun_variables(bare)
    found = torchrun_variables(bare | {"MASTER_ADDR": "h"})
    assert found == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29400"}
    assert torchrun_variables({"PMI_RANK": "0", "PMI_SIZE": "1"}) == {}


# srun starts the shell of salloc with its own step number and leaves the job's number of tasks.
INTERACTIVE = SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}
SBATCH = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NODELIST": "gpu[003-004]"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        INTERACTIVE,
        SBATCH,
        {name: value for name, value in SBATCH.items() if name != "SLURM_PROCID"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        SLURM | {"RANK": "0", "WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
    ],
)
def test_one_process_may_train_alone(environ: dict[str, str]) -> None:
    check_alone(environ)


@pytest.mark.parametrize(
    ("environ", "rank"), [(SLURM, "5 of 8"), (HYDRA, "1 of 2"), (MVAPICH, "1 of 2"), (CRAY, "1 of 2")]
)
def test_one_of_several_ranks_may_not_train_alone(
    environ: dict[str, str], rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rf"started this process as rank {rank}.*would train alone.*set RANK=0 WORLD_SIZE=1"
    for name in os.environ.keys() & {"RANK", "WORLD_SIZE"}:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for start in (
        process_group.init,
        lambda: parallelize_model(nn.Linear(1, 1), "fsdp"),
        lambda: launch(int, 2),
        lambda: Trainer(model=tagger(), max_duration="1ba"),
    ):
        with pytest.raises(ParallelismRuntimeError, match=expected):
            start()
        assert not dist.is_initialized()


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
