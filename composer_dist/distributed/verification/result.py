"""What was compared, and what differs: found on each rank, and put together to one result for all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_dist.distributed.plan.text import table
from composer_dist.wording import ranks_named

_MOST = 100
"""Differences of one kind that a rank reports."""


@dataclass(frozen=True)
class Difference:
    """A difference that was found."""

    what: str
    """Its kind: one of the names in `Verification.checked`."""
    name: str
    """The tensor's or parameter's name; empty for the loss and for the norm of all gradients."""
    absolute: float = math.nan
    """The largest absolute difference of two elements; nan where nothing is subtracted."""
    relative: float = math.nan
    """The 2-norm of the difference, relative to that of the expected tensor."""
    tolerance: float = 0.0
    """The largest relative difference that counts as rounding; it depends on the dtype."""
    detail: str = ""
    """A description of the difference."""
    ranks: tuple[int, ...] = ()
    """The ranks that have found it."""


@dataclass(frozen=True)
class Comparison:
    """One kind of things that were checked."""

    what: str
    count: int
    """How many, on the rank that checked the most."""
    name: str = ""
    """The one with the largest relative difference."""
    absolute: float = 0.0
    relative: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True)
class Verification:
    """What `verify_model` has found, the same on every rank; prints as a table."""

    checked: tuple[Comparison, ...]
    """What was checked, with the largest difference of each kind."""
    differences: tuple[Difference, ...]
    """What is wrong; empty if nothing is."""
    first_module: str | None = None
    """The first module, in the order in which they finish, whose output differs; None if none does."""
    notes: tuple[str, ...] = ()
    """What could not be checked, and why."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON, with `ok`; numbers that are not finite become None."""
        found = {"ok": self.ok, **asdict(self)}
        for row in (*found["checked"], *found["differences"]):
            row |= {key: None for key in ("absolute", "relative") if not math.isfinite(row[key])}
        return found

    def __str__(self) -> str:
        wrong = {one.what for one in self.differences}
        headings = {"checked": "left", "number": "right", "largest difference": "right", "in": "left"}
        rows = [
            [one.what, str(one.count), _numbers(one), one.name, "differs" if one.what in wrong else "ok"]
            for one in self.checked
        ]
        lines = [table("Verification", {**headings, " ": "left"}, rows)]
        lines += [f"not checked: {note}" for note in self.notes]
        if self.first_module is not None:
            lines.append(f"first module whose output differs: {self.first_module or 'the root'}")
        shown = [_sentence(one) for one in self.differences]
        return "\n".join([*lines, *shown[:20], *([f"and {len(shown) - 20} more"] if shown[20:] else [])])


def _numbers(one: Comparison | Difference) -> str:
    if (math.isnan(one.absolute) and math.isnan(one.relative)) or not (one.name or one.tolerance):
        return ""  # nothing was subtracted
    return f"{one.absolute:.2g} ({one.relative:.2g} of {one.tolerance:.0g})" if one.tolerance else "0"


def _sentence(one: Difference) -> str:
    where = f" on {ranks_named(one.ranks)}" if one.ranks else ""
    numbers = f" by {_numbers(one)}" if one.tolerance and not math.isnan(one.absolute) else ""
    why = one.detail or f"differs{numbers}"
    return f"{one.what} {one.name}".strip() + f": {why}{where}"


@dataclass
class Findings:
    """What one rank has found so far."""

    checked: dict[str, Comparison] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    modules: list[tuple[int, str]] = field(default_factory=list)
    """Number and name of the first module whose output differs, if there is one."""
    notes: list[str] = field(default_factory=list)

    def count(self, what: str, number: int = 1) -> None:
        """Note that so many were checked."""
        before = self.checked.get(what, Comparison(what, 0))
        self.checked[what] = Comparison(**asdict(before) | {"count": before.count + number})

    def wrong(self, what: str, name: str, detail: str) -> None:
        """Add a difference that has no numbers."""
        self.differences.append(Difference(what, name, detail=detail))

    def compare(
        self, what: str, name: str, found: Tensor, expected: Tensor, tolerance: float, least: float = 0.0
    ) -> bool:
        """Compare two whole tensors, and return whether they are equal to rounding.

        Args:
            least: the difference is taken relative to this norm, if that of `expected` is smaller.
        """
        self.count(what)
        if found.shape != expected.shape:
            shapes = f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
            self.differences.append(Difference(what, name, detail=shapes, tolerance=tolerance))
            return False
        absolute, relative = measure(found, expected, least)
        before = self.checked[what]
        if not relative <= before.relative or not before.name:  # nan is the largest
            self.checked[what] = Comparison(what, before.count, name, absolute, relative, tolerance)
        if relative <= tolerance:
            return True
        self.differences.append(Difference(what, name, absolute, relative, tolerance))
        return False

    def packed(self) -> dict[str, Any]:
        """In JSON types, at most `_MOST` differences of a kind."""
        kept: list[Difference] = []
        for what in dict.fromkeys(one.what for one in self.differences):
            alike = [one for one in self.differences if one.what == what]
            kept += alike[:_MOST]
            if alike[_MOST:]:
                kept.append(Difference(what, "", detail=f"{len(alike) - _MOST} more differ"))
        return {
            "checked": [asdict(one) for one in self.checked.values()],
            "differences": [asdict(one) for one in kept],
            "modules": self.modules,
            "notes": self.notes,
        }


def measure(found: Tensor, expected: Tensor, least: float = 0.0) -> tuple[float, float]:
    """The largest absolute difference, and the norm of the difference relative to that of `expected`."""
    if not expected.numel():
        return 0.0, 0.0
    right = wide(expected)
    difference = wide(found).to(right.device) - right
    absolute, norm = float(difference.abs().max()), float(difference.norm())
    if norm == 0:
        return absolute, 0.0
    return absolute, norm / max(float(right.norm()), least, torch.finfo(torch.float64).tiny)


def wide(tensor: Tensor) -> Tensor:
    """In double precision, real or complex."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def joined(found: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """The findings of all ranks as one `Verification`, in JSON types."""
    checked: dict[str, dict[str, Any]] = {}
    differences: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, one in zip(ranks, found, strict=True):
        for row in one["checked"]:
            before = checked.setdefault(row["what"], row)
            larger = row if not row["relative"] <= before["relative"] else before
            checked[row["what"]] = larger | {"count": max(row["count"], before["count"])}
        for row in one["differences"]:
            key = row["what"], row["name"], row["detail"]
            before = differences.setdefault(key, row | {"ranks": []})
            before["ranks"].append(rank)
            if not row["relative"] <= before["relative"]:
                before |= {name: row[name] for name in ("absolute", "relative", "tolerance")}
    for row in differences.values():
        if len(row["ranks"]) == len(ranks):
            row["ranks"] = []
    order = {what: number for number, what in enumerate(checked)}
    modules = sorted(tuple(one) for rank in found for one in rank["modules"])
    return {
        "checked": list(checked.values()),
        "differences": sorted(differences.values(), key=lambda row: order.get(row["what"], len(order))),
        "first_module": modules[0][1] if modules else None,
        "notes": list(dict.fromkeys(note for one in found for note in one["notes"])),
    }


def unpacked(facts: Mapping[str, Any]) -> Verification:
    """The result of `joined` as an object."""
    return Verification(
        checked=tuple(Comparison(**one) for one in facts["checked"]),
        differences=tuple(Difference(**one | {"ranks": tuple(one["ranks"])}) for one in facts["differences"]),
        first_module=facts["first_module"],
        notes=tuple(facts["notes"]),
    )
