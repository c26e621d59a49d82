"""The keys of transformers' configurations, read from its source: importing it takes seconds."""

import ast
import re
import runpy
from collections.abc import Callable, Collection, Mapping, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from composer_dist.recipe.problems import Problems
from composer_dist.wording import near_miss


class Keys(NamedTuple):
    """What a configuration takes."""

    kind: str
    """Its class."""
    fields: Collection[str]


_ALWAYS = {"model_type", "torch_dtype"}
"""Keys that every configuration takes."""


def imported_keys(model_type: str, wanted: Set[str] = frozenset()) -> Keys:
    """Those of transformers' class; all of them, whatever is wanted."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    fields = {field for base in kind.__mro__ for field in getattr(base, "__annotations__", {})}
    return Keys(kind.__name__, fields | kind.attribute_map.keys())


def written_keys(model_type: str, wanted: Set[str] = frozenset()) -> Keys | None:
    """The same from the source; None if that is not written as expected.

    Args:
        model_type: what `written_types` has.
        wanted: if given, base classes are read only if keys of these are still missing.
    """
    types, folders = _written()
    folder = folders.get(model_type, model_type).replace("-", "_")
    try:
        kind = types[model_type]
        fields, renamed = _fields(_models() / folder / f"configuration_{folder}.py", kind, wanted)
    except (OSError, LookupError, SyntaxError, TypeError, ValueError):
        return None
    return Keys(kind, fields | (renamed or set()))


def written_types() -> Collection[str]:
    """The `model_type`s that transformers has; none if they are not written as expected."""
    return _written()[0].keys()


def check_configuration(
    config: Mapping[str, Any],
    types: Collection[str],
    keys_of: Callable[[str, Set[str]], Keys | None],
    problems: Problems,
) -> None:
    """Find misspelled keys, which transformers would ignore.

    Args:
        config: the arguments of a configuration, and its `model_type`.
        types: all `model_type`s, or none if they are unknown.
        keys_of: gives the keys of one of them, all if one that is wanted is not among them.
        problems: what is found is added to them.
    """
    path = ("model", "config")
    if (kind := config.get("model_type")) is None:
        problems.add("'model_type' is missing: 'llama', 'bert', 'qwen3', ...", *path)
    elif not isinstance(kind, str) or kind not in types:
        if types:
            near = near_miss(str(kind), types)
            problems.add(f"transformers has no model {kind!r}.{near}", *path, "model_type")
    elif (keys := keys_of(kind, config.keys() - _ALWAYS)) is not None:
        known = {*keys.fields, "num_labels", "attn_implementation"}  # of the constructor alone
        for key in config.keys() & {"dtype", "torch_dtype"}:
            problems.add("the dtype of the weights is model.dtype here", *path, key)
        for key in config.keys() - known - _ALWAYS:
            text = f"unknown key {key!r}: {keys.kind} does not have it.{near_miss(str(key), known)}"
            problems.add(text, *path, key)


def _models() -> Path:
    found = find_spec("transformers")
    if found is None or found.origin is None:
        raise FileNotFoundError("transformers")
    return Path(found.origin).parent / "models"


@cache
def _written() -> tuple[dict[str, str], dict[str, str]]:
    """The class of each `model_type`, and its folder where that has another name."""
    try:
        auto = _models() / "auto"
        read = runpy.run_path(str(auto / "auto_mappings.py"))  # imports nothing but collections
        more = _PAIRS.findall((auto / "configuration_auto.py").read_text())
        return dict(more) | read["CONFIG_MAPPING_NAMES"], read["SPECIAL_MODEL_TYPE_TO_MODULE_NAME"]
    except (OSError, LookupError):
        return {}, {}


_PAIRS = re.compile(r'"([\w.-]+)": "(\w+Config)"')
"""A `model_type` and its class in a dictionary."""


def _fields(file: Path, name: str, wanted: Set[str]) -> tuple[set[str], set[str] | None]:
    """The annotated attributes of a class and its bases, and the keys of the nearest `attribute_map`."""
    file = file if file.exists() else file.with_suffix("") / "__init__.py"
    tree = ast.parse(file.read_text())
    kind = next((one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name), None)
    if kind is None:
        return _fields(*_imported(name, tree, file), wanted)
    fields, renamed = set(), None
    for one in kind.body:
        match one:
            case ast.AnnAssign(target=ast.Name(id=field)):
                fields.add(field)
                if field == "attribute_map" and one.value is not None:
                    renamed = set(ast.literal_eval(one.value))
            case ast.Assign(targets=[ast.Name(id="attribute_map")]):
                renamed = set(ast.literal_eval(one.value))
    for base in map(ast.unparse, kind.bases):
        if wanted and wanted <= fields | (renamed or set()):
            break
        inherited, elsewhere = _fields(file, base, wanted)
        fields |= inherited
        renamed = elsewhere if renamed is None else renamed
    return fields, renamed


def _imported(name: str, tree: ast.Module, file: Path) -> tuple[Path, str]:
    """The file in transformers from which another one imports a class, and its name there; or LookupError."""
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.level and one.module:
            for imported in one.names:
                if name == (imported.asname or imported.name):
                    package = file.parents[one.level - 1]
                    return package.joinpath(*one.module.split(".")).with_suffix(".py"), imported.name
    raise LookupError(name)
