"""A run from its start to its end."""

from __future__ import annotations

import sys

from composer_dist.checkpoint import export_pretrained
from composer_dist.distributed import process_group
from composer_dist.run.build import Session, build
from composer_dist.run.read import Configuration
from composer_dist.run.schema import HubModel


def run(configuration: Configuration) -> None:
    """Trains, evaluates and exports.

    Raises:
        ParallelismError: on every rank, whatever went wrong on any.
    """
    session = build(configuration)
    try:
        _say(f"{session.trainer.preparation or ''}")
        session.trainer.fit()
        finish(session)
    finally:
        session.trainer.close()
    process_group.destroy()


def finish(session: Session) -> None:
    """Writes the trained model, or its adapter, for others to load."""
    if not session.run.export or not isinstance(session.run.model, HubModel):
        return
    path = session.run.out / ("model" if session.run.model.adapter is None else "adapter")
    export_pretrained(session.model, path)
    _say(f"Written to {path}: {'peft' if session.run.model.adapter else 'transformers'} loads it.")


def _say(text: str) -> None:
    """Prints once, not on every rank."""
    if process_group.world_and_rank()[1] == 0 and text:
        print(text, file=sys.stderr, flush=True)
