"""What writing loggers have in common."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import MLflowLogger, TensorBoardLogger, WandBLogger
from composer_dist.trainer.clock import Timestamp
from composer_dist.trainer.loggers import writing


@pytest.mark.parametrize(
    ("make", "extra"),
    [(lambda: TensorBoardLogger("x"), "tensorboard"), (WandBLogger, "wandb"), (MLflowLogger, "mlflow")],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, make: Any, extra: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = rf"Logger needs {extra}: pip install 'composer_dist\[{extra}\]'"
    with pytest.raises(ParallelismValueError, match=text):
        make()


def test_values_of_all_kinds_come_in_their_order() -> None:
    one = {"b": 1, "a": torch.tensor(2), "c": torch.tensor([0.5], dtype=torch.bfloat16), "d": 2.5}
    two = {"a": torch.tensor(3), "t": torch.tensor(True)}
    at = [Timestamp(batch=1), Timestamp(batch=2)]
    read = writing.read([(at[0], one), (at[1], two)])
    assert read == [(at[0], {"b": 1.0, "a": 2.0, "c": 0.5, "d": 2.5}), (at[1], {"a": 3.0, "t": 1.0})]
    assert list(read[0][1]) == ["b", "a", "c", "d"]


@pytest.mark.slow
def test_nothing_heavy_is_imported_for_loggers_that_are_not_used() -> None:
    names = "wandb", "mlflow", "tensorboard", "torch.utils.tensorboard"
    code = (
        "import sys, composer_dist, composer_dist.trainer as t; t.Trainer; t.WandBLogger; t.MLflowLogger; "
        f"t.TensorBoardLogger; t.SpeedMonitor; print([n for n in {names} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
