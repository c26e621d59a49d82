"""What pydantic finds, told in the words of somebody who writes a configuration."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pydantic

from composer_dist.errors import ParallelismError
from composer_dist.recipe.source import Path, Problem
from composer_dist.wording import near_miss

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}


_MISSING = {"missing", "missing_argument"}


class Faults:
    """Collects what is wrong, so that all of it is told at once."""

    def __init__(self, problems: Sequence[Problem] = ()) -> None:
        self.problems = list(problems)

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """What our own checks raise inside is a problem of the value at `path`."""
        try:
            yield
        except ParallelismError as error:
            self.problems.append(Problem(path, str(error).replace("\n", " ")))

    def check(self, schema: Any, values: Any, path: Path = ()) -> Any:
        """What `schema` makes of the values at `path`; None if it refuses them."""
        try:
            return pydantic.TypeAdapter(schema).validate_python(values)
        except pydantic.ValidationError as error:
            self.problems += _explain(schema, values, path, error)
        return None


def _explain(schema: Any, values: Any, path: Path, error: pydantic.ValidationError) -> Iterator[Problem]:
    """One problem for each value that was refused, however many alternatives refused it."""
    texts: dict[Path, list[str]] = {}
    for one in error.errors(include_url=False):
        unnamed = one["type"] in _UNKNOWN | _MISSING
        where = _written(one["loc"], values, unnamed)
        known = _keys(schema, where[:-1], values) if unnamed else []
        # That it is not an object of Python's, which another alternative asks for, helps nobody.
        found = texts.setdefault(where, [])
        if one["type"] != "is_instance_of" or not found:
            found.append(_text(one, where, known))
    for where, found in texts.items():
        yield Problem(path + where, ", or ".join(dict.fromkeys(found)))


def _written(loc: Sequence[Any], values: Any, unnamed: bool) -> Path:
    """The part of pydantic's path that a reader has written: it also names alternatives of a type."""
    where: list[str | int] = []
    for number, part in enumerate(loc):
        inside = (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)
        )
        if inside:
            where.append(part)
            values = values[part]
        elif unnamed and number == len(loc) - 1:
            where.append(part)
    return tuple(where)


def _text(error: Any, where: Path, known: list[str]) -> str:
    name = where[-1] if where else ""
    match error["type"]:
        case kind if kind in _UNKNOWN:
            return f"unknown key {name!r}.{near_miss(str(name), known) or _among(known)}"
        case kind if kind in _MISSING:
            return f"{name!r} is missing"
        case "union_tag_not_found":
            return "'kind' is missing"
        case "union_tag_invalid":
            tag, expected = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"there is no kind {tag!r}.{near_miss(tag, expected)} There are {', '.join(expected)}"
        case "dict_type" | "model_type" | "model_attributes_type" | "dataclass_type":
            return f"{name} must be a mapping, key: value, not {error['input']!r}"
        case "literal_error":
            return f"{name} is {error['ctx']['expected']}, not {error['input']!r}"
        case "value_error":
            return str(error["ctx"]["error"])
    message = (
        error["msg"].removeprefix("Input should be ").removesuffix(", unable to parse string as a number")
    )
    return f"{name} must be {message}, not {error['input']!r}"


def _among(known: list[str]) -> str:
    return f" There are {', '.join(known)}." if known else ""


def _keys(schema: Any, path: Path, values: Any) -> list[str]:
    """The keys that `schema` knows at `path`."""
    kinds = [schema]
    for part in (*path, None):
        kinds = [kind for one in kinds for kind in _alternatives(one)]
        chosen = values.get("kind") if isinstance(values, Mapping) else None
        kinds = [kind for kind in kinds if _is_kind(kind, chosen)]
        if part is None:
            break
        values = values.get(part) if isinstance(values, Mapping) else None
        kinds = [_fields(kind)[str(part)] for kind in kinds if str(part) in _fields(kind)]
    return list(dict.fromkeys(name for kind in kinds for name in _fields(kind)))


def _alternatives(hint: Any) -> Iterator[Any]:
    """The classes with fields inside a type."""
    if isinstance(hint, type) and (issubclass(hint, pydantic.BaseModel) or dataclasses.is_dataclass(hint)):
        yield hint
    for inner in typing.get_args(hint):
        yield from _alternatives(inner)


def _is_kind(cls: Any, chosen: Any) -> bool:
    hint = _fields(cls).get("kind")
    return chosen is None or hint is None or chosen in typing.get_args(hint)


def _fields(cls: Any) -> dict[str, Any]:
    if issubclass(cls, pydantic.BaseModel):
        return {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
