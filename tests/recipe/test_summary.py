"""The lines at the end of a run."""

import re
from pathlib import Path

import pytest

from composer_dist.recipe.output.summary import RunSummary
from tests.kit.training import fitted, loader

pytestmark = pytest.mark.promise(109)


def test_time_losses_and_where_everything_is(tmp_path: Path) -> None:
    for name in ("checkpoints", "model", "adapter"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", "metrics.1.jsonl", "configuration.12.yaml", ".lock"):
        (tmp_path / name).touch()
    summary = RunSummary()
    trainer, log = fitted(callbacks=summary, max_duration="2ep", eval_dataloader=loader())
    lines = summary.text(trainer.state, tmp_path, tmp_path / "model").splitlines()
    assert re.fullmatch(r"Trained 6 batches in 0:00:\d\d\.", lines[0])
    training = [float(value) for _, value in log.data["loss/train/total"]]
    assert lines[1] == f"Training loss: {training[-1]:.4f} at the end, {min(training):.4f} at best."
    held_out = [float(value) for _, value in log.data["loss/eval/total"]]
    assert lines[2].startswith(
        f"loss/eval/total: {held_out[-1]:.4f} at the end, {min(held_out):.4f} at best (after batch "
    )
    there = "adapter/ (exported by an earlier run), checkpoints/, metrics.jsonl, model/"
    assert lines[3] == f"Everything is in {tmp_path}: {there}."


def test_a_resumed_run_keeps_the_best_losses_of_before(tmp_path: Path) -> None:
    before, after = RunSummary(), RunSummary()
    fitted(callbacks=before, max_duration="2ep", eval_dataloader=loader())
    best = before.state_dict()
    best["lowest"], best["evaluations"] = 0.25, {"loss/eval/total": (0.125, 3)}
    after.load_state_dict(best)
    trainer, _ = fitted(callbacks=after, max_duration="1ep", eval_dataloader=loader())
    text = after.text(trainer.state, tmp_path, None)
    assert "at the end, 0.2500 at best." in text
    assert "at the end, 0.1250 at best (after batch 3)." in text
    assert after.state_dict() == best
    trainer.state.metric_values.clear()  # a run that has ended, resumed
    assert "loss/eval/total: 0.1250 at best (after batch 3)." in after.text(trainer.state, tmp_path, None)
