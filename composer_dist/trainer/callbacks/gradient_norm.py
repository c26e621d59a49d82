"""The size of the gradient."""

from torch import Tensor

from composer_dist.distributed.training.clipping import global_norm, gradient_part, norms
from composer_dist.trainer.callbacks.base import Periodic
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State


class GradientNorm(Periodic):
    """Logs `l2_norm/grad/global`, the 2-norm of all gradients before clipping, over all shards.

    Args:
        interval: how often; an integer means epochs.
    """

    _norm: Tensor | None = None

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._norm = None
        if self._every.passes_with_this_batch(state):
            parts = enumerate(map(gradient_part, state.optimized_parameters()))
            self._norm = global_norm(norms({str(index): part for index, part in parts}).values())

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._norm is not None:
            logger.log_metrics({"l2_norm/grad/global": self._norm})
