"""The lines at the end of a run."""

import re
from pathlib import Path

from composer_dist.recipe.output.summary import RunSummary
from tests.kit.training import fitted, loader


def test_time_losses_and_where_everything_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    summary = RunSummary()
    trainer, log = fitted(callbacks=summary, max_duration="2ep", eval_dataloader=loader())
    lines = summary.text(trainer.state, tmp_path).splitlines()
    assert re.fullmatch(r"Trained 6 batches in 0:00:\d\d\.", lines[0])
    training = [float(value) for _, value in log.data["loss/train/total"]]
    assert lines[1] == f"Loss of training: {training[-1]:.4f} at the end, {min(training):.4f} at best."
    held_out = [float(value) for _, value in log.data["loss/eval/total"]]
    assert lines[2].startswith(
        f"loss/eval/total: {held_out[-1]:.4f} at the end, {min(held_out):.4f} at best (after batch "
    )
    assert lines[3] == f"Everything is in {tmp_path}: checkpoints/, metrics.jsonl."
