"""Things that a configuration names: `package.module.Name`, or `file.py:Name` beside the configuration."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_dist.distributed.from_dict import near_miss
from composer_dist.errors import ParallelismValueError


def resolve(reference: str, folder: Path) -> Any:
    """The object that `reference` names.

    Args:
        reference: `package.module.Name`, `package.module:Name` or `file.py:Name`.
        folder: where files are looked for: the configuration's.

    Raises:
        ParallelismValueError: there is no such thing, or importing it failed.
    """
    where, colon, name = reference.rpartition(":")
    if not colon:
        where, _, name = reference.rpartition(".")
    if not where or not name:
        raise ParallelismValueError(
            f"{reference!r} names nothing; write package.module.Name, or file.py:Name for a file beside "
            "the configuration."
        )
    module = _load(folder / where) if where.endswith(".py") else _import(where)
    if not hasattr(module, name):
        raise ParallelismValueError(f"{where} has no {name!r}.{near_miss(name, vars(module))}")
    return getattr(module, name)


def _load(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise ParallelismValueError(f"There is no file {file}.")
    name = f"composer_dist_run_{file.stem}"
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(file):
        return known  # one module object, so that classes stay the same and pickle
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ParallelismValueError(f"{file} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ParallelismValueError(f"{name} cannot be imported: {error}.") from error
