"""Reads YAML with the line of each value, and reports what is wrong with the text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

_DEEPEST = 60
_MOST = 100_000
_LONGEST = 1000
"""Characters of a number or a date; reading a longer one takes quadratic time."""
_NUMBERS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
_SPELLINGS = (*_NUMBERS, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")
"""What has several spellings: true and True, 1 and 1.0."""
_OTHER_BASES = re.compile("^[-+]?0[0-7_]+$|:")
"""YAML 1.1 reads 010 as 8, and 1:30 as 90."""
_OPEN = -1


@dataclass
class Parsed:
    """A YAML text after reading."""

    values: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """The line of each value, from 1; for a value of a mapping the line of its key."""
    faults: list[tuple[KeyPath, int | None, str]] = field(default_factory=list)
    """Syntax errors and duplicate keys: the key path, the line if it is known, and the error."""


def parse(text: str) -> Parsed:
    """The values of a YAML text, their lines, and what is wrong with it."""
    found = Parsed()
    try:
        root = _compose(text)
        if root is not None:
            for path, node, key in _walk(root, (), found):
                found.lines[path] = (key or node).start_mark.line + 1
            found.values = _Loader("").construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        text = str(getattr(error, "problem", None) or error)
        found.faults.append(
            ((), None if mark is None else mark.line + 1, f"not valid YAML: {text}{_hint(text)}")
        )
    return found


def parse_value(text: str) -> Any:
    """The value that `text` has in YAML.

    Raises:
        yaml.YAMLError: it is not valid YAML.
    """
    found = parse(text)
    if found.faults:
        raise yaml.YAMLError(found.faults[0][2])
    return found.values


def _compose(text: str) -> yaml.Node | None:
    """The nodes of a text, which are not too many or too deep to read.

    Raises:
        yaml.YAMLError: they are, or it is not valid YAML.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError(f"values are nested more than {_DEEPEST} levels deep") from None
    if root is not None:
        _count(root, 0, {})
    return root


def _count(node: yaml.Node, depth: int, known: dict[int, int]) -> int:
    """How many values a node has, with its aliases written out."""
    if known.get(id(node)) == _OPEN:
        raise _problem(node, "an alias refers to a value that contains it")
    if depth > _DEEPEST:
        raise _problem(node, f"values are nested more than {_DEEPEST} levels deep")
    if id(node) not in known:
        known[id(node)] = _OPEN
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in inner for part in pair] if pairs else inner
        known[id(node)] = 1 + sum(_count(part, depth + 1, known) for part in parts)
    if known[id(node)] > _MOST:
        raise _problem(node, f"there are more than {_MOST} values, with aliases written out")
    return known[id(node)]


def _problem(node: yaml.Node, text: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.1, except that 1e-3 is a number, on, off, yes and no are strings, and 010 and 1:30 errors."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; what cannot be one, such as the date 2026-99-99, is an error with its line."""
        try:
            if node.tag in _NUMBERS and len(node.value) > _LONGEST:
                raise ValueError("too long")
            if node.tag in _NUMBERS[:2] and _OTHER_BASES.search(node.value):
                raise ValueError("of base 8 or 60")
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError, AttributeError) as error:
            raise _problem(node, f"{str(node.value)[:40]!r} is not a valid value") from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _walk(
    node: yaml.Node, path: KeyPath, found: Parsed
) -> Iterator[tuple[KeyPath, yaml.Node, yaml.Node | None]]:
    """Every value below `node`, with its key in a mapping; notes duplicate keys, which YAML would accept."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value, None
            yield from _walk(value, (*path, index), found)
    elif isinstance(node, yaml.MappingNode):
        first: dict[Any, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            same = {name, _Loader("").construct_object(key) if key.tag in _SPELLINGS else name}
            if known := [first[one] for one in same if one in first]:
                text = f"duplicate key {name!r}, first on line {known[0]}"
                text += "; write all mappings in one: <<: [*a, *b]" if name == "<<" else ""
                found.faults.append(((*path, name), line, text))
            for one in same:
                first.setdefault(one, line)
            yield (*path, name), value, key
            yield from _walk(value, (*path, name), found)


def _hint(problem: str) -> str:
    """The most frequent cause of an error of YAML's scanner."""
    if "'\\t'" in problem:
        return " (a tab: YAML indents with spaces)"
    if "mapping values are not allowed here" in problem:
        return " (one space too many at the start of the line, or a value with ': ' in it that needs quotes)"
    return ""
