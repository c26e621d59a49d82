"""Collects everything that is wrong with a configuration, so that all of it is reported at once."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

from composer_dist.config.explain import explain
from composer_dist.config.yaml import KeyPath
from composer_dist.errors import WRONG, ParallelismError, ParallelismValueError, printable
from composer_dist.recipe import named
from composer_dist.recipe.other_libraries.keys import hint
from composer_dist.recipe.outline import mapping_of
from composer_dist.recipe.schema import (
    ChatData,
    Data,
    LabeledData,
    PreferenceData,
    RowData,
    Run,
    Source,
    TextData,
)
from composer_dist.recipe.source import Document, Problem, override, read_document
from composer_dist.recipe.sources.files import BUILT_IN, chat_template, files_of
from composer_dist.trainer.arguments import CHECKS
from composer_dist.users_code import is_of_users_code


class ConfigurationError(ParallelismValueError):
    """A configuration that cannot be run; says everything that is wrong with it, and where."""


@contextmanager
def blamed_on(document: Document, kinds: tuple[type[Exception], ...] = WRONG) -> Iterator[None]:
    """What cannot be made as the configuration asks is its fault; errors of the user's own code are not."""
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
        """What `schema` makes of the values at `path`; None if it rejects them."""
        adapter: Any = pydantic.TypeAdapter(schema)
        try:
            made = adapter.validate_python(values)
        except pydantic.ValidationError as error:
            for where, text in explain(schema, values, error, partial(self._hint, schema, path)):
                self.add(text, *path, *where)
            return None
        read = adapter.dump_python(made, by_alias=True, warnings=False)
        wrong = list(_not_numbers(values, read, path))
        self._found.extend(wrong)
        return None if wrong else made

    def _hint(self, schema: Any, path: KeyPath, name: str) -> str:
        """What another library's key is called here; a function of the user has arguments of its own."""
        if name in (foreign := getattr(schema, "foreign_keys", {})):
            return str(foreign[name])
        if "arguments" in path or path[:1] == ("callbacks",):
            return ""
        return hint(name, str(path[0]) if path else "")

    def lines(self) -> list[str]:
        """What is said about each problem, in the order of the file, and about each value once."""
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


def _not_numbers(given: Any, read: Any, path: KeyPath) -> Iterator[Problem]:
    """What pydantic reads as a number, though it is text or true; infinite ones, except for users' code."""
    if isinstance(given, dict):
        for key, value in given.items():
            inner = read.get(key, value) if isinstance(read, dict) else value
            yield from _not_numbers(value, inner, (*path, key))
    elif isinstance(given, list):
        inner = read if isinstance(read, list | tuple) else given
        for number, (value, one) in enumerate(zip(given, inner, strict=False)):
            yield from _not_numbers(value, one, (*path, number))
    elif isinstance(given, bool | str) and isinstance(read, int | float) and not isinstance(read, bool):
        yield Problem(path, f"expected a number, got {given!r}")
    elif isinstance(given, float) and not math.isfinite(given) and not _INFINITE.intersection(path):
        yield Problem(path, f"expected a finite number, got {given!r}")


def read_sections(file: Path, assignments: Sequence[str]) -> tuple[Document, Problems, Run | None]:
    """A configuration with its overrides, and what is wrong with it, as far as that is known without torch.

    Raises:
        ConfigurationError: the file cannot be read, or is not YAML.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        near = _near(file) if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(
            f"{file}: {reason}.{near} 'composer-dist init' writes a configuration."
        ) from None
    document, wrong = read_document(text, str(file))
    problems = Problems(document, wrong + override(document, assignments))
    if wrong:
        problems.settle()
    document.values.setdefault("out", f"runs/{file.stem}")
    for section in ("optimizer", "scheduler"):
        if isinstance(name := document.values.get(section), str):
            document.values[section] = {"name": name}
    run = problems.check(Run, document.values)
    _check_outline(document.values, problems)
    return document, problems, run


def _check_outline(values: dict[str, Any], problems: Problems) -> None:
    """What the sections name, and the arguments of what is known by a short name."""
    if isinstance(trainer := values.get("trainer"), dict):
        if trainer.get("max_duration") is None:
            text = "'max_duration' is missing: the length of the run, such as '3ep' or '1000ba'"
            problems.add(text, "trainer", "max_duration")
        problems.check(mapping_of("trainer"), trainer, "trainer")
        for key, check in CHECKS.items():
            if not problems.has("trainer", key):
                with problems.at("trainer", key):
                    check(trainer.get(key))
    for section in ("parallelism", "callbacks", "loggers", "checkpoints", "resume"):
        if isinstance(value := values.get(section), dict):
            problems.check(mapping_of(section), value, section)
    for section, known in (("optimizer", named.OPTIMIZERS), ("scheduler", named.SCHEDULERS)):
        value = values.get(section)
        if isinstance(value, dict) and isinstance(name := value.get("name"), str):
            problems.check(mapping_of(section, name), value, section)
            with problems.at(section, "name"):
                named.reference(section, known, name)
    for section, known in (("callbacks", named.CALLBACKS), ("loggers", named.LOGGERS)):
        for name in value if isinstance(value := values.get(section), dict) else ():
            with problems.at(section, name):
                named.reference(section.removesuffix("s"), known, str(name))


def _near(file: Path) -> str:
    """The sentence about the configuration in the same folder whose name is the closest, if one is close."""
    there = {one.stem: one for one in file.parent.glob("*.y*ml")}
    close = get_close_matches(file.stem, there, n=1)
    return f" Did you mean {str(there[close[0]])!r}?" if close else ""


def _check_files(data: Data, folder: Path, problems: Problems) -> None:
    """The files that the data is read from."""
    sources: dict[tuple[str, ...], Source | None] = {}
    match data:
        case TextData() if data.source not in BUILT_IN:
            sources["source",] = data.source
        case LabeledData():
            sources = {("classes", name): one for name, one in data.classes.items() if one not in BUILT_IN}
        case RowData():
            sources = {("source",): data.source, ("evaluate",): data.evaluate}
    for path, source in sources.items():
        if isinstance(source, str | list):
            with problems.at("data", *path):
                files_of(source)
    if isinstance(data, ChatData | PreferenceData):
        with problems.at("data", "chat_template"):
            chat_template(data, folder)


def faults_at_once(file: Path, assignments: Sequence[str], files: bool = False) -> list[str]:
    """What is wrong with a configuration, as far as that is known without torch.

    Args:
        file: of the configuration.
        assignments: its overrides.
        files: look for those of the data, too.

    Raises:
        ConfigurationError: the file cannot be read, or is not YAML, so that nothing else is known of it.
    """
    _, problems, run = read_sections(file, assignments)
    if files and run is not None:
        _check_files(run.data, file.parent, problems)
    return problems.lines()
