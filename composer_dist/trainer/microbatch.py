"""How many samples go through the model at once: a number, or as many as fit, found by trying."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import nn

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.trainer.attempts import Attempts
from composer_dist.trainer.data.randomness import generator_states, set_generator_states
from composer_dist.trainer.state import State

T = TypeVar("T")

MicrobatchSize = int | Literal["auto"] | None

_TRIALS = 2
"""Batches that must fit before a size is settled: optimizers take their memory at the first one's end."""


class Microbatches:
    """Cuts batches into microbatches, of the same number on all ranks.

    With "auto" the first batch is tried whole. If any rank runs out of memory, all ranks discard what the
    batch has done, halve the microbatches, restore random state and buffers, and start the batch over. The
    result equals that of a run with the smaller size from the start. The size is written to the state.
    """

    def __init__(self, state: State, size: MicrobatchSize) -> None:
        self._state = state
        state.device_train_microbatch_size = None if size == "auto" else size
        self._attempts = Attempts(state.model) if size == "auto" else None
        self._fitted = 0

    def run(self, most: int, body: Callable[[int], T]) -> T:
        """What `body` returns, called with the number of microbatches until they fit on every rank.

        Args:
            most: the samples of the largest batch of any rank.
            body: all forwards and backwards of one batch, from gradients of zero.
        """
        if self._attempts is None or self._fitted >= _TRIALS:  # then running out of memory is an error
            return body(self._parts(most))
        if self._state.device_train_microbatch_size is None:
            self._state.device_train_microbatch_size = most
        with _restored(self._state.model, self._state.device) as restore:
            while True:
                size = min(self._state.device_train_microbatch_size, most)
                result, account = self._attempts.run(
                    f"microbatches of {size} samples", lambda: body(self._parts(most))
                )
                if account is None:
                    self._fitted += 1
                    return result  # type: ignore[return-value]  # body's own None
                if size == 1:
                    raise ParallelismRuntimeError(
                        "device_train_microbatch_size='auto': not even a single sample fits into memory. "
                        "Use activation checkpointing or offloading, a lower precision, more shards or "
                        f"shorter sequences.\n{account}"
                    )
                restore()
                self._fitted = 0
                self._state.device_train_microbatch_size = size // 2

    def _parts(self, most: int) -> int:
        size = self._state.device_train_microbatch_size
        return -(-most // size) if size else 1


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields a function that restores buffers and random states to their present values."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = generator_states(device)

    @torch.no_grad()
    def restore() -> None:
        for buffer, value in buffers:
            buffer.copy_(value)
        set_generator_states(states, device)

    yield restore
