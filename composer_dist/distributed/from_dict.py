"""Configurations from dictionaries, as YAML gives them: validated, and refused in words."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args, get_type_hints

from composer_dist.errors import ParallelismValueError


class FromDict:
    """`from_dict`, the validated way in for a dataclass."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "arbitrary_types_allowed": True,
    }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build this configuration from a dictionary (nested ones included).

        Raises:
            ParallelismValueError: an unknown key (with its nearest neighbour) or a value of the
                wrong type; all of them at once.
        """
        import pydantic  # only where a dictionary comes in: importing it costs 0.1 s

        try:
            return pydantic.TypeAdapter(cls).validate_python(dict(values))
        except pydantic.ValidationError as error:
            raise ParallelismValueError(_explain(cls, error.errors())) from None


def near_miss(name: str, candidates: Iterable[str]) -> str:
    """The sentence "Did you mean 'x'?" for the closest candidate, with a space before it, or nothing."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _explain(cls: type, errors: Sequence[Any]) -> str:
    """What pydantic has found, in our words: the path, the fault, the nearest known key."""
    lines = []
    for error in errors:
        path = [str(part) for part in error["loc"] if part != "MeshConfig"]
        if path[-1:] == ["is-instance[DeviceMesh]"] and len(errors) > 1:
            continue  # `mesh` is no mesh but sizes, of which the other errors speak
        if error["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
            known = _field_names(cls, path[:-1])
            lines.append(f"unknown key {'.'.join(path)!r}.{near_miss(path[-1], known)}")
        else:
            lines.append(f"{'.'.join(path)}: {error['msg']} (got {error['input']!r})")
    return f"{cls.__name__}: " + " ".join(lines)


def _field_names(cls: Any, path: Sequence[str]) -> set[str]:
    """The fields of the dataclass that lies at `path` below `cls`."""
    for part in path:
        hint = get_type_hints(cls).get(part)
        cls = next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), cls)
    return {field.name for field in dataclasses.fields(cls)}
