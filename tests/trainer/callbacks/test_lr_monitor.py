"""The rates that steps have used."""

from torch.optim import SGD, AdamW

from composer_dist.trainer import LRMonitor
from composer_dist.trainer.callbacks.lr_monitor import learning_rates
from tests.kit.training import classifier, fitted


def test_a_monitor_of_ones_own_takes_the_place_of_the_standard_one() -> None:
    _, log = fitted(callbacks=LRMonitor())
    assert len(log.values("lr-SGD/group0")) == 3


def test_optimizers_and_groups_are_told_apart() -> None:
    weights, biases, *_ = ([parameter] for parameter in classifier().parameters())
    groups = SGD([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.1)
    assert learning_rates([groups, SGD(biases, lr=0.2), AdamW(weights, lr=0.3)]) == {
        "lr-SGD/group0": 0.1,
        "lr-SGD/group1": 0.5,
        "lr-SGD2/group0": 0.2,
        "lr-AdamW/group0": 0.3,
    }
