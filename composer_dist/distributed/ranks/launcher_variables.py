"""This process's rank according to Slurm, MPI or Kubernetes, in torchrun's variables."""

import re
from collections.abc import Mapping

from composer_dist.config.launched import launched_ranks
from composer_dist.errors import ParallelismRuntimeError

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""Those of torchrun's variables without which a process group cannot be made."""
PORT = 29400
"""The default MASTER_PORT; Slurm's job number is added, so that two jobs may share a host."""
_SPECIAL_STEPS = 0xFFFFFFF0
"""From here on Slurm numbers its own steps, such as the shells of sbatch and salloc: one process each."""
_MPI = {
    "Open MPI": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MVAPICH": [f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH, Intel MPI": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "Cray": ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"],
}
"""The variables for rank, world size, local rank and local world size. The last two may be unset."""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of torchrun's variables that are missing, from the variables of another launcher.

    Slurm's are used in processes that `srun` has started; the shells of `sbatch` and `salloc` have some of
    them too, but are single processes. In indexed jobs of Kubernetes, the job must set `WORLD_SIZE` and
    `MASTER_ADDR`.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        # A pod of Kubernetes' PyTorch operator is one process, and has all variables but the local rank.
        pod = "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ
        return {"LOCAL_RANK": "0"} if pod else {}
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_ID") or _SPECIAL_STEPS) < _SPECIAL_STEPS:
        return _slurm(environ)
    for names in sorted(_MPI.values(), key=lambda names: -sum(name in environ for name in names)):
        if names[0] in environ and names[1] in environ:
            return _mpi(environ, *names)
    if "JOB_COMPLETION_INDEX" in environ and launched_ranks(environ) > 1:
        return _indexed_job(environ)
    return {}


def check_alone(environ: Mapping[str, str]) -> None:
    """For a process without torchrun's variables: raise unless it is meant to train alone.

    Raises:
        ParallelismRuntimeError: a launcher has started it as one of several ranks, so each would be a world
            of one, and all would train the same.
    """
    if (size := launched_ranks(environ)) > 1:
        missing = [name for name in VARIABLES if not environ.get(name)]
        raise ParallelismRuntimeError(
            f"WORLD_SIZE is {size}, but these variables are not set: {', '.join(missing)}. Start with "
            "torchrun, set them, or unset WORLD_SIZE for one process."
        )
    if "RANK" in (found := torchrun_variables(environ)):
        raise ParallelismRuntimeError(
            f"Slurm or MPI has started this process as rank {found['RANK']} of {found['WORLD_SIZE']}, but "
            "torchrun's variables are not set, so each process would train alone. Start one torchrun per "
            "host, or use `srun composer-dist train`, or set these variables in each process: "
            f"{' '.join(f'{name}={value}' for name, value in found.items())}. If each process is meant to "
            "train alone, set RANK=0 WORLD_SIZE=1."
        )


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


def _mpi(
    environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str
) -> dict[str, str]:
    world, local = environ[size], environ.get(local_size, "")
    address = environ.get("MASTER_ADDR") or ("localhost" if local == world else "")
    if int(world) == 1:
        return {}
    if not address:
        raise ParallelismRuntimeError(
            f"MPI has started {world} processes, on several hosts as far as {local_size} shows "
            f"({local or 'not set'}); set MASTER_ADDR to rank 0's host (mpirun -x MASTER_ADDR=..., "
            "mpiexec -genv MASTER_ADDR ...)."
        )
    found = {
        "RANK": environ[rank],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environ.get(local_rank, ""),
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT", str(PORT)),
    }
    return {name: value for name, value in found.items() if value}


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
