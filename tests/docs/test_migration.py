"""Every row of the tables in docs/migration: what becomes what, and that nothing is left out.

The first row of a table says how it is read:

- "`composer` in YAML": the first cell of a row is converted as a file of that library, and the result is
  the second cell.
- "`package.Name`": the rows are arguments of that class, or names of that module, all of them for a class.
  The second cell has names of this library, arguments of the class in its first row, or expressions.
"""

import ast
import datetime
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic
import pytest
import torch
import yaml

import composer_dist
from composer_dist import checkpoint, distributed, trainer
from composer_dist.recipe.converting.convert import convert_values
from composer_dist.recipe.signature import arguments_of

pytestmark = pytest.mark.promise(141)
PAGES = sorted((Path(__file__).parents[2] / "docs" / "migration").glob("*.md"))
ABSENT = ("not here", "automatic")
Row = tuple[str, str, str]


def tables(page: Path) -> Iterator[tuple[Row, list[Row]]]:
    """The first row and the others of each table."""
    for text in re.findall(r"(?:^\|.+\|$\n?)+", page.read_text(), re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()]
        first, _, *others = [(a, b, c) for a, b, c in rows]
        yield first, others


def of_kind(wanted: str) -> list[Any]:
    """Parameters of a test: each table of that kind."""
    found = []
    for page in PAGES:
        for number, (first, rows) in enumerate(tables(page)):
            kind = "yaml" if first[0].endswith(" in YAML") else "python"
            if kind == wanted:
                found.append(pytest.param(first, rows, id=f"{page.stem}-{number}"))
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(("first", "rows"), of_kind("yaml"))
def test_a_row_of_yaml_is_what_the_conversion_does(first: Row, rows: list[Row]) -> None:
    (library,) = code(first[0])
    for theirs, ours, remark in rows:
        given: Any = yaml.safe_load(code(theirs)[0])
        done = convert_values(given, library)  # type: ignore[arg-type]
        assert done.values == yaml.safe_load(code(ours)[0]), theirs
        said = {one.key.split(".")[-1]: one.undecided for one in done.remarks}
        if remark.startswith(("not converted", "to decide")):
            keys = set(re.findall(r"\w+(?=:)", code(theirs)[0])) & said.keys()
            assert keys, f"{theirs}: {said}"
            assert remark.startswith("to decide") == any(said[key] for key in keys), theirs
        else:
            assert not any(said.values()), theirs


def known() -> dict[str, Any]:
    """The public names of this library, and what values of its arguments are made of."""
    names: dict[str, Any] = {"nn": torch.nn, "timedelta": datetime.timedelta}
    for module in (composer_dist, distributed, checkpoint, trainer):
        names |= {name: getattr(module, name) for name in module.__all__}
    try:
        from composer_dist.integrations.lightning import ComposerDistFabricStrategy
    except ImportError:
        return names
    return names | {"ComposerDistFabricStrategy": ComposerDistFabricStrategy}


def named(path: str) -> Any:
    """The object of a dotted path; None where the library is not installed."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other libraries may warn
                found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    return None


def check(text: str, target: Any, names: dict[str, Any]) -> None:
    """A name, an argument of the target with or without a value, or an expression that can be evaluated."""
    if isinstance(target, ModuleType) or not text.isidentifier():
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.keywords and not call.args:
            fields = {one.alias: one for one in arguments_of(target).model_fields.values()}
            for keyword in call.keywords:
                value = eval(ast.unparse(keyword.value), dict(names))
                hint: Any = fields[keyword.arg].annotation
                pydantic.TypeAdapter(hint, config={"arbitrary_types_allowed": True}).validate_python(value)
                if target.__name__ not in ("Trainer", "CheckpointSaver"):
                    target(**{str(keyword.arg): value})
            return
        eval(text, dict(names))
    elif text not in inspect.signature(target).parameters:
        assert text in names, text


@pytest.mark.parametrize(("first", "rows"), of_kind("python"))
def test_what_a_row_names_here_exists_and_is_accepted(first: Row, rows: list[Row]) -> None:
    (ours,) = code(first[1])
    if (target := named(ours)) is None:
        pytest.skip(f"{ours} needs its library")
    names = known()
    for _, cell, _ in rows:
        found = code(cell)
        assert found or cell in ABSENT, cell
        for text in found:
            check(text, target, names)


@pytest.mark.parametrize(("first", "rows"), of_kind("python"))
def test_what_a_row_names_there_exists_and_no_argument_is_left_out(first: Row, rows: list[Row]) -> None:
    (path,) = code(first[0])
    target = named(path)
    if target is None:
        pytest.skip(f"{path.partition('.')[0]} is not installed")
    listed = [name for theirs, _, _ in rows for name in code(theirs)]
    assert len(set(listed)) == len(listed)
    if isinstance(target, ModuleType):
        assert [name for name in listed if not hasattr(target, name)] == []
    else:
        there = [name for name in inspect.signature(target).parameters if not name.startswith("_")]
        assert sorted(listed) == sorted(there)
