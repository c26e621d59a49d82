"""This process's rank according to Slurm, Open MPI or Kubernetes, in torchrun's variables."""

import re
from collections.abc import Mapping

from composer_dist.errors import ParallelismRuntimeError

PORT = 29400
"""The default MASTER_PORT; Slurm's job number is added, so that two jobs may share a host."""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of torchrun's variables that are missing, from the variables of another launcher.

    Slurm's are used in processes that `srun` has started; a batch script's shell has them too, but is a
    single process. In indexed jobs of Kubernetes, the job must set `WORLD_SIZE` and `MASTER_ADDR`.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        # A pod of Kubernetes' PyTorch operator is one process, and has all variables but the local rank.
        pod = "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ
        return {"LOCAL_RANK": "0"} if pod else {}
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    if "JOB_COMPLETION_INDEX" in environ and int(environ.get("WORLD_SIZE") or 1) > 1:
        return _indexed_job(environ)
    return {}


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: "gpu[003-006,9],login" is "gpu003"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ParallelismRuntimeError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no host.")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    size = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "localhost"
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or _port(environ.get("SLURM_JOB_ID", "0")),
    }
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    if (match := re.fullmatch(r"(\d+)(?:\(x\d+\))?", per_node)) is not None:  # as many on each host
        found["LOCAL_WORLD_SIZE"] = match[1]
    return found if int(size) > 1 else {}


def _open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    size = environ["OMPI_COMM_WORLD_SIZE"]
    local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", size)
    address = environ.get("MASTER_ADDR") or ("localhost" if local == size else "")
    if not address:
        raise ParallelismRuntimeError(
            "mpirun has started processes on several hosts; pass rank 0's host with -x MASTER_ADDR=..."
        )
    found = {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT", str(PORT)),
    }
    return found if int(size) > 1 else {}


def _indexed_job(environ: Mapping[str, str]) -> dict[str, str]:
    if not environ.get("MASTER_ADDR"):
        raise ParallelismRuntimeError(
            "This is a pod of an indexed Kubernetes job; set MASTER_ADDR to the first pod's name, such as "
            "train-0.train."
        )
    return {
        "RANK": environ["JOB_COMPLETION_INDEX"],
        "LOCAL_RANK": "0",
        "MASTER_PORT": environ.get("MASTER_PORT", str(PORT)),
    }


def _port(job: str) -> str:
    return str(PORT + int(job) % 1000 if job.isdigit() else PORT)
