"""What a user wants saved, taken apart: tensors, objects, and how they were put together.

The paths of leaves are those of torch.distributed.checkpoint, so that its plain `load` finds them. The
structure, in JSON, keeps what those paths lose: empty mappings, keys that are numbers, where a name has
dots in it. Plain values stand in it as they are; whatever else there is goes by its path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from composer_dist.distributed.manifest import Path
from composer_dist.errors import CheckpointValueError

_PLAIN = (str, int, float, bool, type(None))
_DICTS = {"dict": dict, "ordered": OrderedDict}


@dataclass
class Leaves:
    """What a structure was made of, by path."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add(self, path: Path, value: Any) -> str:
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


def join(path: Path) -> str:
    """A path as torch.distributed.checkpoint writes it."""
    return ".".join(map(str, path))


def encode(path: Path, value: Any, leaves: Leaves) -> Any:
    """The structure of a value in JSON types; its leaves are added to `leaves`."""
    for tag, kind in _DICTS.items():
        if type(value) is kind and all(type(key) in _PLAIN for key in value):
            pairs = [[key, encode((*path, str(key)), one, leaves)] for key, one in value.items()]
            return {tag: pairs}
    if type(value) is list and not _is_terminal(value):
        return {"list": [encode((*path, number), one, leaves) for number, one in enumerate(value)]}
    name = leaves.add(path, value)
    if isinstance(value, Tensor):
        return {"tensor": name}
    return {"plain": value} if _is_plain(value) else {"object": name}


def decode(code: Any, read: Callable[[str, str], Any]) -> Any:
    """The inverse of `encode`.

    Args:
        read: gives a leaf, of its kind ("tensor" or "object") and path.
    """
    ((tag, inner),) = code.items()
    if tag == "plain":
        return inner
    if tag == "list":
        return [decode(one, read) for one in inner]
    if tag in _DICTS:
        return _DICTS[tag]((key, decode(one, read)) for key, one in inner)
    return read(tag, inner)


def _is_terminal(value: list[Any]) -> bool:
    """Whether torch.distributed.checkpoint takes a list for one leaf: no tensor or mapping is in it."""
    return all(
        _is_terminal(one) if isinstance(one, list) else not isinstance(one, (Mapping, Tensor))
        for one in value
    )


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(_is_plain(one) for one in value)
    return type(value) in _PLAIN
