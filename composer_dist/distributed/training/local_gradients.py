"""Gradients that are this rank's own, because the last backward was inside of `no_sync`."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import listed


class LocalGradients:
    """Parameters of one model whose gradients wait for a synchronized backward, which averages them.

    Args:
        names: all parameters whose gradients are averaged, by name.
        advice: another remedy than to synchronize the last backward.
        unfinished: says why other gradients of theirs are not averaged; "" if they are.
    """

    def __init__(
        self, names: Mapping[str, torch.Tensor], advice: str = "", unfinished: Callable[[], str] = str
    ) -> None:
        self._names, self._advice, self._unfinished = names, advice, unfinished
        self._waiting: dict[torch.Tensor, tuple[int, int]] = {}
        """What their gradients were after that backward, by identity and version."""
        self._changed: list[torch.Tensor] = []
        """Those that code had changed when the current backward began."""
        _all.add(self)
        _torch.at_start_of_backward(_look)

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """A backward without synchronization has added to the gradients of `parameters`."""
        self._waiting.update((one, _state(one)) for one in parameters)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._waiting

    def clear(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """All gradients, or those of `parameters`, have been averaged."""
        for one in self._names.values() if parameters is None else parameters:
            self._waiting.pop(one, None)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a step with gradients that wait, unless they were set to None or zero since.

        Raises:
            ParallelismRuntimeError: names their parameters.
        """
        held = (one for group in optimizer.param_groups for one in group["params"])
        self.refuse(held, "The optimizer would step with")

    def refuse(self, parameters: Iterable[torch.Tensor], would: str) -> None:
        """Refuse to use the gradients of `parameters` if any of them is not averaged.

        Args:
            parameters: of this model or others.
            would: how the error begins.

        Raises:
            ParallelismRuntimeError: names them.
        """
        reason = self._unfinished()
        if not self._waiting and not reason:
            return
        held = set(map(id, parameters))
        if names := self.waiting(held):
            raise ParallelismRuntimeError(
                f"{would} gradients of {listed(names)} that are not averaged over the ranks, because the "
                "last backward that reached them was inside of no_sync. Run the last one outside, and freeze "
                "parameters after it." + self._advice
            )
        if reason and any(id(one) in held for one in self._names.values()):
            raise ParallelismRuntimeError(f"{would} gradients that are not averaged over the ranks. {reason}")

    def waiting(self, held: Set[int]) -> list[str]:
        """The names of those parameters, among these ids, whose gradients wait."""
        self._forget([one for one in self._waiting if id(one) in held])
        return [name for name, one in self._names.items() if one in self._waiting and id(one) in held]

    def look(self) -> None:
        """A backward begins, maybe of another model."""
        changed = [one for one, then in self._waiting.items() if _state(one) != then]
        self._forget(changed)
        self._changed = [one for one in changed if one in self._waiting]

    def refuse_changed(self) -> None:
        """Refuse a backward after code has changed gradients that wait, on each rank its own.

        Raises:
            ParallelismRuntimeError: names their parameters.
        """
        ids = set(map(id, self._changed))
        self._changed = []
        if names := [name for name, one in self._names.items() if id(one) in ids]:
            raise ParallelismRuntimeError(
                f"The gradients of {listed(names)} were changed after a backward inside of no_sync, when "
                "they were not averaged over the ranks yet. Change them after the last backward."
            )

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside, gradients that wait may move to other memory. Raises what `refuse_changed` does."""
        self.look()
        self.refuse_changed()
        yield
        self.add(list(self._waiting))

    def _forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Those that were dropped or set to zero wait no longer."""
        for one in parameters:
            if not _has_values(one.grad):
                del self._waiting[one]


def waiting_of(parameters: Iterable[torch.Tensor]) -> list[str]:
    """The names of those of `parameters` whose gradients wait for a synchronized backward."""
    held, found = set(map(id, parameters)), list[str]()
    for gradients in list(_all):
        found += gradients.waiting(held)
    return found


def refuse_local(parameters: Collection[torch.Tensor], would: str) -> None:
    """Refuse to use the gradients of `parameters` if any of them is this rank's own.

    Raises:
        ParallelismRuntimeError: names them.
    """
    for gradients in list(_all):
        gradients.refuse(parameters, would)


_all: WeakSet[LocalGradients] = WeakSet()


def _look() -> None:
    for gradients in list(_all):
        gradients.look()


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), _torch.version(gradient))


def _has_values(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
