"""The names of a configuration's keys, known without torch, from the JSON Schema that is beside this file.

`docs/signatures.py` writes the schema from `recipe.keys`; a test compares them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from composer_dist.config.yaml import KeyPath

SCHEMA = Path(__file__).with_name("schema.json")


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


def names_of(*kinds: str) -> set[str]:
    """The keys of mappings by their names in the schema, such as "Trainer"."""
    return {name for kind in kinds for name in _schema()["$defs"][kind]["properties"]}


def unknown_keys(values: Mapping[str, Any], sections: Sequence[str]) -> Iterator[tuple[KeyPath, list[str]]]:
    """The path of each key in these sections that the schema does not have, and the keys that there are."""
    for section in sections:
        yield from _unknown(values.get(section), _schema()["properties"][section], (section,))


def _unknown(value: Any, schema: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, list[str]]]:
    kinds = list(_mappings(schema))
    if not isinstance(value, dict) or not kinds:
        return
    known = [name for kind in kinds for name in kind["properties"]]
    closed = all(kind.get("additionalProperties") is False for kind in kinds)
    for key, inner in value.items():
        if found := [kind["properties"][key] for kind in kinds if key in kind["properties"]]:
            yield from _unknown(inner, {"anyOf": found}, (*path, key))
        elif closed:
            yield (*path, key), known


def _mappings(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The mappings with known keys among what a schema allows."""
    if "$ref" in schema:
        yield from _mappings(_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _mappings(alternative)
    if "properties" in schema:
        yield schema
