"""Metrics over all ranks are those of one process, however data are spread."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import CatMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score

from composer_dist.models import ComposerClassifier
from tests.trainer.models import World, classifier, points, quiet

WHOLE = [[0, 1, 2, 7, 8], [3, 4], [5, 6, 9]]
"""The points of each batch."""


class Largest(SumMetric):
    """Of logits, not of classes."""

    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(logits.amax(1))


class Each(CatMetric):
    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(logits.amax(1))


def model() -> ComposerClassifier:
    with torch.device("cpu"):
        metrics: dict[str, Metric] = {
            "f1": MulticlassF1Score(num_classes=4, average="macro"),
            "counts": MulticlassConfusionMatrix(num_classes=4),
            "auroc": MulticlassAUROC(num_classes=4),  # keeps logits and targets in lists
            "largest": Largest(),
        }
    return classifier(train_metrics=metrics, val_metrics=metrics | {"each": Each()})


def measured(mine: list[list[int]], config: Any = None) -> tuple[dict[str, float], dict[str, list[float]]]:
    data = points()
    batches = [data[indices] for indices in mine]
    trainer, log = quiet(
        model(),
        train_dataloader=batches,
        max_duration="1ep",
        parallelism_config=config,
        device="cpu",
        check_sampler=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The (train|eval) dataloader of rank 1 ended")
        warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)
        warnings.filterwarnings("ignore", "Average precision score for one or more classes", UserWarning)
        trainer.fit()
        results = trainer.eval(batches)
    return results, {name: log.values(name) for name in log.data if name.startswith("metrics/train/")}


def on_ranks(parts: list[list[list[int]]], config: Any) -> Any:
    return measured(parts[dist.get_rank()], config)


def assert_same(found: Any, expected: Any) -> None:
    results, training = expected
    each = [value for name, value in found[0].items() if "/each/" in name]
    assert sorted(each) == pytest.approx(sorted(v for n, v in results.items() if "/each/" in n), rel=1e-5)
    rest = {name: value for name, value in results.items() if "/each/" not in name}
    assert {n: v for n, v in found[0].items() if "/each/" not in n} == pytest.approx(rest, rel=1e-5)
    assert found[1].keys() == training.keys()
    for name, values in training.items():
        assert found[1][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize(
    "parts",
    [
        [[[0, 1, 2], [3], [5, 6]], [[7, 8], [4], [9]]],
        [[[0, 1, 2], [3, 4], [5, 6, 9]], [[7, 8]]],  # rank 1 has nothing for most batches
    ],
)
@pytest.mark.parametrize("config", ["fsdp", "ddp"])
def test_p98_metrics_of_two_ranks_are_those_of_one(world2: World, parts: Any, config: str) -> None:
    expected = measured(WHOLE)
    for found in world2(on_ranks, parts, config):
        assert_same(found, expected)


def test_p98_ranks_with_the_same_data_count_once(world2: World) -> None:
    expected = measured(WHOLE)
    config = {
        "mesh": {"dp_shard": 1, "tp": 2},
        "tp": {"plan": {"module.0": "colwise", "module.2": "rowwise"}},
    }
    for found in world2(on_ranks, [WHOLE, WHOLE], config):
        assert_same(found, expected)
