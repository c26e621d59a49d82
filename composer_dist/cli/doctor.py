"""`composer-dist doctor`: checks whether distributed training works on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from composer_dist.cli.announce import say
from composer_dist.cli.interrupt import CtrlC
from composer_dist.config.launched import launched_ranks

if TYPE_CHECKING:
    from composer_dist.cli.self_test import SelfTest


EXAMPLES = """
Examples:

  composer-dist doctor                     this machine, with two processes
  composer-dist doctor -n 8
  torchrun --nnodes 2 ... -m composer_dist doctor      between machines

Exit status: 0 if training works (there may be warnings), 1 if not.
"""
Verdict = Literal["ok", "warning", "fault"]
_COLORS = {"ok": "green", "warning": "yellow", "fault": "red"}
_PACKAGES = ("transformers", "peft", "safetensors", "torchao")
_SUPPORTED = ((2, 12), (2, 16))
"""Versions of torch: from the first, below the second."""
_FILES = 4096
"""Open files that a large job may need for shards, sockets and loader workers."""
_SHARED = 1 << 30
"""Bytes of /dev/shm below which loader workers and NCCL run out."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""


def doctor(
    processes: Annotated[
        int | None,
        typer.Option(
            "-n", "--processes", min=1, help="Processes in the self-test; 2 by default, 1 on one GPU."
        ),
    ] = None,
) -> None:
    """Check versions, devices, limits and networking, and run a communication self-test."""
    say("Testing this machine ...")
    with CtrlC(command="doctor") as ctrl_c:
        from composer_dist.distributed.ranks import process_group
        from composer_dist.distributed.ranks.launcher_variables import torchrun_variables

        os.environ.update(torchrun_variables(os.environ))
        findings = list(survey())
        ctrl_c.at_once = False  # the processes of the self-test end with it
        findings += talk(processes or _two_at_most())
    bad = any(finding.verdict == "fault" for finding in findings)
    if process_group.is_distributed():
        bad = process_group.any_rank(bad)
    if process_group.world_and_rank()[1] == 0:
        show(findings)
    process_group.destroy()
    if bad:
        raise typer.Exit(1)


def survey() -> Iterator[Finding]:
    """The checks that start no other process."""
    import torch

    for check in (_python, _torch, _packages, _devices, _backends, _shared_memory, _open_files, _host_name):
        yield check()
    said = os.environ.get("OMP_NUM_THREADS")
    yield Finding(
        "threads", f"OMP_NUM_THREADS={said}" if said else f"{torch.get_num_threads()} in one process"
    )
    yield from _variables()


def talk(processes: int) -> list[Finding]:
    """The self-test, in the launcher's processes if there is a launcher, else in new ones."""
    from composer_dist.distributed import launch
    from composer_dist.distributed.ranks import process_group

    try:
        if process_group.is_distributed():
            return described(_self_test())
        return described(launch(_self_test, processes, "spawn"))
    except Exception as error:  # any error is a finding
        return [Finding("self-test", f"{type(error).__name__}: {error}", "fault", "Fix this first.")]


def described(result: SelfTest) -> list[Finding]:
    """The findings of the self-test."""
    world, hosts = len(result.hosts), len(set(result.hosts))
    where = f"{world} rank{'s' * (world > 1)} on {hosts} host{'s' * (hosts > 1)}, {result.backend}"
    sums = Finding("self-test", f"{where}: sums are correct")
    if not result.right:
        remedy = "The backend computes wrong results: try another interface or version."
        sums = Finding("self-test", f"{where}: a sum over all ranks is wrong", "fault", remedy)
    findings = [sums]
    if world > 1:
        rates = {
            (source, target): rate
            for source, row in enumerate(result.pairs)
            for target, rate in enumerate(row)
            if source != target
        }
        (source, target), slowest = min(rates.items(), key=lambda item: item[1])
        fastest, lags = max(rates.values()), slowest < max(rates.values()) / 4
        text = f"{_speed(slowest)} to {_speed(fastest)} between pairs, all-reduce {_speed(result.all_reduce)}"
        remedy = f"Rank {source} to rank {target} is slow; check its network interface."
        findings.append(Finding("bandwidth", text, "warning" if lags else "ok", remedy if lags else ""))
        first = result.hosts[0]
        near = all(able for able, host in zip(result.memory, result.hosts, strict=True) if host == first)
        text = "ranks on one host read each other's memory" if near else "weights go through sockets"
        findings.append(Finding("peer memory", text))
    return findings


def show(findings: list[Finding]) -> None:
    """Prints the findings and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        mark = f"[{_COLORS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(mark, finding.what, finding.found + (f"\n{finding.remedy}" if finding.remedy else ""))
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if has_width else 110)
    console.print(table)
    counts = {kind: sum(finding.verdict == kind for finding in findings) for kind in ("fault", "warning")}
    if counts["fault"]:
        console.print(f"[red]{_count(counts['fault'], 'fault')}: training will not work here.[/]")
    elif counts["warning"]:
        console.print(f"[yellow]Training works here; {_count(counts['warning'], 'warning')}.[/]")
    else:
        console.print("[green]Training works here.[/]")


def _two_at_most() -> int:
    """Two processes, or one where there is one accelerator."""
    import torch

    return min(torch.accelerator.device_count() or 2, 2)


def _self_test() -> SelfTest:
    from composer_dist.cli.self_test import self_test
    from composer_dist.distributed.ranks import process_group

    process_group.init(reuse=True)
    return self_test()


def _python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.release()}"
    if sys.platform == "linux":
        return Finding("python", found)
    return Finding("python", found, "warning", "Only Linux is tested; weights go through sockets elsewhere.")


def _torch() -> Finding:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if _SUPPORTED[0] <= version < _SUPPORTED[1]:
        return Finding("torch", torch.__version__)
    low, high = (".".join(map(str, bound)) for bound in _SUPPORTED)
    remedy = f"Install torch >= {low}, < {high}."
    return Finding("torch", torch.__version__, "fault", remedy)


def _packages() -> Finding:
    found = []
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return Finding("packages", ", ".join(found) or "none of the optional ones")


def _devices() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = f"{cores} CPU core{'s' * (cores != 1)}"
    if not torch.accelerator.is_available():
        if torch.version.cuda is not None:
            remedy = "torch is built for CUDA but sees no device: check nvidia-smi and the driver."
            return Finding("devices", cpu, "warning", remedy)
        return Finding("devices", cpu)
    kind = torch.accelerator.current_accelerator()
    return Finding("devices", f"{torch.accelerator.device_count()} x {kind}, {cpu}")


def _backends() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("backends", "none", "fault", "This build of torch has no torch.distributed.")
    have = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    if torch.cuda.is_available() and "nccl" not in have:
        return Finding("backends", ", ".join(have), "fault", "Without NCCL the GPUs cannot communicate.")
    return Finding("backends", ", ".join(have))


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", "does not exist")
    size = shutil.disk_usage("/dev/shm").total
    if size >= _SHARED:
        return Finding("/dev/shm", f"{size / 2**30:.1f} GiB")
    remedy = "Loader workers and NCCL need more: docker run --shm-size=8g, or an emptyDir with medium Memory."
    return Finding("/dev/shm", f"{size / 2**20:.0f} MiB", "warning", remedy)


def _open_files() -> Finding:
    try:
        import resource
    except ImportError:  # Windows
        return Finding("open files", "no known limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return Finding("open files", f"up to {soft}")
    remedy = f"Raise it: ulimit -n {min(hard, 65536) if hard > 0 else 65536}."
    return Finding("open files", f"up to {soft}", "warning", remedy)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        local = "; with several hosts set GLOO_SOCKET_IFNAME (composer-dist train does)"
        return Finding(
            "host name", f"{name!r} resolves to {address}{local if address.startswith('127.') else ''}"
        )
    except OSError:
        remedy = "Gloo needs one: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME."
        return Finding("host name", f"{name!r} has no address", "warning", remedy)


def _variables() -> Iterator[Finding]:
    """Environment variables that are known to cause trouble."""
    interfaces = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        known = any(name.startswith(prefix) for prefix in value.split(",") for name in interfaces)
        if value and value[0] not in "^=" and not known:
            found = f"{variable}={value}, but this host has no such interface"
            remedy = f"Its interfaces: {', '.join(sorted(interfaces))}."
            yield Finding("interface", found, "fault", remedy)
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield Finding(
            "CUDA_LAUNCH_BLOCKING", "set", "warning", "Every kernel waits for the previous one: unset it."
        )
    if launched_ranks() > 1 and not os.environ.get("MASTER_ADDR"):
        yield Finding("launcher", "WORLD_SIZE is set but MASTER_ADDR is not", "fault", "Start with torchrun.")


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
