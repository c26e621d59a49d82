"""Collects everything that is wrong with a configuration, so that all of it is reported at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pydantic

from composer_dist.config.explain import explain
from composer_dist.config.yaml import KeyPath
from composer_dist.errors import WRONG, ParallelismError, ParallelismValueError
from composer_dist.recipe.other_libraries.keys import hint
from composer_dist.recipe.source import Document, Problem


class ConfigurationError(ParallelismValueError):
    """A configuration that cannot be run; says everything that is wrong with it, and where."""


@contextmanager
def blamed_on(document: Document, kinds: tuple[type[Exception], ...] = WRONG) -> Iterator[None]:
    """What cannot be made as the configuration asks is its fault, and not the run's."""
    try:
        yield
    except ConfigurationError:
        raise
    except kinds as error:
        raise ConfigurationError(f"{document.source}: {error}") from error


class Problems:
    """The problems of one document."""

    def __init__(self, document: Document, known: Sequence[Problem] = ()) -> None:
        self._document = document
        self._found = list(known)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, text: str, *path: str | int) -> None:
        """Adds a problem of the value at `path`."""
        self._found.append(Problem(path, text))

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Adds what our own checks raise inside as a problem of the value at `path`."""
        try:
            yield
        except ParallelismError as error:
            self.add(str(error).replace("\n", " "), *path)

    def check(self, schema: Any, values: Any, *path: str | int) -> Any:
        """What `schema` makes of the values at `path`; None if it rejects them."""
        try:
            return pydantic.TypeAdapter(schema).validate_python(values)
        except pydantic.ValidationError as error:
            for where, text in explain(schema, values, error, partial(self._hint, schema, path)):
                self.add(text, *path, *where)
        return None

    def _hint(self, schema: Any, path: KeyPath, name: str) -> str:
        """What another library's key is called here; a function of the user has arguments of its own."""
        if name in (foreign := getattr(schema, "foreign_keys", {})):
            return str(foreign[name])
        if "arguments" in path or path[:1] == ("callbacks",):
            return ""
        return hint(name, str(path[0]) if path else "")

    def settle(self) -> None:
        """Raises a ConfigurationError with all problems, each with its line, if there are any."""
        if self._found:
            raise ConfigurationError(
                "\n".join(map(self._line, sorted(self._found, key=self._document.order)))
            )

    def _line(self, problem: Problem) -> str:
        path: KeyPath = problem.path
        named = f"{'.'.join(map(str, path))}: " if path else ""
        return f"{self._document.place(problem)}: {named}{problem.text.removesuffix('.')}"
