"""The rates that steps have used."""

from torch.optim import SGD, AdamW

from composer_dist.trainer import LRMonitor
from composer_dist.trainer.callbacks.lr_monitor import learning_rates
from tests.kit.training import classifier, loader, quiet


def test_a_monitor_of_ones_own_takes_the_place_of_the_standard_one() -> None:
    model = classifier()
    trainer, log = quiet(model, callbacks=LRMonitor(), train_dataloader=loader())
    trainer.fit(duration="1ep")
    assert len(log.values("lr-SGD/group0")) == 3


def test_optimizers_and_groups_are_told_apart() -> None:
    model = classifier()
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizers = [SGD([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.1)]
    optimizers += [SGD(biases, lr=0.2)]
    assert learning_rates([*optimizers, AdamW(weights, lr=0.3)]) == {
        "lr-SGD/group0": 0.1,
        "lr-SGD/group1": 0.5,
        "lr-SGD2/group0": 0.2,
        "lr-AdamW/group0": 0.3,
    }
