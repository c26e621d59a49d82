"""Runs as functions, for the pool of workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_dist.run.build import Session, build
from composer_dist.run.read import read_configuration
from composer_dist.run.session import finish

PROMPT = torch.tensor([list(b"def main() -> None:\n    ")])


def start(file: Path, *overrides: str) -> Session:
    """A run that is ready, and keeps its losses in memory."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return build(read_configuration(file, ["loggers.in_memory={}", "trainer.progress_bar=false", *overrides]))


def logged(session: Session, name: str) -> list[float]:
    (memory,) = (one for one in session.trainer.logger.destinations if hasattr(one, "values"))
    values: list[float] = memory.values(name)
    return values


def losses_of(file: Path, *overrides: str) -> list[float]:
    """The losses of every step of a run."""
    session = start(file, *overrides)
    session.trainer.fit()
    return logged(session, "loss/train/total")


def trained_and_exported(file: Path, *overrides: str) -> tuple[list[float], Tensor, Tensor]:
    """The losses of a run that ends with its export, the logits at its start and at its end."""
    session = start(file, *overrides)
    model = session.model.eval()
    with torch.no_grad():
        before = model({"input_ids": PROMPT}).logits
    session.trainer.fit()
    finish(session)
    with torch.no_grad():
        after = model.eval()({"input_ids": PROMPT}).logits
    return logged(session, "loss/train/total"), before, after


def accuracy_of(file: Path, *overrides: str) -> tuple[list[float], float]:
    """The losses, and the last accuracy on what is held out."""
    session = start(file, *overrides)
    session.trainer.fit()
    return logged(session, "loss/train/total"), logged(session, "metrics/eval/MulticlassAccuracy")[-1]


def failing(file: Path, *overrides: str) -> Any:
    """The error of a run that cannot be built."""
    try:
        start(file, *overrides)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
