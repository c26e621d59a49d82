"""The optimizers' groups: parameters leave them and return when their phase begins.

Parameters that wait for their phase are in no group, so they cost nothing and weight decay does not change
them. Their optimizer state, if any, is kept meanwhile. They return to the optimizer that held them, with the
hyperparameters of their old group.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.finetuning.rates import extend, has_lambdas, like, rebase
from composer_dist.wording import listed


class _Kind(NamedTuple):
    """What the parameters of a group have in common."""

    optimizer: int
    source: int | None
    """The group that held them at first; None if no optimizer did."""
    phase: int | None
    """The phase whose learning rate they have; None for the rate of their group."""
    decays: bool


@dataclass
class PhaseGroups:
    """Takes parameters out of optimizers and returns them phase by phase."""

    optimizers: Sequence[Optimizer]
    """All of the run."""
    schedulers: Sequence[LRScheduler]
    """Those of these optimizers; they are extended for every new group."""
    parameters: InitVar[Mapping[str, nn.Parameter]]
    """The parameters of all phases, by name."""
    no_decay: Collection[str]
    """Names of parameters without weight decay."""
    apply_lambdas: bool
    """Whether a scheduler's function of time also applies to groups with a phase's learning rate."""

    def __post_init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._source = {
            parameter: (number, index)
            for number, optimizer in enumerate(self.optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._groups: dict[_Kind, int] = {}
        self._parked: dict[nn.Parameter, dict[str, Any]] = {}
        outside = [name for name, parameter in parameters.items() if parameter not in self._source]
        if outside and len(self.optimizers) > 1:
            raise ParallelismValueError(
                f"{listed(outside)}: in a phase, but in none of the {len(self.optimizers)} optimizers. Give "
                "every optimizer all its parameters; the phases take out those that wait."
            )

    def held(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """The names of the parameters that are in a group now."""
        present = {p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        return [name for name, parameter in parameters.items() if parameter in present]

    def withdraw(self, parameters: Collection[nn.Parameter]) -> None:
        """Takes parameters and their state out of the optimizers; emptied groups stay."""
        out = set(parameters)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                keep = [index for index, p in enumerate(group["params"]) if p not in out]
                for key in ("params", "param_names"):
                    if key in group:
                        group[key][:] = [group[key][index] for index in keep]
            for parameter in out & optimizer.state.keys():
                self._parked[parameter] = optimizer.state.pop(parameter)

    def add(self, phase: int, parameters: Mapping[str, nn.Parameter], lr: float | None) -> list[str]:
        """Puts parameters into groups, except those that are already in one.

        Phase 0 has no new groups: its learning rate becomes that of the groups which held it. Returns the
        schedulers whose function of time the new groups do not follow.
        """
        present = set(self.held(parameters))
        new = {name: parameter for name, parameter in parameters.items() if name not in present}
        if phase == 0 and lr is not None:
            for number, index in sorted({self._source[p] for p in new.values() if p in self._source}):
                rebase(self.schedulers, self.optimizers[number], index, lr)
        left_out: list[str] = []
        for kind, members in self._by_kind(phase, new, lr).items():
            optimizer = self.optimizers[kind.optimizer]
            for parameter in members.values():
                if parameter in self._parked:
                    optimizer.state[parameter] = self._parked.pop(parameter)
            place = self._group_of(kind)
            if place is None:
                left_out += self._make(kind, lr if kind.phase is not None else None)
                place = self._groups[kind] = len(optimizer.param_groups) - 1
            group = optimizer.param_groups[place]
            group["params"] += members.values()
            if "param_names" in group:
                group["param_names"] += members
        return list(dict.fromkeys(left_out))

    def mixed(
        self, phases: Iterable[tuple[Mapping[str, nn.Parameter], float | None]]
    ) -> dict[int, list[str]]:
        """By phase, the plain parameters, except scalars, that will share a group with sharded ones."""
        groups: dict[_Kind, dict[str, tuple[int, nn.Parameter]]] = {}
        for number, (parameters, lr) in enumerate(phases):
            for kind, members in self._by_kind(number, parameters, lr).items():
                groups.setdefault(kind, {}).update({name: (number, p) for name, p in members.items()})
        found: dict[int, list[str]] = {}
        for shared in groups.values():
            if any(isinstance(parameter, DTensor) for _, parameter in shared.values()):
                for name, (number, parameter) in shared.items():
                    if parameter.ndim and not isinstance(parameter, DTensor):
                        found.setdefault(number, []).append(name)
        return found

    def _by_kind(
        self, phase: int, parameters: Mapping[str, nn.Parameter], lr: float | None
    ) -> dict[_Kind, dict[str, nn.Parameter]]:
        kinds: dict[_Kind, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            number, index = self._source.get(parameter, (0, None))
            optimizer = self.optimizers[number]
            source = optimizer.defaults if index is None else optimizer.param_groups[index]
            own_rate = lr is not None and (phase > 0 or index is None)
            # A group without weight decay is good for both kinds of parameters.
            decays = name not in self.no_decay or not source.get("weight_decay")
            kind = _Kind(number, index, phase if own_rate else None, decays)
            kinds.setdefault(kind, {})[name] = parameter
        return kinds

    def _group_of(self, kind: _Kind) -> int | None:
        """The group for such parameters, if there is one; without a phase's rate, the one that they left."""
        if kind.phase is None and kind.decays and kind.source is not None:
            return kind.source
        return self._groups.get(kind)

    def _make(self, kind: _Kind, lr: float | None) -> list[str]:
        """Adds an empty group like the one that the parameters left; returns what `add` returns."""
        optimizer = self.optimizers[kind.optimizer]
        groups = optimizer.param_groups
        source = optimizer.defaults if kind.source is None else groups[kind.source]
        if kind.source is None and lr is None:
            lr = float(source["lr"])
        options: dict[str, Any] = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in source.items()
            if key not in ("params", "param_names")
        }
        if not kind.decays:
            options["weight_decay"] = 0.0
        if any("initial_lr" in group for group in groups):
            options.setdefault("initial_lr", options["lr"])
        if any("param_names" in group for group in groups):
            options["param_names"] = []
        optimizer.add_param_group({"params": [], **options})
        keep_lambdas = self.apply_lambdas or lr is None
        apart = extend(self.schedulers, optimizer, kind.source or 0, keep_lambdas)
        if lr is not None:
            rebase(self.schedulers, optimizer, -1, lr)
            if not (keep_lambdas and has_lambdas(self.schedulers, optimizer)):
                groups[-1]["lr"] = like(groups[-1]["lr"], lr)
        return [type(scheduler).__name__ for scheduler in apart]
