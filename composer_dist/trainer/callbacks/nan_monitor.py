"""Stops a run whose loss is nan or infinite."""

from collections.abc import Iterable

from torch import Tensor

from composer_dist.distributed.prepared import named_buffers_canonical, named_parameters_canonical
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.inner import local_part
from composer_dist.tensors.nested import named_tensors
from composer_dist.trainer.callbacks.base import Periodic
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State


class NaNMonitor(Periodic):
    """Raises on every rank when a batch's loss is nan or infinite, before the optimizers step.

    The error names the first bad tensor, if there is one: in the batch, the parameters, the buffers or the
    gradients, in this order.

    Args:
        interval: how often to check; an integer means epochs. Each check waits for the device.
    """

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Checks the loss, which is the same on all ranks."""
        if not self._every.passes_with_this_batch(state):
            return
        assert state.loss is not None  # the Trainer has set it
        loss = float(state.loss)
        if loss - loss != 0:  # nan or infinite
            where = Agreement().reach("looking for nan", _first_bad(state), _join)
            raise ParallelismValueError(
                f"The loss of batch {state.timestamp.batch + 1} is {loss}. {where} The optimizers have not "
                "stepped. Look at the data of this batch, lower the learning rate, or clip gradients."
            )


_KINDS = ("the batch's", "the parameter", "the buffer", "the gradient of")


def _first_bad(state: State) -> str | None:
    """A description of the first tensor on this rank that holds nan or infinity."""
    parameters = list(named_parameters_canonical(state.model))
    gradients = [(name, p.grad) for name, p in parameters if p.grad is not None]
    buffers = named_buffers_canonical(state.model)
    groups: list[Iterable[tuple[str, Tensor]]]
    groups = [named_tensors(state.batch), parameters, buffers, gradients]
    for what, tensors in zip(_KINDS, groups, strict=True):
        for name, tensor in tensors:
            fractions = tensor.is_floating_point() or tensor.is_complex()
            if fractions and not local_part(tensor).isfinite().all():
                return f"{what} {name or 'tensor'!r}"
    return None


def _join(found: list[str | None]) -> str:
    """What all ranks have found; the first kind of tensor that is bad anywhere is the cause."""
    for kind in _KINDS:
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(found):
            if text and text.startswith(kind):
                by_text.setdefault(text, []).append(rank)
        if by_text:
            parts = [f"{text} on rank {', '.join(map(str, on))}" for text, on in by_text.items()]
            return f"Not finite: {'; '.join(parts)}."
    return "Batch, parameters, buffers and gradients are finite: the loss itself overflows."
