"""The exponential moving average of the weights, whether they are sharded or not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.moving.scatter import copy_into
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.tensors.inner import local_part
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.clock import Time, Timestamp, TimeUnit
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State
from composer_dist.wording import listed


class EMA(Callback):
    """Averages the trainable weights over the run, and evaluates with the averages.

    Weights that are `half_life` old count half as much as new ones. Each rank averages its own shards, in
    float32 if the weights are smaller, without communication; a checkpoint saves them as it saves the
    weights. Frozen parameters and buffers are not averaged.

    Args:
        half_life: in any unit except `dur`, such as "100ba" or "1e6tok"; epochs pass batch by batch if their
            length is known, and at their ends otherwise.
        start: when averaging begins; until then evaluation uses the weights as they are.
        update_interval: how often to update the averages, in batches.

    Raises:
        ParallelismValueError: a time that is not positive or in another unit.
    """

    def __init__(
        self, half_life: Time | str, start: Time | str = "0ba", update_interval: Time | str = "1ba"
    ) -> None:
        times = (Time.of(time, unit=None) for time in (half_life, start, update_interval))
        self._half_life, self._start, self._interval = times
        if not self._half_life.value > 0 or self._half_life.unit is TimeUnit.DURATION:
            raise ParallelismValueError(f"EMA's half_life must be positive, and not in 'dur': '{half_life}'.")
        if self._start.value < 0 or self._start.unit is TimeUnit.DURATION:
            raise ParallelismValueError(f"EMA's start must be a time, and not in 'dur': '{start}'.")
        if self._interval.unit is not TimeUnit.BATCH or self._interval.value < 1:
            raise ParallelismValueError(f"EMA's update_interval must be in 'ba', not '{update_interval}'.")
        self.averages: dict[str, Tensor] = {}
        """By parameter name; DTensors like the parameters, of at least 32 bits.

        While the averages are swapped in, those of the weights' dtype are the weights.
        """
        self._aside: dict[str, Tensor] = {}
        """This rank's part of the other weights, while the averages are swapped in."""
        self._updated = Timestamp()
        self._swapped = False
        self._state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Shares the averages: fine-tuning in phases restores earlier ones."""
        self._state = state
        state.averages = self.averages

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.reached(self._start) and not state.timestamp.batch % int(self._interval.value):
            self._update(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Epochs of unknown length pass as a whole."""
        if self.averages and self._half_life.unit is TimeUnit.EPOCH and not state.train_length:
            self._update(state)

    @torch.no_grad()
    def _update(self, state: State) -> None:
        weights = _weights(state)
        unit = self._half_life.unit
        elapsed = state.passed(unit) - state.passed(unit, self._updated)
        share = 1 - 0.5 ** (elapsed / self._half_life.value) if self.averages else 1.0
        known = [name for name in weights if name in self.averages]
        both = [(local_part(self.averages[name]), local_part(weights[name])) for name in known]
        alike = [(ours, theirs) for ours, theirs in both if ours.dtype == theirs.dtype]
        if alike:
            _torch.foreach_lerp_([ours for ours, _ in alike], [theirs for _, theirs in alike], share)
        for ours, theirs in both:
            if ours.dtype != theirs.dtype:
                ours.lerp_(theirs.to(ours.dtype), share)
        new = {name: weight for name, weight in weights.items() if name not in known}
        self.averages |= {name: weight.to(_wide(weight), copy=True) for name, weight in new.items()}
        self._updated = state.timestamp

    def eval_before_all(self, state: State, logger: Logger) -> None:
        if not self._swapped:
            self._exchange(state, counted=False)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """The model gets its weights back, if an evaluation failed."""
        if self._swapped:
            self._exchange(state, counted=False)

    @contextmanager
    def swapped_in(self, state: State) -> Iterator[None]:
        """Inside, the model has the averages, for example to export it or to predict."""
        self._exchange(state)
        try:
            yield
        finally:
            self._exchange(state)

    def state_dict(self) -> dict[str, Any]:
        """The averages, sharded as they are, and when they were last updated."""
        return {"averages": dict(self.averages), "updated": self._updated.state_dict()}

    def state_to_fill(self) -> dict[str, Any]:
        """Empty averages, sharded as the weights are now."""
        weights = _weights(self._state) if self._state is not None else {}
        shards = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
        return {"averages": {name: torch.empty_like(one, dtype=_wide(one)) for name, one in shards.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads averages of the same parameters, sharded as these are now."""
        model = self._state.model if self._state is not None else nn.Module()
        weights = dict(named_parameters_canonical(model))
        _check_alike(weights, state["averages"])
        self.averages.clear()
        for name, saved in state["averages"].items():
            like = weights.get(name, saved)
            average = torch.empty_like(like, dtype=_wide(like), requires_grad=False)
            copy_into(average, saved)
            self.averages[name] = average
        self._updated = Timestamp.from_state_dict(state["updated"])

    @torch.no_grad()
    def _exchange(self, state: State, counted: bool = True) -> None:
        """Swap averages and weights.

        Args:
            state: has the model.
            counted: whether autograd counts this as a change of the weights, which a backward refuses. Not
                for an evaluation, at whose end they are as its forward found them.
        """
        for name, weight in _weights(state).items():
            if name in self.averages:
                ours, theirs = local_part(self.averages[name]), local_part(weight)
                put = nullcontext() if counted else _torch.preserve_version(theirs)
                if name in self._aside:
                    with put:
                        theirs.copy_(self._aside.pop(name))
                    continue
                before = theirs.clone()
                with put:
                    theirs.copy_(ours)
                if ours.dtype == theirs.dtype:
                    ours.copy_(before)  # which needs memory for one weight at a time
                else:
                    self._aside[name] = before
        self._swapped = not self._swapped


def _wide(weight: Tensor) -> torch.dtype:
    """The dtype of an average: 16 bits are too few for its small steps."""
    return torch.promote_types(weight.dtype, torch.float32)


def _check_alike(weights: Mapping[str, Tensor], averages: Mapping[str, Tensor]) -> None:
    wrong = [
        f"{name} {tuple(average.shape)} / {tuple(weights[name].shape) if name in weights else 'missing'}"
        for name, average in averages.items()
        if weights and (name not in weights or weights[name].shape != average.shape)
    ]
    if wrong:
        raise CheckpointValueError(f"The averages do not match (checkpoint / model): {listed(wrong, 5)}.")


def _weights(state: State) -> dict[str, Tensor]:
    return {
        name: parameter.detach()
        for name, parameter in named_parameters_canonical(state.model)
        if parameter.requires_grad
    }
