"""Everything else in checkpoints: objects with a `state_dict`, tensors, mappings, plain values."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.format.opened import Opened
from composer_dist.checkpoint.kinds.filling import fill_tensors
from composer_dist.checkpoint.kinds.kind import Chosen, Restore
from composer_dist.distributed.ranks.agreement import Agreement


def owns(value: Any) -> bool:
    """Always."""
    return True


def extract(key: str, value: Any, models: list[nn.Module], chosen: Chosen | None, whole: bool) -> Any:
    """The state of an object that has one, or the value itself."""
    found = value.state_dict() if is_stateful(value) else value
    if chosen is not None and isinstance(found, Mapping):
        found = {name: one for name, one in found.items() if chosen(name, one)}
    return found


def guess(code: Any) -> bool:
    """Always."""
    return True


@dataclass
class _ValueLoading:
    opened: Opened
    key: str
    state: MutableMapping[str, Any]
    value: Any = None

    def prepare(self) -> None:
        """Read the value, on this rank alone; existing shards are kept and filled later."""
        self.targets: dict[str, Tensor] = {}
        now = self.state[self.key]
        code = self.opened.structure[self.key]
        self.value = None if is_stateful(now) else self._read(code, now)

    def load(self, agreement: Agreement) -> None:
        fill_tensors(self.opened, self.targets, agreement)
        now = self.state[self.key]
        if is_stateful(now):
            with agreement.together(f"restoring {self.key}"):
                now.load_state_dict(self.opened.value(self.opened.structure[self.key]))
        else:
            self.state[self.key] = self.value

    def _read(self, code: Any, now: Any) -> Any:
        ((tag, inner),) = code.items()
        sharded = tag == "tensor" and isinstance(now, DTensor)
        if sharded and tuple(now.shape) == self.opened.tensors[inner].dims:
            self.targets[inner] = now
            return now
        if tag == "dict" and isinstance(now, Mapping):
            return {key: self._read(one, now.get(key)) for key, one in inner}
        return self.opened.value(code)


def plan(restore: Restore, key: str) -> _ValueLoading:
    """Any value can replace another."""
    return _ValueLoading(restore.opened, key, restore.state)


def is_stateful(value: Any) -> bool:
    """Whether a value saves and loads its own state, as a scheduler does."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
