"""Configurations from dictionaries, as YAML gives them, validated and refused in words; and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self, get_args, get_type_hints

import torch

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import dtype_name, near_miss

ActivationCheckpointing = bool | str | tuple[str, Mapping[str, Any] | None] | list[Any] | None


Compile = bool | Mapping[str, Any] | None


def names_of(field: str, names: Sequence[str]) -> tuple[str, ...]:
    """A sequence of strings as a tuple."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ParallelismTypeError(f"{field} must be a sequence of names, not {names!r}.")
    return tuple(names)


def require(name: str, value: object, known: Sequence[object]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in known:
        raise ParallelismValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}.")


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
            ParallelismValueError: an unknown key (with its nearest neighbor) or a value of the
                wrong type; all of them at once.
        """
        import pydantic  # only where a dictionary comes in: importing it costs 0.1 s

        try:
            return pydantic.TypeAdapter(cls).validate_python(dict(values))
        except pydantic.ValidationError as error:
            raise ParallelismValueError(_explain(cls, error.errors())) from None

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, in plain types, for YAML and JSON; `from_dict` reads it back.

        A compiled pattern becomes "re:...", a module type "type:...".

        Raises:
            ParallelismTypeError: something has no form in a file: a function, a device mesh; names it.
        """
        return {
            field.name: _plain(getattr(self, field.name), f"{type(self).__name__}.{field.name}")
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        }


def _plain(value: Any, path: str) -> Any:
    match value:
        case FromDict():
            return value.to_dict()
        case Mapping():
            return {str(key): _plain(inner, f"{path}.{key}") for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, path) for inner in value]
        case re.Pattern():
            flags = value.flags & ~re.UNICODE
            return "re:" + (f"(?{_spell_flags(flags)})" if flags else "") + value.pattern
        case type():
            return f"type:{value.__module__}.{value.__qualname__}"
        case torch.dtype():
            return dtype_name(value)
        case StrEnum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
    raise ParallelismTypeError(f"{path} has no form in a file: {type(value).__name__}.")


def _spell_flags(flags: int) -> str:
    letters = {re.I: "i", re.L: "L", re.M: "m", re.S: "s", re.X: "x", re.A: "a"}
    return "".join(letter for flag, letter in letters.items() if flags & flag)


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
        elif error["type"] == "value_error":  # a dataclass's own words
            lines.append(": ".join([*filter(None, [".".join(path)]), str(error["ctx"]["error"])]))
        else:
            lines.append(f"{'.'.join(path)}: {error['msg']} (got {error['input']!r})")
    return f"{cls.__name__}: " + " ".join(lines)


def _field_names(cls: Any, path: Sequence[str]) -> set[str]:
    """The fields of the dataclass that lies at `path` below `cls`."""
    for part in path:
        hint = get_type_hints(cls).get(part)
        cls = next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), cls)
    return {field.name for field in dataclasses.fields(cls)}
