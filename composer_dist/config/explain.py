"""Pydantic's errors in plain words: where the value is, what was expected, the closest valid key."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from composer_dist.wording import near_miss

if TYPE_CHECKING:
    import pydantic

    from composer_dist.config.yaml import KeyPath

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_MISSING = {"missing", "missing_argument"}
_MAPPINGS = {"dict_type", "model_type", "model_attributes_type", "dataclass_type"}


def explain(
    schema: Any,
    values: Any,
    error: pydantic.ValidationError,
    hint: Callable[[KeyPath], str] = lambda path: "",
) -> Iterator[tuple[KeyPath, str]]:
    """Each rejected value's key path and one reason, even if several alternatives of its type rejected it.

    Args:
        schema: what rejected the values.
        values: what the user wrote.
        error: pydantic's.
        hint: a sentence about the unknown key at a path, in place of the closest valid one; or "".
    """
    found: dict[KeyPath, list[dict[str, Any]]] = {}
    for one in error.errors(include_url=False):
        unnamed = one["type"] in _UNKNOWN | _MISSING
        found.setdefault(_written(one["loc"], values, unnamed), []).append(dict(one))
    for where, errors in found.items():
        if any(path != where and path[: len(where)] == where for path in found):
            continue  # the value fits one alternative so far; the error inside it is reported
        # A file cannot hold Python objects: mention them only if nothing else was expected.
        plain = [one for one in errors if one["type"] not in ("is_instance_of", "path_type")]
        known = _keys(schema, where[:-1], values)
        name = str(where[-1]) if where else ""
        chosen = ("kind",) if errors[0]["type"] == "union_tag_invalid" else ()
        yield (*where, *chosen), _text(plain or errors, name, known, partial(hint, where))


def unknown_key(name: str, known: Sequence[str], hint: str = "") -> str:
    """The message about a key that is not among the keys `known` of a mapping; `hint` comes first."""
    valid = f" Valid keys: {', '.join(known)}" if known else ""
    return f"unknown key {name!r}.{hint or near_miss(name, known) or valid}"


def _text(errors: Sequence[dict[str, Any]], name: str, known: list[str], hint: Callable[[], str]) -> str:
    said: list[str] = []
    expected: list[str] = []
    for error in errors:
        context = error.get("ctx", {})
        match error["type"]:
            case kind if kind in _UNKNOWN:
                said.append(unknown_key(name, known, hint()))
            case kind if kind in _MISSING:
                said.append("missing, the list is too short" if name.isdigit() else f"{name!r} is missing")
            case "union_tag_not_found":
                said.append("'kind' is missing")
            case "union_tag_invalid":
                tag, kinds = context["tag"], context["expected_tags"].replace("'", "").split(", ")
                said.append(f"unknown kind {tag!r}.{near_miss(tag, kinds)} Valid kinds: {', '.join(kinds)}")
            case "value_error":
                said.append(str(context["error"]).removesuffix("."))
            case kind if kind in _MAPPINGS:
                expected.append("a mapping")
            case "path_type":
                expected.append("a path")
            case "too_long":
                expected.append(f"at most {context['max_length']} values")
            case "too_short":
                expected.append(f"at least {context['min_length']} value(s)")
            case _:
                text = error["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
                text = re.sub("^(?=greater|less)", "a number ", text)
                text = re.split(", unable to|, got a number", text)[0].replace("a int", "an int")
                text = text.replace("a dictionary", "a mapping")
                expected += ["true", "false"] if text == "a boolean" else [text]
    if expected:
        *others, last = dict.fromkeys(expected)
        wanted = f"{', '.join(others)} or {last}" if others else last
        said.append(f"expected {wanted}, got {errors[-1]['input']!r}")
    return ", or ".join(dict.fromkeys(said))


def _written(loc: Sequence[Any], values: Any, unnamed: bool) -> KeyPath:
    """The part of pydantic's path that the user wrote, without the alternatives of a type."""
    where: list[str | int] = []
    for number, part in enumerate(loc):
        if (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)
        ):
            where.append(part)
            values = values[part]
        elif unnamed and number == len(loc) - 1:
            where.append(part)
    return tuple(where)


def _keys(schema: Any, path: KeyPath, values: Any) -> list[str]:
    """The keys that `schema` has at `path`."""
    kinds = [schema]
    for part in (*path, None):
        chosen = values.get("kind") if isinstance(values, Mapping) else None
        kinds = [kind for one in kinds for kind in _alternatives(one) if _is_kind(kind, chosen)]
        if part is None:
            break
        if isinstance(values, Sequence) and isinstance(part, int):
            values = values[part]
            continue
        values = values.get(part) if isinstance(values, Mapping) else None
        kinds = [_fields(kind)[str(part)] for kind in kinds if str(part) in _fields(kind)]
    return list(dict.fromkeys(name for kind in kinds for name in _fields(kind)))


def _alternatives(hint: Any) -> Iterator[Any]:
    """The classes with fields inside a type."""
    if isinstance(hint, type) and (hasattr(hint, "model_fields") or dataclasses.is_dataclass(hint)):
        yield hint
    for inner in typing.get_args(hint):
        yield from _alternatives(inner)


def _is_kind(cls: Any, chosen: Any) -> bool:
    hint = _fields(cls).get("kind")
    return chosen is None or hint is None or chosen in typing.get_args(hint)


def _fields(cls: Any) -> dict[str, Any]:
    if hasattr(cls, "model_fields"):  # of pydantic
        return {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
