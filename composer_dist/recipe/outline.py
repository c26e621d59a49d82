"""What a configuration may hold, known without torch, from the JSON Schema that is next to this file.

`docs/signatures.py` writes the schema from `recipe.keys`; a test compares them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal

import pydantic

from composer_dist.recipe.signature import readable
from composer_dist.trainer.clock import Time

SCHEMA = Path(__file__).with_name("schema.json")
_SIMPLE: Mapping[str, Any] = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "null": None,
    "array": list,
    "object": dict,
}


_LIMITS = {"minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt"}
"""Of numbers, in the schema's words and in pydantic's."""
_POSITIVE = frozenset({"interval", "half_life", "update_interval", "t_max"})
"""Times that are longer than 0; those of a start or a warm-up need not be."""


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


def names_of(*kinds: str) -> set[str]:
    """The keys of mappings by their names in the schema, such as "Trainer"."""
    return {name for kind in kinds for name in _schema()["$defs"][kind]["properties"]}


def strategies() -> list[str]:
    """The names of strategies that exist without any code of the user's."""
    found: list[str] = _schema()["properties"]["parallelism"]["anyOf"][0]["examples"]
    return found


def mapping_of(section: str, name: str | None = None) -> Any:
    """The type of a section that is a mapping, for pydantic; of one with a name, the type for this name."""
    schema = _schema()["properties"][section]
    for kind in filter(None, map(_name, (schema, *schema.get("anyOf", ())))):
        if name is None or _schema()["$defs"][kind]["properties"]["name"].get("const") == name:
            return _mapping(kind)
    return Any


def _type(schema: Mapping[str, Any]) -> Any:
    """The type that a part of the schema describes; anything, if it is none of those in the schema."""
    match schema:
        case {"$ref": _}:
            return _mapping(_name(schema))
        case {"anyOf": kinds}:
            names = {_name(one) for one in kinds}
            types = [_type(one) for one in kinds if "Precision" not in names or one != {"type": "string"}]
            union = reduce(or_, types)
            return readable(union, Time.of) if "Time" in names else union
        case {"const": value}:
            return Literal[value]
        case {"enum": values}:
            return Literal[*values]
        case {"prefixItems": items}:
            return GenericAlias(tuple, tuple(map(_type, items)))
        case {"type": "array", "items": item}:
            return GenericAlias(list, (_type(item),))
        case {"type": "object", "additionalProperties": dict(values)}:
            return GenericAlias(dict, (str, _type(values)))
        case {"type": kind}:
            limits = {name: schema[key] for key, name in _LIMITS.items() if key in schema}
            return Annotated[_SIMPLE[kind], pydantic.Field(**limits)] if limits else _SIMPLE[kind]
    return Any


@cache
def _mapping(name: str) -> Any:
    """The type of a mapping by its name in the schema."""
    if name == "Time":
        return pydantic.InstanceOf[Time]  # which a file cannot hold
    schema = _schema()["$defs"][name]
    if name == "Precision":  # in any case
        return Annotated[_type(schema), pydantic.BeforeValidator(partial(_in_lower_case, schema["enum"]))]
    fields: dict[str, Any] = {}
    for key, one in schema["properties"].items():
        default = ... if key in schema.get("required", ()) else one.get("default")
        kind = _type(one)
        if key in _POSITIVE and {"$ref": "#/$defs/Time"} in one.get("anyOf", ()):
            kind = readable(kind, partial(Time.positive, key))
        fields[f"{key}_"] = (kind, pydantic.Field(default, alias=key))
    extra: Any = "allow" if schema["additionalProperties"] else "forbid"
    config = pydantic.ConfigDict(extra=extra, protected_namespaces=())
    return pydantic.create_model(name, __config__=config, **fields)


def _name(schema: Mapping[str, Any]) -> str | None:
    """The name of what a part of the schema refers to."""
    return schema["$ref"].rpartition("/")[2] if "$ref" in schema else None


def _in_lower_case(known: Sequence[str], value: object) -> object:
    """The known name that is written in another case, or the unchanged value."""
    return value.lower() if isinstance(value, str) and value.lower() in known else value
