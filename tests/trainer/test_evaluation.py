"""Evaluation and prediction on one process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassRecall,
)
from torchmetrics.regression import ConcordanceCorrCoef, NormalizedRootMeanSquaredError, PearsonCorrCoef
from torchmetrics.retrieval import RetrievalMAP, RetrievalMRR
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

from composer_dist import MeshConfig, ParallelismConfig, TPConfig
from composer_dist.errors import ParallelismError, ParallelismValueError
from composer_dist.models import ComposerClassifier, HuggingFaceModel, LanguagePerplexity, TokenAccuracy
from composer_dist.trainer import Evaluator, State
from composer_dist.trainer.evaluation import compute_metrics, fresh_metrics
from tests.kit.huggingface import gpt2, llama
from tests.kit.training import (
    IGNORED,
    classifier,
    fitted,
    joined,
    loader,
    my_rank,
    points,
    quiet,
    seen_at,
    sentences,
    tagged,
    tagger,
)
from tests.kit.world import World


@pytest.mark.promise(98)
def test_eval_gives_the_mean_loss_and_the_metrics() -> None:
    model = classifier()
    trainer, log = quiet(model)
    results = trainer.eval(loader(10, batch_size=4))
    inputs, targets = points(10).tensors
    logits = model.module(inputs)
    expected = {
        "loss/eval/total": functional.cross_entropy(logits, targets).item(),
        "metrics/eval/MulticlassAccuracy": (logits.argmax(1) == targets).float().mean().item(),
    }
    assert results == pytest.approx(expected, rel=1e-6)
    assert {name: log.values(name) for name in results} == {k: [v] for k, v in results.items()}


def test_the_loss_is_a_mean_over_its_terms() -> None:
    model, samples = tagger(), tagged(7)
    trainer, _ = quiet(model)
    results = trainer.eval([joined(samples[:2]), joined(samples[2:])], label="held_out")
    batch = joined(samples)
    expected = model.loss(model(batch), batch).item()
    assert results == {"loss/held_out/total": pytest.approx(expected, rel=1e-6)}


def test_the_loss_can_be_left_out_and_metrics_of_several_values_have_several_names() -> None:
    trainer, _ = quiet(eval_loss=False, eval_dataloader=loader())
    assert list(trainer.eval()) == ["metrics/eval/MulticlassAccuracy"]
    metric = MulticlassAccuracy(num_classes=4, average=None)
    trainer, _ = quiet(classifier(val_metrics={"hits": metric}), eval_loss=False)
    assert list(trainer.eval(loader())) == [f"metrics/eval/hits/{index}" for index in range(4)]


class Pair(MulticlassAccuracy):
    """Gives a tuple, as the ROC curves of torchmetrics do."""

    def compute(self) -> Any:
        return torch.tensor([0.25, 0.5]), [torch.tensor(0.75)]


def test_a_metric_that_gives_a_tuple_has_a_name_for_each_value() -> None:
    trainer, _ = quiet(classifier(val_metrics={"pair": Pair(num_classes=4)}), eval_loss=False)
    names = [f"metrics/eval/pair/{place}" for place in ("0/0", "0/1", "1/0")]
    assert trainer.eval(loader()) == dict(zip(names, (0.25, 0.5, 0.75), strict=True))


def test_each_evaluation_starts_over_and_leaves_the_models_metrics_alone() -> None:
    model = classifier()
    trainer, _ = quiet(model)
    assert trainer.eval(loader()) == trainer.eval(loader())
    assert not any(metric.update_called for metric in model.get_metrics().values())
    assert trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].update_called


def test_modes_and_gradients_come_back() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = ComposerClassifier(module, num_classes=4)
    module[0].eval()
    seen, callback = seen_at(
        "eval_after_forward", lambda state: (model.training, torch.is_grad_enabled(), state.dataloader_label)
    )
    trainer, _ = quiet(model, callbacks=callback)
    trainer.eval(loader())
    assert seen == [(False, False, "eval")] * 3
    assert [module[0].training, module[1].training, model.training] == [False, True, True]
    assert torch.is_grad_enabled()
    assert trainer.state.dataloader_label is None
    assert trainer.state.batch is None


class Labels(Metric):
    """How many there are, without those that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.count += (labels != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.count


def labels_counted(config: Any, peers: int) -> list[float]:
    """In a batch of four sentences in training and evaluation; `peers` ranks in a row have the same ones."""
    torch.manual_seed(0)
    model = HuggingFaceModel(llama(), use_logits=True, metrics=[Labels()])
    batch = sentences(4)
    if peers == 1 and dist.is_initialized():
        batch = {key: value.chunk(2)[dist.get_rank()] for key, value in batch.items()}
    options = {"train_dataloader": [batch], "eval_dataloader": [batch], "device": "cpu"}
    _, log = fitted(model, parallelism_config=config, **options)
    return [*log.values("metrics/train/Labels"), *log.values("metrics/eval/Labels")]


@pytest.mark.promise(98)
@pytest.mark.parametrize(("config", "peers"), [
    ("fsdp", 1),
    (ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig()), 2),
    (ParallelismConfig(mesh=MeshConfig(cp=2)), 2),
], ids=["fsdp", "tp", "cp"])  # fmt: skip
def test_metrics_count_samples_that_several_ranks_share_once(config: Any, peers: int, world2: World) -> None:
    expected = float((sentences(4)["labels"][:, 1:] != IGNORED).sum())
    assert labels_counted(None, 1) == [expected, expected]
    assert world2(labels_counted, config, peers, timeout=150) == [[expected, expected]] * 2


def with_logits(config: Any, use_logits: bool) -> tuple[dict[str, list[float]], Tensor]:
    """Metrics in training and evaluation, and the logits that `predict` returns."""
    torch.manual_seed(0)
    metrics = [LanguagePerplexity(), TokenAccuracy()] if use_logits else None
    model = HuggingFaceModel(gpt2(), use_logits=use_logits, metrics=metrics)  # an odd number of tokens
    batch = sentences(4)
    options = {"train_dataloader": [batch], "eval_dataloader": [batch], "device": "cpu"}
    trainer, log = fitted(model, parallelism_config=config, **options)
    (outputs,) = trainer.predict([batch])
    logits = outputs if use_logits else outputs["logits"]
    assert type(logits) is Tensor
    return {name: log.values(name) for name in log.data if name.startswith("metrics/")}, logits


@pytest.mark.promise(98)
@pytest.mark.parametrize("use_logits", [True, False])
def test_metrics_and_predictions_see_all_of_logits_that_stay_cut(use_logits: bool, world2: World) -> None:
    metrics, logits = with_logits(None, use_logits)
    tp = TPConfig(loss_parallel=True)
    config = ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=tp)
    for found, predicted in world2(with_logits, config, use_logits, timeout=150):
        assert found.keys() == metrics.keys()
        assert all(found[name] == pytest.approx(metrics[name], rel=1e-5) for name in metrics)
        torch.testing.assert_close(predicted, logits)


def metrics_of(samples: int) -> dict[str, float]:
    """The values of many kinds of metrics over samples that rank 0 has."""
    torch.manual_seed(0)
    scores = torch.randn(samples, 4)
    targets = torch.arange(samples) % 4
    ranking: dict[str, Metric] = {
        "lists": MulticlassAUROC(num_classes=4),
        "counts": MulticlassAccuracy(num_classes=4),
        "sum": MulticlassAUROC(num_classes=4) + MulticlassAccuracy(num_classes=4),
        "best": MinMaxMetric(MulticlassAUROC(num_classes=4)),
        "samples": BootStrapper(MulticlassAUROC(num_classes=4), num_bootstraps=2),
        **MetricCollection([MulticlassAveragePrecision(num_classes=4), MulticlassRecall(num_classes=4)]),
    }
    moments: dict[str, Metric] = {
        "pearson": PearsonCorrCoef(),
        "columns": PearsonCorrCoef(num_outputs=4),
        "concordance": ConcordanceCorrCoef(),
        "error": NormalizedRootMeanSquaredError(),
    }
    metrics = fresh_metrics(State(model=classifier()), ranking | moments, ())
    if my_rank() == 0:
        for name in ranking:
            metrics[name].update(scores, targets)
        for name in moments:
            columns = slice(0, 4) if name == "columns" else 0
            metrics[name].update(scores[:, columns], scores.roll(1, 0)[:, columns] + scores[:, columns])
    return compute_metrics(metrics, "eval")


@pytest.mark.promise(98)
@pytest.mark.filterwarnings("ignore:No (posi|nega)tive samples:UserWarning")
def test_a_rank_without_samples_does_not_change_metrics(world2: World) -> None:
    expected = metrics_of(12)
    assert not any(math.isnan(value) for value in expected.values())
    assert world2(metrics_of, 12) == [pytest.approx(expected)] * 2


def precision_of_searches(updates: int) -> dict[str, float]:
    """Metrics with lists that torchmetrics does not concatenate; rank 1 of two has the last update only."""
    given = {"map": RetrievalMAP(), "mrr": RetrievalMRR(), "both": MetricCollection([RetrievalMAP()])}
    metrics = fresh_metrics(State(model=classifier()), given, ())
    world = dist.get_world_size() if dist.is_initialized() else 1
    for number in range(updates):
        if world == 1 or my_rank() == (number == updates - 1 and updates > 1):
            torch.manual_seed(number)
            scores, hits = torch.rand(6), torch.arange(6) % 3 == 0
            for metric in metrics.values():
                metric.update(scores, hits, indexes=torch.full((6,), number))
    found = compute_metrics(metrics, "eval")
    assert compute_metrics(metrics, "eval") == found
    return found


@pytest.mark.promise(98)
@pytest.mark.parametrize("updates", [1, 3])
def test_ranks_may_have_had_different_numbers_of_updates(updates: int, world2: World) -> None:
    expected = precision_of_searches(updates)
    assert world2(precision_of_searches, updates) == [pytest.approx(expected)] * 2


@pytest.mark.promise(98)
def test_predict_gives_what_eval_forward_does() -> None:
    model = classifier()
    trainer, _ = quiet(model)
    outputs: list[Tensor] = trainer.predict(loader())
    torch.testing.assert_close(torch.cat(outputs), model.module(points().tensors[0]))
    assert not outputs[0].requires_grad
    assert trainer.predict(loader(), return_outputs=False) == []


@pytest.mark.parametrize(
    ("interval", "batches"),
    [("1ep", [3, 6, 7]), ("2ba", [2, 4, 6, 7]), ("0.5dur", [4, 7]), (None, []), ("3ba", [3, 6, 7])],
)
def test_fit_evaluates_at_intervals_and_once_at_its_end(interval: str | None, batches: list[int]) -> None:
    options = {"eval_dataloader": loader(), "eval_interval": interval, "max_duration": "7ba"}
    trainer, log = quiet(train_dataloader=loader(), **options)
    for duration in ("6ba", None) if interval == "3ba" else (None,):
        trainer.fit(duration=duration)
    assert [time.batch for time, _ in log.data.get("loss/eval/total", [])] == batches


def predictions() -> list[Tensor]:
    data = points()
    mine = [[[0, 1], [2], [3]], [[4, 5, 6]]][dist.get_rank()]
    trainer, _ = quiet(parallelism_config="fsdp")
    with pytest.warns(UserWarning, match="predict dataloader of rank 1"):
        return trainer.predict([data[indices] for indices in mine])


@pytest.mark.promise(98)
def test_predict_gives_each_rank_its_own_batches(world2: World) -> None:
    model, data = classifier(), points()
    first, second = world2(predictions)
    assert [len(batch) for batch in first] == [2, 1, 1]
    assert [len(batch) for batch in second] == [3]
    expected = model(data[:7]).detach()
    torch.testing.assert_close(torch.cat(first + second), expected)


@pytest.mark.promise(98)
def test_several_evaluators_each_with_its_interval_metrics_and_share() -> None:
    evaluators = [
        Evaluator("all", loader(12), interval="1ep"),
        Evaluator("some", loader(12), interval="2ba", subset=1, metrics=()),
    ]
    trainer, log = fitted(eval_dataloader=evaluators, max_duration="2ep")
    assert [time.batch for time, _ in log.data["loss/all/total"]] == [3, 6]
    assert [time.batch for time, _ in log.data["loss/some/total"]] == [2, 4, 6]
    assert "metrics/all/MulticlassAccuracy" in log.data
    assert not any(name.startswith("metrics/some") for name in log.data)
    results = trainer.eval()
    assert results["loss/some/total"] == pytest.approx(trainer.eval(loader(4))["loss/eval/total"])
    assert results["loss/all/total"] == pytest.approx(trainer.eval({"x": loader(12)})["loss/x/total"])
    assert log.values("loss/all/total")[-2] == pytest.approx(results["loss/all/total"])


def test_evaluators_that_cannot_be_told_apart_or_do_nothing_are_refused() -> None:
    one = Evaluator("one", loader())
    refused: list[tuple[str, Any]] = [
        ("Several dataloaders need labels", [one, loader()]),
        ("Two Evaluators are called 'one'", [one, one]),
        ("empty mapping", {}),
    ]
    for text, given in refused:
        with pytest.raises(ParallelismError, match=text):
            quiet(eval_dataloader=given)
    for options in ({"label": "train"}, {"label": "a/b"}, {"subset": 0}, {"interval": "0ba"}):
        with pytest.raises(ParallelismError):
            Evaluator(**({"label": "one", "dataloader": loader()} | options))
    with pytest.raises(ParallelismError, match="one: the model has no metric Recall; it has MulticlassAcc"):
        quiet(eval_dataloader=Evaluator("one", loader(), metrics=["Recall"]))
    with torch.device("meta"):
        empty = MulticlassAccuracy(num_classes=4)
    with pytest.raises(ParallelismError, match="no values to start from: hits"):
        quiet(classifier(val_metrics={"hits": empty}), eval_dataloader=loader())
    with pytest.raises(ParallelismValueError, match="needs an eval_dataloader"):
        quiet()[0].eval()
