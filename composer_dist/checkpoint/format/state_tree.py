"""Takes a user's state apart into tensors, objects, and the structure around them.

Leaves have the same key paths as in torch.distributed.checkpoint, so its plain `load` finds them. The
structure, in JSON, keeps information that those paths lose: empty mappings, numbers as keys, dots in names.
It contains plain values, and the key paths of everything else.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_dist.errors import CheckpointValueError, Faults
from composer_dist.files.checkpoint_format import DICTS, KeyPath
from composer_dist.tensors.nested import tensors_in

_PLAIN = (str, int, float, bool, type(None))


@dataclass
class Leaves:
    """The leaves of a structure, by path."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)

    def add(self, path: KeyPath, value: Any) -> str:
        """Note a leaf; returns its path joined with dots.

        Raises:
            CheckpointValueError: another leaf's path looks the same.
        """
        name = join(path)
        if name in self.paths:
            raise CheckpointValueError(
                f"{list(self.paths[name])} and {list(path)} would both be saved as {name!r}; rename one."
            )
        self.paths[name] = path
        (self.tensors if isinstance(value, Tensor) else self.objects)[name] = value
        return name

    def check(self) -> None:
        """Check that everything can be stored.

        Raises:
            CheckpointValueError: lists tensors on the meta device or with special layouts, and objects that
                hold shards.
        """
        tensors = self.tensors.items()
        odd = {
            "on the meta device": [name for name, one in tensors if one.is_meta],
            "sparse, nested or quantized in a way that cannot be stored": [
                name
                for name, one in tensors
                if one.layout != torch.strided or one.is_nested or one.is_quantized
            ],
            "shards in a tuple or a set, a deque or an object, which are kept as a whole; "
            "use a list or a dictionary": [name for name, one in self.objects.items() if _holds_shards(one)],
        }
        with Faults("These values cannot be saved. ", ".", ". ", CheckpointValueError) as faults:
            faults += [f"{', '.join(names)}: {what}" for what, names in odd.items() if names]


def join(path: KeyPath) -> str:
    """A path as torch.distributed.checkpoint writes it."""
    return ".".join(map(str, path))


def encode(path: KeyPath, value: Any, leaves: Leaves) -> Any:
    """The structure of a value in JSON types; adds its leaves to `leaves`."""
    for tag, kind in DICTS.items():
        if type(value) is kind and all(type(key) in _PLAIN for key in value):
            pairs = [[key, encode((*path, str(key)), one, leaves)] for key, one in value.items()]
            return {tag: pairs}
    if type(value) is list and not _is_terminal(value):
        return {"list": [encode((*path, number), one, leaves) for number, one in enumerate(value)]}
    name = leaves.add(path, value)
    if isinstance(value, Tensor):
        return {"tensor": name}
    return {"plain": value} if is_plain(value) else {"object": name}


def _is_terminal(value: list[Any]) -> bool:
    """Whether a list is one leaf for torch.distributed.checkpoint: it contains no tensor or mapping."""
    return all(
        _is_terminal(one) if isinstance(one, list) else not isinstance(one, (Mapping, Tensor))
        for one in value
    )


def is_plain(value: Any) -> bool:
    """Whether the structure contains a value itself."""
    if type(value) is list:
        return all(is_plain(one) for one in value)
    return type(value) in _PLAIN


def _holds_shards(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_shards(one) for one in value.values())
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        return any(_holds_shards(one) for one in value)
    return any(isinstance(one, DTensor) for one in tensors_in(value))  # of a dataclass, too
