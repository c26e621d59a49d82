"""Runs as functions, for the pool of workers."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_dist.checkpoint import full_model_state
from composer_dist.checkpoint.background import finish_pending
from composer_dist.cli.init import Preset
from composer_dist.recipe.build import Session, build
from composer_dist.recipe.read import read_configuration
from composer_dist.recipe.session import finish
from composer_dist.trainer import Callback, Logger, State

PROMPT = torch.tensor([list(b"def main() -> None:\n    ")])


def start(file: Path, *overrides: str) -> Session:
    """A run that is ready, and keeps its losses in memory."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return build(read_configuration(file, ["loggers.in_memory={}", "trainer.progress_bar=false", *overrides]))


def logged(session: Session) -> dict[str, list[float]]:
    """Everything that a run logged, by name."""
    (memory,) = (one for one in session.trainer.logger.destinations if hasattr(one, "values"))
    return {name: memory.values(name) for name in memory.data}


def trained(file: Path, *overrides: str) -> dict[str, Any]:
    """A run at its end: the batch it began with, its losses, its accuracies, and on rank 0 its weights."""
    session = start(file, *overrides)
    began = session.trainer.state.timestamp.batch
    session.trainer.fit()
    log = logged(session)
    found = {"began": began, "losses": log["loss/train/total"], "weights": full_model_state(session.model)}
    return found | {"accuracies": log.get("metrics/eval/MulticlassAccuracy")}


def logs_of(file: Path, *overrides: str) -> dict[str, list[float]]:
    """Everything that a whole run logged."""
    session = start(file, *overrides)
    session.trainer.fit()
    return logged(session)


def exported(file: Path, *overrides: str) -> None:
    """A run with its export."""
    session = start(file, *overrides)
    session.trainer.fit()
    finish(session)


def trained_and_exported(file: Path, *overrides: str) -> tuple[list[float], Tensor, Tensor]:
    """The losses of a run that ends with its exports, the logits at its start and at its end.

    An adapter is written by itself, and merged into a model.
    """
    session = start(file, *overrides)
    model = session.model.eval()
    with torch.no_grad():
        before = model({"input_ids": PROMPT}).logits
    session.trainer.fit()
    finish(session)
    finish(replace(session, run=session.run.model_copy(update={"export": "merged"})))
    with torch.no_grad():
        after = model.eval()({"input_ids": PROMPT}).logits
    return logged(session)["loss/train/total"], before, after


class KillAt(Callback):
    """Ends the process without a word, before the batch after `batch`, when no save is under way."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self._batch:
            finish_pending()
            os._exit(9)


class Deaf(Callback):
    """Hears no SIGINT after the first batch, and does not come back from there."""

    def __init__(self, sign: str) -> None:
        self._sign = Path(sign)

    def batch_end(self, state: State, logger: Logger) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._sign.with_suffix(f".{state.rank}").touch()
        while True:
            time.sleep(1)


EVERY = [preset.value for preset in Preset]
