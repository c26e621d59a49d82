"""Collects everything that is wrong with a configuration, so that all of it is reported at once."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pydantic

from composer_dist.config.explain import explain
from composer_dist.config.yaml import KeyPath
from composer_dist.errors import WRONG, ParallelismError, ParallelismValueError, printable
from composer_dist.recipe.other_libraries.keys import hint
from composer_dist.recipe.source import Document, Problem
from composer_dist.users_code import is_of_users_code


class ConfigurationError(ParallelismValueError):
    """A configuration that cannot be run; reports everything that is wrong with it, and where."""


@contextmanager
def blamed_on(document: Document, kinds: tuple[type[Exception], ...] = WRONG) -> Iterator[None]:
    """Report errors of `kinds` as problems of the configuration, unless the user's own code raised them."""
    try:
        yield
    except kinds as error:
        if isinstance(error, ConfigurationError) or is_of_users_code(error):
            raise
        place = document.blamed(str(error))
        text = str(error).removeprefix(f"{place[1:-1]}: ")  # an override that the text names itself
        raise ConfigurationError(f"{place}: {text}") from error


class Problems:
    """The problems of one document."""

    def __init__(self, document: Document, known: Sequence[Problem] = ()) -> None:
        self._document = document
        self._found = list(known)

    def __len__(self) -> int:
        return len(self._found)

    def has(self, *path: str | int) -> bool:
        """Whether there is a problem of the value at `path`, or of something in it."""
        return any(problem.path[: len(path)] == path for problem in self._found)

    def add(self, text: str, *path: str | int) -> None:
        """Adds a problem of the value at `path`."""
        self._found.append(Problem(path, text))

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Adds what our own checks raise inside as a problem of the value at `path`."""
        try:
            yield
        except ParallelismError as error:
            if is_of_users_code(error):
                raise
            self.add(str(error).replace("\n", " "), *path)

    def check(self, schema: Any, values: Any, *path: str | int) -> Any:
        """What `schema` makes of the values at `path`; None if it rejects them.

        In `values`, numbers become those of the expected type, such as 20 for 20.0.
        """
        adapter: Any = pydantic.TypeAdapter(schema)
        try:
            made = adapter.validate_python(values)
        except pydantic.ValidationError as error:
            for where, text in explain(schema, values, error, partial(self._hint, schema, path)):
                self.add(text, *path, *where)
            return None
        read = adapter.dump_python(made, by_alias=True, warnings=False)
        wrong = list(_misread(values, read, path))
        self._found.extend(wrong)
        return None if wrong else made

    def _hint(self, schema: Any, path: KeyPath, where: KeyPath) -> str:
        """What another library's key is called here; a function of the user has arguments of its own."""
        *above, name = map(str, (*path, *where))
        if name in (foreign := getattr(schema, "foreign_keys", {})):
            return str(foreign[name])
        if "arguments" in above or above[:1] == ["callbacks"]:
            return ""
        return hint(name, above[0] if above else "")

    def lines(self) -> list[str]:
        """The message about each problem, in the order of the file, and about each value once."""
        first: dict[KeyPath | str, Problem] = {}
        for problem in self._found:
            first.setdefault(problem.path or problem.text, problem)
        return list(map(self._line, sorted(first.values(), key=self._document.order)))

    def settle(self) -> None:
        """Raises a ConfigurationError with all problems, each with its line, if there are any."""
        if self._found:
            raise ConfigurationError("\n".join(self.lines()))

    def _line(self, problem: Problem) -> str:
        path: KeyPath = problem.path
        named = f"{'.'.join(map(str, path))}: " if path else ""
        line = f"{self._document.place(problem)}: {named}{problem.text.removeprefix(named).removesuffix('.')}"
        return printable(line).replace("\n", " ")


_INFINITE = {"arguments", "norm_type"}
"""Keys under which a number need not be finite."""


def _misread(given: Any, read: Any, path: KeyPath) -> Iterator[Problem]:
    """What pydantic reads as a number or a boolean and is neither; infinite numbers, except for users' code.

    In `given`, numbers become those that have been read.
    """
    if isinstance(given, dict | list):
        for key, value in list(given.items() if isinstance(given, dict) else enumerate(given)):
            one = _inside(read, key, value)
            if type(value) in (int, float) and type(one) in (int, float):
                given[key] = one
            yield from _misread(value, one, (*path, key))
    elif isinstance(read, bool) and not isinstance(given, bool):
        yield Problem(path, f"expected true or false, got {given!r}")
    elif isinstance(given, bool | str) and isinstance(read, int | float) and not isinstance(read, bool):
        yield Problem(path, f"expected a number, got {given!r}")
    elif isinstance(given, float) and not math.isfinite(given) and not _INFINITE.intersection(path):
        yield Problem(path, f"expected a finite number, got {given!r}")


def _inside(read: Any, key: Any, value: Any) -> Any:
    """What has been read for a value of a mapping or a list; the value where that is not known."""
    if isinstance(read, dict):
        return read.get(key, value)
    return read[key] if isinstance(read, list | tuple) and isinstance(key, int) and key < len(read) else value
