"""Dotted overrides: `optimizer.lr=1e-3` changes one value of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from composer_dist.run.yaml_lines import Document, Path, Problem, value_of


def override(document: Document, assignments: Sequence[str]) -> list[Problem]:
    """Sets values of `document` in place; each assignment is `dotted.key=value`, the value as in YAML.

    Mappings on the way that are not there are made; a number picks an entry of a list.

    Returns:
        What could not be set, and why.
    """
    wrong = []
    for text in assignments:
        key, equals, raw = text.partition("=")
        keys: list[str | int] = list(key.strip().split("."))
        if not equals or not all(keys):
            wrong.append(f"{text!r} is no override; write key=value, as in optimizer.lr=1e-3")
            continue
        try:
            value = value_of(raw)
        except yaml.YAMLError:
            wrong.append(f"{text!r}: {raw!r} is no YAML value; quote it")
            continue
        if (fault := _set(document.values, keys, value)) is not None:
            wrong.append(f"{text!r}: {fault}")
            continue
        path: Path = tuple(keys)
        _forget(document, path)
        document.given[path] = text
    return [Problem((), text, typed=True) for text in wrong]


def _set(values: Any, path: list[str | int], value: Any) -> str | None:
    """Puts the value there; otherwise says why it cannot be. In `path`, places in lists become numbers."""
    holder = values
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(holder, list):
            if not str(key).isdigit() or int(key) >= len(holder):
                return (
                    f"{'.'.join(map(str, path[:depth]))} is a list of {len(holder)}; {key!r} is none of them"
                )
            key = path[depth] = int(key)
        elif not isinstance(holder, dict):
            above = ".".join(map(str, path[:depth]))
            return f"{above} is {holder!r}, which has no keys; give all of it, as in {above}='{{{key}: ...}}'"
        elif not last and holder.get(key) is None:
            holder[key] = {}
        if last:
            holder[key] = value
            return None
        holder = holder[key]
    return None


def _forget(document: Document, path: Path) -> None:
    """What the file said below `path` holds no more."""
    for known in [known for known in document.lines if known[: len(path)] == path]:
        del document.lines[known]
