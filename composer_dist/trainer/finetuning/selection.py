"""Which parameters each phase trains: looks up names and patterns in a model.

Names have no segments of wrappers, so that a schedule matches the model before and after its preparation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from composer_dist.config.rule import compiled
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.errors import Faults, ParallelismValueError
from composer_dist.structure.select import matching
from composer_dist.trainer.finetuning.schedule import REST, Phase
from composer_dist.wording import HINTS, listed, near_miss


@dataclass(frozen=True)
class Mismatch:
    """Why a schedule does not match a model."""

    phase: int | None
    """The phase, or None where `no_decay` is wrong."""
    text: str
    entry: int | None = None
    """Which of the phase's `params`; None for the phase as a whole."""

    def __str__(self) -> str:
        if self.phase is None:
            return f"no_decay: {self.text}"
        return self.text if self.entry is None else f"phase {self.phase}: {self.text}"


@dataclass
class Selection:
    """The parameters of a model that a schedule selects."""

    phases: Sequence[Phase]
    parts: list[list[str]]
    """The names of the parameters that each phase adds, in the model's order. A tied parameter has its first
    name."""
    no_decay: set[str]
    mismatches: list[Mismatch]
    """Names or patterns that match nothing, or only frozen parameters; a parameter in several phases; several
    phases with "rest", or nothing left for it."""

    def check(self) -> None:
        """Raises all mismatches at once."""
        with Faults("The phases do not match the model:\n") as faults:
            faults += map(str, self.mismatches)


def select(phases: Sequence[Phase], model: nn.Module, no_decay: Sequence[str] = ()) -> Selection:
    """Looks up the parameters of the phases, and those without weight decay, in a model.

    Only parameters that are trainable now can be selected: what an adapter or the user has frozen stays
    frozen. A tied parameter may be called by any of its names.
    """
    names = _NamedParameters(model)
    chosen: list[set[str]] = [set() for _ in phases]
    rests: list[tuple[int, int]] = []
    wrong: list[Mismatch] = []
    for number, phase in enumerate(phases):
        for index, entry in enumerate(phase.params):
            if entry == REST:
                rests.append((number, index))
                continue
            try:
                chosen[number] |= names.select(entry)
            except ParallelismValueError as error:
                wrong.append(Mismatch(number, str(error), index))
    wrong += _overlaps(chosen)
    if len(several := sorted({number for number, _ in rests})) > 1:
        listing = ", ".join(map(str, several))
        wrong.append(Mismatch(rests[-1][0], f"'rest' is in phases {listing}; only one phase may have it."))
    elif rests and not wrong:
        (number, index), rest = rests[0], names.trainable.difference(*chosen)
        if not rest:
            frozen = f", and {names.frozen} are frozen" if names.frozen else ""
            text = f"nothing is left for 'rest': phases name all other parameters{frozen}."
            wrong.append(Mismatch(number, text, index))
        chosen[number] |= rest
    without: set[str] = set()
    for entry in no_decay:
        try:
            without |= names.select(entry)
        except ParallelismValueError as error:
            wrong.append(Mismatch(None, str(error)))
    parts = [[name for name in names.first if name in part] for part in chosen]
    return Selection(phases, parts, without, wrong)


class _NamedParameters:
    """The parameters of a model, by each of their names and by the names of the modules that hold them."""

    def __init__(self, model: nn.Module) -> None:
        self.first: dict[str, nn.Parameter] = {}
        """First name to parameter, in the model's order."""
        by_id: dict[int, str] = {}
        self._owners: dict[str, set[str]] = {}
        """Any name of a parameter or module to the first names of its parameters."""
        for name, parameter in named_parameters_canonical(model, remove_duplicate=False):
            first = by_id.setdefault(id(parameter), name)
            self.first.setdefault(first, parameter)
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                self._owners.setdefault(".".join(parts[:end]), set()).add(first)
        self._unknown = 0
        self.trainable = {name for name, parameter in self.first.items() if parameter.requires_grad}
        self.frozen = len(self.first) - len(self.trainable)

    def select(self, entry: str) -> set[str]:
        """The trainable parameters that a name or pattern matches."""
        if entry.startswith("re:"):
            pattern = compiled(entry)
            owners = [self._owners[name] for name in matching(pattern, self._owners)]
            found = set[str]().union(*owners)
        else:
            found = self._owners.get(entry, set())
        if not found:
            self._unknown += 1
            hint = near_miss(entry, self._owners) if self._unknown <= HINTS else ""
            raise ParallelismValueError(f"{entry!r} matches no parameter, and no module that has any.{hint}")
        if not found & self.trainable:
            raise ParallelismValueError(
                f"{entry!r} matches only frozen parameters ({listed(sorted(found))}). Leave freezing to the "
                "phases: build the Trainer while requires_grad is True."
            )
        return found & self.trainable


def _overlaps(chosen: Sequence[set[str]]) -> Iterator[Mismatch]:
    for later, mine in enumerate(chosen):
        for earlier in range(later):
            if both := sorted(mine & chosen[earlier]):
                yield Mismatch(
                    later,
                    f"phases {earlier} and {later} both name {listed(both)}. Phases add to each other: name "
                    "a parameter in the first one that trains it, and 'rest' for everything else.",
                )
