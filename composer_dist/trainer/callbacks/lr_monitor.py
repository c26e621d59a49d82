"""The learning rates."""

from collections.abc import Sequence

from torch.optim import Optimizer

from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State


class LRMonitor(Callback):
    """Logs the learning rate of each parameter group, as each step used it.

    Names are Composer's: `lr-AdamW/group0`; a second optimizer of a class is `lr-AdamW2`. Every Trainer has
    an LRMonitor.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Reads the rates before schedulers change them."""
        self._rates = learning_rates(state.optimizers)

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics(self._rates)


def learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """The optimizers' rates now, by name."""
    rates: dict[str, float] = {}
    seen: dict[str, int] = {}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        seen[name] = seen.get(name, 0) + 1
        suffix = "" if seen[name] == 1 else str(seen[name])
        for index, group in enumerate(optimizer.param_groups):
            rates[f"lr-{name}{suffix}/group{index}"] = float(group["lr"])
    return rates
