"""A configuration as the user wrote it: the file, and the values that the command line replaces in it."""

import math
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import yaml

from composer_dist.config.yaml import KeyPath, parse, parse_value


@dataclass(frozen=True)
class Problem:
    """Something wrong in a configuration, and where."""

    path: KeyPath
    text: str
    line: int | None = None
    """Set where the YAML itself is wrong."""
    typed: bool = False
    """It is on the command line, not in the file."""


@dataclass
class Document:
    """The values of a configuration and where they come from."""

    values: dict[str, Any]
    source: str = "configuration"
    """The file's name."""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    given: dict[KeyPath, str] = field(default_factory=dict)
    """The overrides, as they were typed."""

    def place(self, problem: Problem) -> str:
        """Where a problem is: "run.yaml:12", or the override that caused it."""
        for length in range(len(problem.path), -1, -1):
            path = problem.path[:length]
            if path in self.given:
                return repr(self.given[path])
            if length and path in self.lines:
                return f"{self.source}:{self.lines[path]}"
        if problem.typed:
            return "command line"
        return self.source if problem.line is None else f"{self.source}:{problem.line}"

    def blamed(self, text: str) -> str:
        """The override whose key or value an error's text names, or the file."""
        for path, typed in self.given.items():
            key, value = ".".join(map(str, path)), typed.partition("=")[2]
            if (re.search(rf"(?<![\w.]){re.escape(key)}\b", text) and "." in key) or repr(value) in text:
                return repr(typed)
        return self.source

    def order(self, problem: Problem) -> float:
        """Sorts problems from the top of the file to its bottom, then those without a line."""
        known = (self.lines.get(problem.path[:end]) for end in range(len(problem.path), 0, -1))
        return problem.line or next((line for line in known if line), math.inf)


def read_document(text: str, source: str) -> tuple[Document, list[Problem]]:
    """The document of a YAML text, and what is wrong with the text."""
    found = parse(text)
    problems = [Problem(path, what, line) for path, line, what in found.faults]
    if not isinstance(found.values, dict | None):
        problems.append(Problem((), "the file must be a mapping of keys to values", 1))
    values = found.values if isinstance(found.values, dict) else {}
    return Document(values, source, found.lines), problems


_NAMED = {"optimizer": "name", "scheduler": "name", "parallelism": "strategy"}
"""Sections that may be a name alone, and the key that it has beside others."""


def override(document: Document, assignments: Sequence[str]) -> list[Problem]:
    """Sets values of `document` in place; each assignment is `dotted.key=value`, with the value in YAML.

    Missing mappings on the way are created; a number picks an entry of a list. A section that is only a name
    keeps it.

    Returns:
        What could not be set, and why.
    """
    wrong = []
    for text in assignments:
        key, equals, raw = text.partition("=")
        keys: list[str | int] = list(key.strip().split("."))
        if not equals or not all(keys):
            wrong.append(f"{text!r} is not an override: expected key=value, as in optimizer.lr=1e-3")
            continue
        try:
            value = parse_value(raw)
        except yaml.YAMLError as error:
            duplicate = str(error).startswith("duplicate")
            wrong.append(f"{text!r}: {error if duplicate else f'{raw!r} is not valid YAML; quote it'}")
            continue
        section, named = keys[0], document.values.get(str(keys[0]))
        if len(keys) > 1 and section in _NAMED and isinstance(named, str):
            document.values[section] = {_NAMED[section]: named}
        if (fault := _set(document.values, keys, value)) is not None:
            wrong.append(f"{text!r}: {fault}")
            continue
        path = tuple(keys)
        for replaced in [known for known in document.lines if known[: len(path)] == path]:
            del document.lines[replaced]
        document.given[path] = text
    return [Problem((), text, typed=True) for text in wrong]


def _set(values: Any, path: list[str | int], value: Any) -> str | None:
    """Sets the value or returns why it cannot be set. Places in lists become numbers in `path`."""
    for depth, key in enumerate(path):
        above, last = ".".join(map(str, path[:depth])), depth == len(path) - 1
        if isinstance(values, list):
            if str(key) not in map(str, range(len(values))):
                return f"{above} is a list of {len(values)} and has no entry {key!r}"
            key = path[depth] = int(key)
        elif isinstance(values, dict):
            key = next((known for known in values if str(known) == key), key)  # a number, in `phases`
            values.setdefault(key, None)
        else:
            return f"{above} is {values!r}, which has no keys; replace all of it: {above}='{{{key}: ...}}'"
        # A copy of what is on the way, which may be in several places by an alias.
        values[key] = value if last else {} if values[key] is None else copy(values[key])
        values = values[key]
    return None
