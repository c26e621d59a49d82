"""Configurations from dictionaries, validated with clear errors, and back."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

import torch

from composer_dist.config.explain import explain
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import dtype_name

ActivationCheckpointing = bool | str | tuple[str, Mapping[str, Any] | None] | list[Any] | None
Compile = bool | Mapping[str, Any] | None


def names_of(field: str, names: Sequence[str]) -> tuple[str, ...]:
    """A sequence of strings as a tuple."""
    if (
        not isinstance(names, Iterable)
        or isinstance(names, str)
        or not all(isinstance(n, str) for n in names)
    ):
        raise ParallelismTypeError(f"{field} must be a sequence of names, not {names!r}.")
    return tuple(names)


def require(name: str, value: object, known: Sequence[object]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in known:
        raise ParallelismValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}.")


class FromDict:
    """Gives a dataclass `from_dict`, with validation, and `to_dict`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "arbitrary_types_allowed": True}

    foreign_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of other libraries to a sentence that says what they are called here."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build this configuration from a dictionary; nested configurations may be dictionaries too.

        Raises:
            ParallelismValueError: lists all unknown keys (with the closest valid one) and all wrong values.
        """
        import pydantic  # only where a dictionary comes in: importing it costs 0.1 s

        try:
            return pydantic.TypeAdapter(cls).validate_python(dict(values))
        except pydantic.ValidationError as error:
            hint = lambda path: cls.foreign_keys.get(str(path[-1]), "")  # noqa: E731
            lines = [
                f"{'.'.join([cls.__name__, *map(str, path)])}: {text}"
                for path, text in explain(cls, values, error, hint)
            ]
            raise ParallelismValueError("\n".join(lines)) from None

    def to_dict(self) -> dict[str, Any]:
        """The values that differ from the defaults, in plain types; `from_dict` reads them back.

        A compiled pattern becomes "re:...", a module type "type:...".

        Raises:
            ParallelismTypeError: names a value that a file cannot hold, such as a function or a device mesh.
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
            letters = {re.I: "i", re.L: "L", re.M: "m", re.S: "s", re.X: "x", re.A: "a"}
            flags = "".join(letter for flag, letter in letters.items() if value.flags & flag)
            return "re:" + (f"(?{flags})" if flags else "") + value.pattern
        case type():
            return f"type:{value.__module__}.{value.__qualname__}"
        case torch.dtype():
            return dtype_name(value)
        case StrEnum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
    raise ParallelismTypeError(f"{path} cannot be written to a file: it is a {type(value).__name__}.")
