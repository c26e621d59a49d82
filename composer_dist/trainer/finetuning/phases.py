"""Scheduled fine-tuning: parameters join the training phase by phase."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from composer_dist import _torch
from composer_dist.config.base import require
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.finetuning.best import Snapshot, put_back, take_snapshot
from composer_dist.trainer.finetuning.groups import PhaseGroups
from composer_dist.trainer.finetuning.progress import PhaseProgress
from composer_dist.trainer.finetuning.schedule import (
    NoImprovement,
    Phase,
    PhaseSchedule,
    default_phases,
    dump_schedule,
    phases_of,
)
from composer_dist.trainer.finetuning.selection import Selection, select
from composer_dist.trainer.improvement import check_measured, measured_on
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State
from composer_dist.users_code import warn
from composer_dist.wording import listed

_log = logging.getLogger("composer_dist")


class FineTuningPhases(Callback):
    """Trains a few parameters first and thaws more of them phase by phase.

    When the Trainer is built, everything but phase 0 is frozen and leaves the optimizers. A phase begins
    with a batch: its parameters are thawed and return to the optimizer that held them, with the
    hyperparameters of their group and the phase's learning rate. Earlier phases continue unchanged. All ranks
    change phase together.

    A phase that ends by `NoImprovement` first restores its best weights (`restore_best`) and their optimizer
    state.

    Args:
        schedule: the phases, or a YAML file of them; None is `default_phases` of the model.
        restore_best: whether a phase that watches a metric ends with the weights of its best value.
        no_decay: names and patterns, as in `Phase.params`, of parameters without weight decay; they get
            their own groups.
        reduce_optimizers: whether parameters leave the optimizers until their phase begins. False only
            freezes them: groups do not change, and the phases' learning rates have no effect.
        apply_lambdas: whether schedulers made of functions (`LambdaLR`, transformers' schedules) also change
            the learning rates of phases. If not, the phase's rate is constant, with a warning.
        frozen_batch_norm: what batch normalization does while it is frozen: "track" keeps normalizing by the
            batch and updating the running statistics; "fixed" uses them unchanged.
        write_to: a YAML file to which rank 0 writes the schedule.

    Raises:
        ParallelismValueError: the schedule is wrong, or, when the Trainer is built, does not match the model.
    """

    def __init__(
        self,
        schedule: PhaseSchedule | None = None,
        *,
        restore_best: bool = True,
        no_decay: str | Sequence[str] = (),
        reduce_optimizers: bool = True,
        apply_lambdas: bool = False,
        frozen_batch_norm: Literal["track", "fixed"] = "track",
        write_to: str | Path | None = None,
    ) -> None:
        require("frozen_batch_norm", frozen_batch_norm, ("track", "fixed"))
        self._schedule = None if schedule is None else phases_of(schedule)
        self._restore_best = restore_best
        self._no_decay = (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
        self._reduce_optimizers = reduce_optimizers
        self._apply_lambdas = apply_lambdas
        self._fixed_batch_norm = frozen_batch_norm == "fixed"
        self._write_to = write_to
        self.phases: tuple[Phase, ...] = self._schedule or ()
        """The schedule."""
        self.parameters: list[list[str]] = []
        """The names of the parameters that each phase adds; known when the Trainer is built."""
        self.phase = 0
        """The number of the current phase."""
        self._progress = PhaseProgress()
        self._best: Snapshot | None = None
        self._is_best = False
        self._fitting = False
        self._fixed: list[nn.Module] = []

    def select(self, model: nn.Module) -> Selection:
        """The parameters that each phase would add, and what in the schedule does not match the model.

        Args:
            model: prepared or not, also on the meta device.

        Raises:
            ParallelismValueError: there is no schedule, and the model has no trainable parameter.
        """
        return select(self._schedule or default_phases(model), model, self._no_decay)

    def init(self, state: State, logger: Logger) -> None:
        self._state, self.phase, self._progress, self._best = state, 0, PhaseProgress(), None
        self._is_best = False
        with process_group.together("the phases of fine-tuning"):
            selection = self.select(state.model)
            selection.check()
            self.phases, self.parameters = tuple(selection.phases), selection.parts
            if self._write_to is not None and state.rank == 0:
                dump_schedule(self.phases, self._write_to)
        Agreement().reach("the phases of fine-tuning", self.parameters, _alike)
        by_name = dict(named_parameters_canonical(state.model))
        scheduled = {name: by_name[name] for part in self.parameters for name in part}
        self._groups = PhaseGroups(
            state.optimizers, state.schedulers, scheduled, selection.no_decay, self._apply_lambdas
        )
        idle = [name for name, p in by_name.items() if p.requires_grad and name not in scheduled]
        frozen = [by_name[name] for name in (*scheduled, *idle)]
        for parameter in frozen:
            parameter.requires_grad_(False)
            parameter.grad = None
        if self._reduce_optimizers:
            self._groups.withdraw(frozen)
        self._begin(0)
        self._report(by_name, idle)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Fixes batch norms, which the fit has put into training mode."""
        self._fitting = True
        for one in self.phases:
            if isinstance(one.until, NoImprovement):
                check_measured("NoImprovement", one.until.metric, state)
        if self._is_last and self._is_over():
            warn(
                f"The last phase has already ended ('until' of phase {self.phase}): this fit trains nothing."
            )
        self._fix_batch_norms()
        logger.log_metrics({"phases/phase": self.phase})

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self._is_last and self._is_over():
            self._return_to_best()
            state.stop_training()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begins the next phase if the current one is over.

        Phases begin with a batch and do not end after one, so that a checkpoint is of the phase that has just
        trained, and a run that resumes from it begins the next phase at the same batch.
        """
        if self._is_last or not self._is_over():
            return
        self._return_to_best()
        self._begin(self.phase + 1)
        self._start(self.phase + 1)
        self._fix_batch_norms()
        logger.log_metrics({"phases/phase": self.phase})

    def eval_end(self, state: State, logger: Logger) -> None:
        self._measure(state.dataloader_label)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._measure(None)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Keeps the weights if they are the best so far, once an EMA has swapped its averages out again."""
        self._keep_best()

    epoch_checkpoint = batch_checkpoint

    def fit_end(self, state: State, logger: Logger) -> None:
        """Stops measuring: later evaluations are not part of the phase."""
        self._keep_best()
        self._fitting = False

    def close(self, state: State, logger: Logger) -> None:
        left = len(self.phases) - 1 - self.phase
        if left > 0 and state.timestamp.batch and state.rank == 0:
            _log.warning("Training has ended in phase %d; %d more have not begun.", self.phase, left)

    def state_dict(self) -> dict[str, Any]:
        self._keep_best()
        return {
            "phase": self.phase,
            "parameters": self.parameters[: self.phase + 1],
            "progress": self._progress.state_dict(),
            "best": self._best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Thaws the phases of the checkpoint and restores the optimizers' groups."""
        begun, reached = self.parameters[: state["phase"] + 1], state["phase"]
        if begun != [list(part) for part in state["parameters"]]:
            raise CheckpointValueError(
                f"The checkpoint has another schedule: its phases up to {reached} train other parameters. "
                "Only phases that have not begun may be changed."
            )
        if reached < self.phase:
            raise CheckpointValueError(
                f"The checkpoint is from phase {reached}, but training is in phase {self.phase}: parameters "
                "cannot leave the optimizers again. Build a new Trainer."
            )
        while self.phase < reached:
            self._begin(self.phase + 1)
            self.phase += 1
        self._progress = PhaseProgress.from_state_dict(state["progress"])
        self._best = state["best"]

    def _begin(self, number: int) -> None:
        """Thaws the parameters of a phase and gives them to their optimizers."""
        model, phase = self._state.model, self.phases[number]
        by_name = dict(named_parameters_canonical(model))  # the shards, which optimizers hold
        parameters = {name: by_name[name] for name in self.parameters[number]}
        for parameter in parameters.values():
            parameter.requires_grad_()
        if unmoved := self._groups.add(number, parameters, phase.lr):
            warn(
                f"Phase {number}: {', '.join(unmoved)} changes learning rates by a function, but not those "
                f"of phases: lr stays {phase.lr}. FineTuningPhases(apply_lambdas=True) changes it too."
            )

    def _start(self, number: int) -> None:
        """Begins a phase now. If it watches the metric of the previous phase, the best value is kept."""
        before, until = self.phases[self.phase].until, self.phases[number].until
        keeps = (
            self._best is not None
            and isinstance(before, NoImprovement)
            and isinstance(until, NoImprovement)
            and (before.metric, before.mode) == (until.metric, until.mode)
        )
        self.phase = number
        self._progress = PhaseProgress(
            start=self._state.timestamp,
            best=self._progress.best if keeps else None,
            diverged=self._progress.diverged,
        )
        # The model has the best weights now; the parameters that were just thawed belong to them.
        self._best = self._snapshot() if keeps else None

    @property
    def _is_last(self) -> bool:
        return self.phase == len(self.phases) - 1

    def _is_over(self) -> bool:
        return self._progress.is_over(self.phases[self.phase].until, self._state)

    def _measure(self, label: str | None) -> None:
        """Measures the phase's metric if it belongs to the dataloader called `label`, or to none."""
        until, state = self.phases[self.phase].until, self._state
        if not self._fitting or not isinstance(until, NoImprovement) or measured_on(until.metric) != label:
            return
        if self._progress.measured == state.timestamp.batch:
            return
        if self._progress.measure(until, state) and self._restore_best:
            self._is_best = True

    def _keep_best(self) -> None:
        """Keeps the weights of the best evaluation."""
        if self._is_best:
            self._best = self._snapshot()
            self._is_best = False

    def _return_to_best(self) -> None:
        if self._best is not None:
            put_back(self._best, self._state.model, self._state.optimizers, self._state.averages)
            self._state.restored += 1

    def _snapshot(self) -> Snapshot:
        return take_snapshot(self._state.model, self._state.optimizers, self._state.averages)

    def _fix_batch_norms(self) -> None:
        """Puts batch norms whose parameters are all frozen into evaluation mode, if they are to be fixed."""
        if self._fixed_batch_norm:
            for module in self._fixed:
                module.train()
            norms = [one for one in self._state.model.modules() if isinstance(one, _torch.AnyBatchNorm)]
            self._fixed = [norm for norm in norms if {p.requires_grad for p in norm.parameters()} == {False}]
            for module in self._fixed:
                module.eval()

    def _report(self, by_name: Mapping[str, nn.Parameter], idle: Sequence[str]) -> None:
        """Reports, once, what the user may not have intended."""
        scheduled = [{name: by_name[name] for name in part} for part in self.parameters]
        rates = [phase.lr for phase in self.phases]
        if self._state.rank == 0:
            if idle:
                _log.warning(
                    "%s: in no phase, so frozen for the whole training. A phase with 'rest' trains all "
                    "parameters that no other phase names.",
                    listed(idle),
                )
            for number, names in sorted(self._groups.mixed(zip(scheduled, rates, strict=True)).items()):
                _log.warning(
                    "Phase %d: %s: plain among the sharded parameters of their optimizer group, which "
                    "foreach=True and fused=True reject. Shard their modules (prepare the whole model, "
                    "without Rule(shard=False)), or give them an optimizer group of their own.",
                    number,
                    listed(names),
                )
        if held := self._groups.held({name: p for part in scheduled[1:] for name, p in part.items()}):
            rated = ", ".join(str(number) for number, lr in enumerate(rates) if lr is not None)
            effect = f": lr of phase {rated} has no effect" if rated else ""
            warn(
                f"{listed(held)} stay in their optimizer groups before their phase begins, and keep the rate "
                f"of these{effect}. Leave out reduce_optimizers=False."
            )


def _alike(plans: Sequence[list[list[str]]]) -> None:
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise ParallelismValueError(f"Ranks 0 and {rank} have different phases; give all the same ones.")
