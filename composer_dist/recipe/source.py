"""A YAML file as plain values, and for each of them the line on which it stands.

MERGED: Dotted overrides: `optimizer.lr=1e-3` changes one value of a configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""The keys and indices that lead to a value."""


_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")


@dataclass(frozen=True)
class Problem:
    """Something wrong in a configuration, and where."""

    path: Path
    text: str
    line: int | None = None
    """Known beforehand only for what is wrong with the YAML itself."""
    typed: bool = False
    """It is on the command line, not in the file."""


@dataclass
class Document:
    """A configuration as it was written."""

    values: dict[str, Any]
    source: str = "configuration"
    """What messages call it: the file's name."""
    lines: dict[Path, int] = field(default_factory=dict)
    given: dict[Path, str] = field(default_factory=dict)
    """The overrides, as they were typed."""

    def place(self, problem: Problem) -> str:
        """Where a problem is: "run.yaml:12", or the override that brought it in."""
        for length in range(len(problem.path), -1, -1):
            path = problem.path[:length]
            if path in self.given:
                return repr(self.given[path])
            if length and path in self.lines:
                return f"{self.source}:{self.lines[path]}"
        if problem.typed:
            return "command line"
        return self.source if problem.line is None else f"{self.source}:{problem.line}"

    def order(self, problem: Problem) -> float:
        """Problems are told from the top of the file to its bottom, then those without a line."""
        known = (self.lines.get(problem.path[:end]) for end in range(len(problem.path), 0, -1))
        return problem.line or next((line for line in known if line), math.inf)


def parse(text: str, source: str) -> tuple[Document, list[Problem]]:
    """Reads YAML: its values, and what is wrong with it: syntax, keys that come twice, no mapping."""
    document = Document({}, source)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        return document, [Problem((), f"not valid YAML: {error.problem}{_hint(error)}", line)]
    except yaml.YAMLError as error:
        return document, [Problem((), f"not valid YAML: {error}")]
    if root is None:
        return document, []
    if not isinstance(root, yaml.MappingNode):
        return document, [Problem((), "the file must be a mapping of keys to values", 1)]
    problems = list(_twice(root, ()))
    for path, node in _walk(root, ()):
        document.lines[path] = node.start_mark.line + 1
    loader = _Loader("")
    try:
        document.values = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problems.append(Problem((), f"not valid YAML: {error.problem}", line))
    return document, problems


def value_of(text: str) -> Any:
    """The value that `text` stands for in YAML.

    Raises:
        yaml.YAMLError: it is not valid YAML.
    """
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.1, but 1e-3 is a number, as everybody expects, and on, off, yes and no are words."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _walk(node: yaml.Node, path: Path) -> Iterator[tuple[Path, yaml.Node]]:
    """Every value below `node`; a mapping's is on the line of its key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key
            yield from _walk(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value
            yield from _walk(value, (*path, index))


def _twice(node: yaml.Node, path: Path) -> Iterator[Problem]:
    """Keys that come twice in one mapping, of which YAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in first and key.value != "<<":
                text = f"{_spell((*path, key.value))} comes twice; first on line {first[key.value]}"
                yield Problem((*path, str(key.value)), text, line)
            first.setdefault(key.value, line)
            yield from _twice(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _twice(value, (*path, index))


def _spell(path: Path) -> str:
    return ".".join(map(str, path))


def _hint(error: yaml.MarkedYAMLError) -> str:
    """What most often is behind a message of the scanner's."""
    text = str(error.problem)
    if "'\\t'" in text:
        return " (a tab: YAML indents with spaces)"
    if "mapping values are not allowed here" in text:
        return " (a space too many at the start of the line, or a value with ': ' in it that needs quotes)"
    return ""


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
