"""What the plans of all features have in common."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


class FeaturePlan:
    """The plan of one feature; a frozen dataclass."""

    def explain(self, module: str) -> str:
        """In words, what happens to a module ("" is the root); empty if nothing does."""
        return ""

    def notes(self) -> Iterator[str]:
        """Lines for the plan as text."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """The decisions in plain types, equal on ranks that are about to do the same."""
        found: dict[str, Any] = in_plain_types(self)
        return found


def in_plain_types(value: Any) -> Any:
    """A value for JSON: dataclasses become mappings of their shown fields, and functions their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: in_plain_types(getattr(value, one.name)) for one in fields(value) if one.repr}
    if isinstance(value, Mapping):
        return {str(key): in_plain_types(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_plain_types(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(in_plain_types, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if repr(value) == object.__repr__(value):  # its repr has an address, which differs by rank
        return [type(value).__name__, in_plain_types(vars(value))]
    return str(value)
