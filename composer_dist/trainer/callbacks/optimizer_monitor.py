"""What the optimizers do to each parameter."""

from collections.abc import Iterator

import torch
from torch import Tensor

from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.training.clipping import Part, global_norm, gradient_part, norms, part_of
from composer_dist.trainer.callbacks.base import Periodic
from composer_dist.trainer.clock import Time
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State

_WORDS = {"exp_avg": "moment", "momentum_buffer": "moment", "exp_avg_sq": "second_moment"}
"""Composer's words for what optimizers keep; anything else goes by the optimizer's own."""


class OptimizerMonitor(Periodic):
    """Logs 2-norms of parameters, gradients, the optimizer's moments and the last update.

    `l2_norm/<what>/<parameter>` and `l2_norm/<what>/global`, where `what` is "param", "grad" (before
    clipping), "moment", "second_moment" or another tensor that the optimizer keeps, and "update" (the
    parameter's change by the step). Norms are of whole tensors, however they are sharded.

    Args:
        interval: how often; an integer means epochs. A measured step copies this rank's shards.
        per_parameter: log each parameter, not only the global norms.
    """

    def __init__(self, interval: Time | str | int = "10ba", per_parameter: bool = True) -> None:
        super().__init__(interval)
        self._per_parameter = per_parameter
        self._gradients: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._gradients, self._before = {}, {}
        if not self._every.passes_with_this_batch(state):
            return
        parameters = dict(_trained(state))
        self._gradients = norms({name: gradient_part(one) for name, one in parameters.items()})
        self._before = {name: _local(one).clone() for name, one in parameters.items()}

    @torch.no_grad()
    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._before:
            return
        parameters = dict(_trained(state))
        parts: dict[str, Part] = {}
        for name, parameter in parameters.items():
            now = _local(parameter)
            parts[f"param/{name}"] = parameter, now
            parts[f"update/{name}"] = parameter, now - self._before[name]
        parts |= _kept(state, parameters)
        measured = {f"grad/{name}": norm for name, norm in self._gradients.items()} | norms(parts)
        self._before = {}
        by_kind: dict[str, list[Tensor]] = {}
        for name, norm in measured.items():
            by_kind.setdefault(name.partition("/")[0], []).append(norm)
        whole = {f"{kind}/global": global_norm(each) for kind, each in by_kind.items()}
        logged = measured | whole if self._per_parameter else whole
        logger.log_metrics({f"l2_norm/{name}": norm for name, norm in logged.items()})


def _trained(state: State) -> Iterator[tuple[str, Tensor]]:
    """Name and parameter of what the optimizers hold and train."""
    held = {id(parameter) for parameter in state.optimized_parameters()}
    for name, parameter in named_parameters_canonical(state.model):
        if id(parameter) in held and parameter.requires_grad:
            yield name, parameter


def _kept(state: State, parameters: dict[str, Tensor]) -> dict[str, Part]:
    """What the optimizers keep for each parameter, in its shape."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    parts: dict[str, Part] = {}
    for optimizer in state.optimizers:
        for parameter, kept in optimizer.state.items():
            for key, value in kept.items():
                if id(parameter) in names and isinstance(value, Tensor) and value.shape == parameter.shape:
                    parts[f"{_WORDS.get(key, key)}/{names[id(parameter)]}"] = part_of(value)
    return parts


def _local(parameter: Tensor) -> Tensor:
    _, local = part_of(parameter.detach())
    return local
