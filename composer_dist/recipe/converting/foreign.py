"""A configuration of another library: what each key becomes here, and what is left over."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_dist.config.yaml import KeyPath
from composer_dist.recipe.other_libraries.keys import KEYS
from composer_dist.recipe.problems import ConfigurationError, Problems
from composer_dist.recipe.source import Document, read_document

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""A value of the same file, as OmegaConf writes it."""
_DEEPEST = 10


@dataclass(frozen=True)
class Remark:
    """Why a key has not become one of ours."""

    key: str
    text: str
    line: int | None
    undecided: bool = False
    """The user must choose something before the result trains the same way."""

    def __str__(self) -> str:
        where = f"line {self.line}, " if self.line else ""
        return f"{where}{self.key}: {self.text.removesuffix('.')}"


class Foreign:
    """The keys of a file: those that were read, and what they became."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.values: Any = document.values
        self.ours: dict[str, Any] = {}
        """What the file becomes."""
        self.origins: dict[KeyPath, int] = {}
        """The line from which each of our values comes."""
        self.remarks: list[Remark] = []
        self._read: set[KeyPath] = set()

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path, which remains unread; `default` where there is none, or null."""
        found = self.values
        for key in path:
            if isinstance(found, list) and key in range(len(found)):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return default
        return default if found is None else found

    def mapping(self, *path: str | int) -> dict[Any, Any]:
        """The mapping at a path, which remains unread; empty where there is none.

        Raises:
            ConfigurationError: there is something else.
        """
        return self._of_type(dict, "a mapping of keys to values", *path)  # type: ignore[no-any-return]

    def entries(self, *path: str | int) -> list[Any]:
        """The list at a path, likewise."""
        return self._of_type(list, "a list", *path)  # type: ignore[no-any-return]

    def _of_type(self, kind: type, name: str, *path: str | int) -> Any:
        found = self.get(*path, default=kind())
        if not isinstance(found, kind):
            raise self.wrong(f"expected {name}, got {found!r}", *path)
        return found

    def number(self, default: float | None, *path: str | int) -> Any:
        """The number at a path, which counts as read; an integer where the default is one.

        Raises:
            ConfigurationError: it is not a number, or not an integer.
        """
        found = self.take(*path, default=default)
        kind = int if isinstance(default, int) else float
        try:
            if not isinstance(found, bool | None):
                return kind(found)
        except (TypeError, ValueError):
            pass
        if found is None:
            return None
        raise self.wrong(f"expected {'an integer' if kind is int else 'a number'}, got {found!r}", *path)

    def take(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path, which counts as read, with everything in it."""
        self._read.add(path)
        return self.get(*path, default=default)

    def put(self, value: Any, ours: str, *path: str | int) -> None:
        """Makes `value` the value of our key, such as "trainer.precision"; it comes from `path` there."""
        keys = tuple(ours.split("."))
        inner = self.ours
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
        if (line := self.line(path)) is not None:
            self.origins[keys] = line

    def move(self, ours: str, *path: str | int) -> None:
        """The value at `path`, if there is one, becomes the value of our key."""
        if (value := self.take(*path)) is not None:
            self.put(value, ours, *path)

    def drop(self, text: str, *path: str | int, undecided: bool = False) -> None:
        """Says why the key at `path`, if it has a value and was not read before, is not one of ours."""
        if path in self._read:
            return
        value = self.take(*path)
        if value is not None and value is not False and value != {}:
            self.remark(text, *path, undecided=undecided)

    def remark(self, text: str, *path: str | int, undecided: bool = True) -> None:
        """Adds a remark about a path."""
        key = ".".join(map(str, path)) or "the file"
        self.remarks.append(Remark(key, text, self.line(path), undecided))

    def line(self, path: KeyPath) -> int | None:
        """The line of a path, or of the nearest one above it."""
        for length in range(len(path), 0, -1):
            for one in (path[:length], tuple(map(str, path[:length]))):
                if one in self.document.lines:
                    return self.document.lines[one]
        return None

    @property
    def name(self) -> str:
        """The file's name."""
        return self.document.source

    def one_of(self, known: Collection[str], remedy: str, *path: str | int, default: str = "") -> str:
        """The value at `path` in upper case, one of `known`.

        Raises:
            ConfigurationError: it is another; names the line, the key and the remedy.
        """
        value = str(self.take(*path, default=default)).upper().rpartition(".")[2]
        if value and value not in known:
            raise self.wrong(f"{value} is not one of {', '.join(known)}. {remedy}", *path)
        return value

    def wrong(self, text: str, *path: str | int) -> ConfigurationError:
        """The error about the value at `path`."""
        line = self.line(path)
        where = self.name if line is None else f"{self.name}:{line}"
        key = f"{'.'.join(map(str, path))}: " if path else ""
        return ConfigurationError(f"{where}: {key}{text.removesuffix('.')}")

    def finish(self) -> None:
        """Adds a remark for every key that nobody has read."""
        for path in self._unread(self.values, ()):
            name = re.sub(r"^fsdp_(?=fsdp)", "", str(path[-1]).lower().replace("-", "_"))
            here = KEYS.get(name)
            self.remark(f"here it is {here}" if here else "has no counterpart", *path, undecided=False)
        order = {id(one): number for number, one in enumerate(self.remarks)}
        self.remarks.sort(key=lambda one: (one.line or 0, order[id(one)]))

    def _unread(self, value: Any, path: KeyPath) -> Iterator[KeyPath]:
        if path in self._read or value is None:
            return
        partly = not path or any(one[: len(path)] == path for one in self._read)
        if partly and isinstance(value, Mapping | list):
            for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
                yield from self._unread(inner, (*path, key))
        else:
            yield path


def read_foreign(file: Path) -> Foreign:
    """Reads a YAML or JSON file of another library.

    Raises:
        ConfigurationError: it cannot be read, is neither, or refers to values that do not exist.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigurationError(f"{file}: {reason}. Give a YAML or JSON file.") from None
    # Lightning's files have sets of YAML, which are mappings without values.
    document, faults = read_document(re.sub(r"!!set\b", "", text), str(file))
    problems = Problems(document, faults)
    if not faults and not document.values:
        problems.add("the file has no keys, so there is nothing to convert")
    problems.settle()
    foreign = Foreign(document)
    foreign.values = _resolved(foreign, foreign.values, (), 0)
    return foreign


def foreign_of(values: Mapping[str, Any]) -> Foreign:
    """The same for values that are in memory."""
    foreign = Foreign(Document(dict(values), "configuration"))
    foreign.values = _resolved(foreign, foreign.values, (), 0)
    return foreign


def _resolved(foreign: Foreign, value: Any, path: KeyPath, depth: int) -> Any:
    """The value with references such as `${variables.seed}` replaced by what they name.

    Raises:
        ConfigurationError: they name nothing, or themselves, or OmegaConf would compute them.
    """
    if isinstance(value, dict):
        return {key: _resolved(foreign, inner, (*path, key), depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(foreign, inner, (*path, index), depth) for index, inner in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _DEEPEST:
        raise foreign.wrong(f"{value} refers to itself; write the value", *path)
    if whole := _REFERENCE.fullmatch(value):
        return _resolved(foreign, _named(foreign, whole[1], path), path, depth + 1)
    text = _REFERENCE.sub(lambda found: str(_named(foreign, found[1], path)), value)
    if "${" not in text:
        return text
    if text == value:
        raise foreign.wrong(f"{value} is computed by OmegaConf; write the value", *path)
    return _resolved(foreign, text, path, depth + 1)


def _named(foreign: Foreign, name: str, path: KeyPath) -> Any:
    found: Any = foreign.document.values
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            raise foreign.wrong(f"${{{name}}} names nothing in this file; write the value", *path)
        found = found[key]
    return found
