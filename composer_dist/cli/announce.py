"""Prints what a command is about to do, before anything heavy is imported."""

import os
import sys
from collections.abc import Mapping
from glob import escape, glob
from importlib import metadata
from pathlib import Path
from typing import Any

from composer_dist.config.launched import is_rank_zero, launched_ranks
from composer_dist.recipe.source import override, read_document


def announcement(config: Path, overrides: list[str], processes: int | None) -> str:
    """Where the run writes, with how many ranks, on what, for how long, and where it starts.

    Empty if the configuration cannot be read: the checks that follow report what is wrong.
    """
    try:
        document, wrong = read_document(config.read_text("utf-8"), str(config))
    except (OSError, UnicodeDecodeError):
        return ""
    if wrong or override(document, overrides):
        return ""
    values, trainer = document.values, document.values.get("trainer")
    if not isinstance(trainer, Mapping):
        return ""
    duration = trainer.get("max_duration")
    out = os.path.expanduser(str(values.get("out") or f"runs/{config.stem}"))
    ranks = processes or launched_ranks()
    rows = {
        "out": out,
        "ranks": f"{ranks}" if ranks == 1 or processes else f"{ranks}, from the launcher",
        "device": trainer.get("device") or _device(),
        "steps": f"until {duration}ep" if type(duration) is int else f"until {duration}",
        "start": _start(values, out),
    }
    lines = [f"composer-dist train {config}", *(f"  {name:<7} {value}" for name, value in rows.items())]
    return "\n".join(lines)


def say(text: str) -> None:
    """Print on a terminal what is being done, where seconds pass before there is a result."""
    if sys.stderr.isatty() and is_rank_zero():
        print(text, file=sys.stderr, flush=True)


def _start(values: Mapping[str, Any], out: str) -> str:
    """The checkpoint that the run resumes from, or that it is a new one."""
    resume, saves = values.get("resume", True), values.get("checkpoints", {})
    folder = (saves.get("folder") if isinstance(saves, Mapping) else None) or f"{out}/checkpoints"
    given = resume.get("load_path") if isinstance(resume, Mapping) else None
    if saves is not None and resume is not False and (newest := _newest(str(folder))):
        return f"resume from {newest}"
    return f"from {given}" if given else "a new run"


def _newest(folder: str) -> str | None:
    """The newest checkpoint in a folder, according to its link `latest`."""
    if "://" in folder:
        return f"the newest checkpoint in {folder}, if there is one"
    link = Path(folder, "latest")
    if os.path.islink(link):  # unlike Path's, also of a name that is too long
        return str(link.parent / os.readlink(link))
    if os.path.isfile(link) and link.stat().st_size < 1000:
        return str(link.parent / link.read_text(errors="replace").strip())
    return f"the newest checkpoint in {folder}" if glob(f"{escape(folder)}/[!.]*") else None


def _device() -> str:
    """The kind of device that torch will choose, as far as that is known without importing it."""
    if sys.platform == "darwin":
        return "mps, or cpu"
    build = metadata.version("torch")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return "cpu" if build.endswith("+cpu") or hidden or not there else "cuda"
