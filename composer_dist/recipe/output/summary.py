"""The result of a run: how long it trained, its losses, and where everything is."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer_dist.recipe.first_look.places import EXPORTS
from composer_dist.trainer import Callback, Logger, State


class RunSummary(Callback):
    """Follows the losses of a run, without waiting for the device."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._first = 0
        self._lowest: torch.Tensor | None = None
        self._evaluations: dict[str, tuple[float, int]] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts the clock."""
        self._began, self._first = time.monotonic(), state.timestamp.batch

    def batch_end(self, state: State, logger: Logger) -> None:
        """Keeps the lowest loss, on the device."""
        if state.loss is not None:
            loss = state.loss.detach()
            self._lowest = loss if self._lowest is None else torch.minimum(self._lowest.to(loss), loss)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Keeps the lowest loss, and after which batch it was."""
        name = f"loss/{state.dataloader_label}/total"
        if name in state.metric_values:
            loss = float(state.metric_values[name])
            best = self._evaluations.get(name)
            if best is None or loss < best[0]:
                self._evaluations[name] = loss, state.timestamp.batch

    def state_dict(self) -> dict[str, Any]:
        """The lowest losses so far."""
        lowest = None if self._lowest is None else float(self._lowest)
        return {"lowest": lowest, "evaluations": dict(self._evaluations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with what `state_dict` returned."""
        self._lowest = None if state["lowest"] is None else torch.tensor(state["lowest"])
        self._evaluations = dict(state["evaluations"])

    def text(self, state: State, out: Path, exported: Path | None) -> str:
        """The summary of the run in the folder `out`, which has written its model to `exported`."""
        lines = []
        if self._began is not None:
            seconds = round(time.monotonic() - self._began)
            clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            count = state.timestamp.batch - self._first
            lines.append(f"Trained {count} batch{'' if count == 1 else 'es'} in {clock}.")
        if self._lowest is not None and state.loss is not None:
            last = float(state.metric_values.get("loss/train/total", state.loss))
            lines.append(f"Training loss: {last:.4f} at the end, {float(self._lowest):.4f} at best.")
        for name, (loss, batch) in self._evaluations.items():
            measured = name in state.metric_values  # not if the run had ended already
            at_end = f"{float(state.metric_values[name]):.4f} at the end, " if measured else ""
            lines.append(f"{name}: {at_end}{loss:.4f} at best (after batch {batch}).")
        there = ", ".join(sorted(_listed(one, exported) for one in _entries(out)))
        return "\n".join([*lines, f"Everything is in {out}: {there}."])


def _listed(one: Path, exported: Path | None) -> str:
    older = one.name in EXPORTS and one != exported
    return f"{one.name}{os.sep * one.is_dir()}{' (exported by an earlier run)' * older}"


def _entries(out: Path) -> list[Path]:
    """What is of this run, without the numbered files of earlier ones."""
    files = out.iterdir() if out.is_dir() else ()
    return [one for one in files if not re.search(r"^\.|\.\d+\.\w+$", one.name)]
