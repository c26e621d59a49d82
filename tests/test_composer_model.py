"""ComposerModel and ComposerClassifier."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models import ComposerClassifier, ComposerModel


class Doubling(ComposerModel):
    """Counts its forward passes, which go through `__call__`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, batch: Tensor) -> Tensor:
        return batch * 2

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return (outputs - batch).mean()


def test_forward_and_loss_must_be_written() -> None:
    with pytest.raises(TypeError, match=r"abstract method.*forward"):
        ComposerModel()


def test_eval_forward_uses_the_outputs_it_is_given_and_hooks_otherwise() -> None:
    model, ones = Doubling(), torch.ones(2)
    for given, expected in ((), ones * 2), ((ones * 5,), ones * 5):
        assert torch.equal(model.eval_forward(ones, *given), expected)
        assert model.calls == 1


def test_a_model_without_metrics_has_none_and_weighs_by_samples() -> None:
    model = Doubling()
    assert model.get_metrics() == model.get_metrics(is_train=True) == {}
    assert model.loss_weight(torch.ones(2)) is None
    with pytest.raises(NotImplementedError, match="Doubling has metrics, so it needs"):
        model.update_metric(torch.ones(2), torch.ones(2), MulticlassAccuracy(num_classes=2))


def test_the_classifier_calls_its_module_on_the_inputs() -> None:
    module = nn.Linear(3, 3)
    model = ComposerClassifier(module, num_classes=3)
    inputs, targets = torch.randn(6, 3), torch.arange(6) % 3
    logits = model((inputs, targets))
    assert torch.equal(logits, module(inputs))
    assert torch.equal(model.loss(logits, (inputs, targets)), functional.cross_entropy(logits, targets))


def test_the_classifier_measures_accuracy_by_default() -> None:
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    (name, metric), *rest = model.get_metrics().items()
    assert (name, rest) == ("MulticlassAccuracy", [])
    logits = torch.eye(3)
    model.update_metric((logits, torch.tensor([0, 1, 0])), logits, metric)
    assert metric.compute().item() == pytest.approx(2 / 3)
    assert model.get_metrics(is_train=True)["MulticlassAccuracy"] is not metric


def test_metrics_are_no_submodules() -> None:
    module = nn.Linear(3, 3)
    model = ComposerClassifier(module, num_classes=3, val_metrics=MulticlassF1Score(num_classes=3))
    assert dict(model.named_children()) == {"module": module}
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_metrics_may_come_alone_by_name_or_as_a_collection() -> None:
    metric = MulticlassF1Score(num_classes=3)
    ways = [(metric, "MulticlassF1Score"), ({"f1": metric}, "f1"), (MetricCollection({"f1": metric}), "f1")]
    for given, name in ways:
        model = ComposerClassifier(nn.Identity(), train_metrics={}, val_metrics=given)
        assert list(model.get_metrics()) == [name]
        assert model.get_metrics(is_train=True) == {}
    with pytest.raises(ParallelismTypeError, match=r"not torchmetrics.Metric objects: f1"):
        ComposerClassifier(nn.Identity(), num_classes=3, val_metrics={"f1": len})


def test_the_number_of_classes_may_be_the_modules_own() -> None:
    module = nn.Identity()
    with pytest.raises(ParallelismValueError, match="needs num_classes for its accuracy"):
        ComposerClassifier(module)
    module.num_classes = 5
    assert ComposerClassifier(module).get_metrics()["MulticlassAccuracy"].num_classes == 5


def test_the_default_loss_weighs_by_the_targets_it_counts() -> None:
    model = ComposerClassifier(nn.Identity(), num_classes=3)
    assert model.loss_weight((None, torch.tensor([0, -100, 2]))) == 2
    assert model.loss_weight((None, torch.rand(4, 3))) is None
    other = ComposerClassifier(nn.Identity(), num_classes=3, loss_fn=functional.mse_loss)
    assert other.loss_weight((None, torch.tensor([0, -100, 2]))) is None
