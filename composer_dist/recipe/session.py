"""A run from its start to its end."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch

from composer_dist.checkpoint import export_pretrained, full_model_state
from composer_dist.distributed import process_group
from composer_dist.models import ComposerClassifier
from composer_dist.recipe.build import Session, build
from composer_dist.recipe.read import Configuration
from composer_dist.recipe.schema import HubModel, ModuleModel
from composer_dist.trainer import EMA, Time


def run(configuration: Configuration) -> None:
    """Trains, evaluates and exports.

    Raises:
        ParallelismError: on every rank, whatever went wrong on any.
    """
    session = build(configuration)
    try:
        _say(f"{session.trainer.preparation or ''}")
        if not _is_finished(session):
            _say(_beginning(session))
            session.trainer.fit()
        finish(session)
    finally:
        session.trainer.close()
    process_group.destroy()


def finish(session: Session) -> None:
    """Writes the trained model, or its adapter, for others to load."""
    if not session.run.export:
        return
    averages = [one for one in session.trainer.callbacks if isinstance(one, EMA)]
    with averages[0].swapped_in(session.trainer.state) if averages else nullcontext():
        if isinstance(session.run.model, ModuleModel):
            _write_module(session)
        else:
            _write_hub_model(session, session.run.model)
    if averages:
        _say("It has the EMA's averages as its weights.")


def _write_hub_model(session: Session, model: HubModel) -> None:
    """A directory for transformers or peft; a collective."""
    adapter = model.adapter is not None
    merged = adapter and session.run.export == "merged"
    path = session.run.out / ("adapter" if adapter and not merged else "model")
    export_pretrained(session.model, path, merge_adapters=merged)
    _say(f"Written to {path}: {'peft' if adapter and not merged else 'transformers'} loads it.")


def _write_module(session: Session) -> None:
    """The state of a module of the user's own, as one file for `load_state_dict`; a collective."""
    model = session.model
    inner = model.module if isinstance(model, ComposerClassifier) else model
    state = full_model_state(inner)
    path = session.run.out / "model.pt"
    with process_group.together("writing the model"):
        if process_group.world_and_rank()[1] == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
    _say(f"Written to {path}: torch.load and load_state_dict read it.")


def _is_finished(session: Session) -> bool:
    """Whether the checkpoint that was loaded is of the run's end."""
    duration = session.run.trainer["max_duration"]
    if not session.trainer.state.timestamp.reached(Time.of(duration)):
        return False
    _say(
        f"The run in {session.run.out} has reached trainer.max_duration={duration} already. To go on, "
        "give it more; to begin anew, choose another out."
    )
    return True


def _beginning(session: Session) -> str:
    """Where an earlier run is gone on with."""
    trainer = session.trainer
    if trainer.resumed_from is None or not trainer.state.timestamp.batch:
        return ""
    return f"Goes on from {trainer.resumed_from}, after batch {trainer.state.timestamp.batch}."


def _say(text: str) -> None:
    """Prints once, not on every rank."""
    if process_group.world_and_rank()[1] == 0 and text:
        print(text, file=sys.stderr, flush=True)
