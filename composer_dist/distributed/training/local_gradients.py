"""Gradients that are this rank's own, because the last backward was inside of `no_sync`."""

from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import listed


class LocalGradients:
    """Parameters of one model whose gradients wait for a synchronized backward, which averages them.

    Args:
        names: all parameters whose gradients are averaged, by name.
        advice: another remedy than to synchronize the last backward.
    """

    def __init__(self, names: Mapping[str, torch.Tensor], advice: str = "") -> None:
        self._names, self._advice = names, advice
        self._waiting: set[torch.Tensor] = set()

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """A backward without synchronization has added to the gradients of `parameters`."""
        self._waiting.update(parameters)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._waiting

    def clear(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """All gradients, or those of `parameters`, have been averaged."""
        self._waiting.difference_update(self._names.values() if parameters is None else parameters)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a step with gradients that wait, unless they were set to None or zero since.

        Raises:
            ParallelismRuntimeError: names their parameters.
        """
        if not self._waiting:
            return
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._waiting.difference_update(
            [one for one in self._waiting if id(one) in held and not _has_values(one.grad)]
        )
        if names := [name for name, one in self._names.items() if one in self._waiting and id(one) in held]:
            raise ParallelismRuntimeError(
                f"The optimizer would step with gradients of {listed(names)} that are not averaged over "
                "the ranks, because the last backward was inside of no_sync. Run the last one outside."
                + self._advice
            )


def _has_values(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
