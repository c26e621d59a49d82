"""A machine's CPUs, shared among the processes of a run. Launchers use this too, so it imports little."""

import os

import torch

from composer_dist.errors import ParallelismValueError


def threads_per_process(cpus: int, processes: int) -> int:
    """How many threads each of `processes` on one machine should use: its share, at least one."""
    if cpus < 1 or processes < 1:
        raise ParallelismValueError(
            f"CPUs and processes must be at least 1; got {cpus} CPUs, {processes} processes."
        )
    return max(1, cpus // processes)


def share_cpus(processes: int) -> int:
    """Limit this process and its children to their share of the CPUs, unless `OMP_NUM_THREADS` is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = threads_per_process(here or 1, processes)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return torch.get_num_threads()
