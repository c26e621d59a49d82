"""The folder of a run: writable, used by one run at a time, with a record of how the run was started."""

import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from composer_dist.checkpoint.storage.lock import NAME as LOCK
from composer_dist.checkpoint.storage.lock import FolderLock
from composer_dist.distributed import process_group
from composer_dist.errors import ParallelismValueError
from composer_dist.files.index import check_inside
from composer_dist.recipe.first_look.places import check_places
from composer_dist.recipe.named import PLACES
from composer_dist.recipe.read import Configuration

CONFIGURATION, ENVIRONMENT = "configuration.yaml", "environment.json"
_WRITTEN = (CONFIGURATION, ENVIRONMENT, LOCK, PLACES["file"]["path"], f"{PLACES['file']['path']}.new")
_PACKAGES = ("composer_dist", "transformers", "peft", "safetensors", "datasets", "torchao")


@contextlib.contextmanager
def run_folder(configuration: Configuration) -> Iterator[None]:
    """Makes and locks the folder, and records the configuration and the environment in it; a collective.

    Raises:
        ParallelismValueError: the folder cannot be written, is in use, or a file in it is a link out of it.
    """
    out = configuration.run.out
    world, rank = process_group.world_and_rank()
    with contextlib.ExitStack() as stack:
        with process_group.together("the run's folder"):
            check_places(configuration.run)
            try:
                out.mkdir(parents=True, exist_ok=True)
                if rank == 0:
                    check_inside(out, _WRITTEN)
                    lock = FolderLock(out, f"out={out}", "another out")
                    lock.take()
                    stack.callback(lock.release)
                    _record(out, configuration, world)
            except OSError as error:
                raise ParallelismValueError(
                    f"out={out} cannot be written: {error.strerror}. Choose another out."
                ) from None
        yield


def _record(out: Path, configuration: Configuration, world: int) -> None:
    """Writes how the run is started; files of an earlier start that differ are kept under a number."""
    values = configuration.run.model_dump(mode="json")
    started: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "ranks": world,
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "git": _git(configuration.folder),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for name, text in (
        (CONFIGURATION, yaml.safe_dump(values, sort_keys=False, allow_unicode=True)),
        (ENVIRONMENT, json.dumps(started, indent=2) + "\n"),
    ):
        path, number = out / name, 1
        if path.exists() and path.read_bytes() != text.encode():
            while (earlier := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
                number += 1
            path.rename(earlier)
        path.write_bytes(text.encode())


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)
    yield "torch", torch.__version__  # with the build, which a wheel's name may lack


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit of the configuration's folder, and the files that differ from it; None without git."""
    found = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.splitlines())
    return {"commit": found[0][0], "changed": found[1]}
