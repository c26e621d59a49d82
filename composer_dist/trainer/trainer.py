"""The Trainer: sets a run up, and then trains, evaluates and predicts."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch.optim import Optimizer

from composer_dist.composer_model import ComposerModel, check_model
from composer_dist.distributed.ranks.hangs.guard import HangGuard
from composer_dist.distributed.training.gradients import Accumulate, accumulated_bytes
from composer_dist.errors import ParallelismValueError
from composer_dist.precision import Precision, as_precision
from composer_dist.progress import tell
from composer_dist.trainer.arguments import (
    as_list,
    check_duration,
    check_options,
    hang_limits,
    positive,
    subset_size,
)
from composer_dist.trainer.callbacks import Callback
from composer_dist.trainer.callbacks.base import may_change_batches, run_all
from composer_dist.trainer.clock import Time
from composer_dist.trainer.data.position import apart
from composer_dist.trainer.data.randomness import use_deterministic_algorithms
from composer_dist.trainer.data.sampling import batch_size, check_sampler, placed
from composer_dist.trainer.evaluation import Evaluator, Timetable, as_evaluators, checked, evaluate, predict
from composer_dist.trainer.events import Event
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.loggers.destination import LoggerDestination
from composer_dist.trainer.loop import LoopOptions, TrainingLoop
from composer_dist.trainer.microbatch import MicrobatchSize
from composer_dist.trainer.prepare import completed, prepare_model
from composer_dist.trainer.resuming.resume import (
    Resume,
    check_can_train,
    load_run_state,
    resume_run,
    run_state,
)
from composer_dist.trainer.resuming.settings import settings_of
from composer_dist.trainer.scaling import LossScaler, LossScaling
from composer_dist.trainer.schedulers import Schedules, sorted_out
from composer_dist.trainer.state import State
from composer_dist.trainer.step import GradientClipping

_log = logging.getLogger("composer_dist")
EvalData = Iterable[Any] | Evaluator | Sequence[Evaluator] | Mapping[str, Any] | None


class Trainer:
    """Trains, evaluates and predicts with a `ComposerModel`, on one process or many.

    Gradients are those of the mean loss over the batches of all ranks, whatever the microbatch size and
    however samples and tokens are spread. Losses, metrics and counts cover all ranks and are equal on them.

    Args:
        model: the model; with a `parallelism_config` it is prepared in place.
        train_dataloader: gives this rank's batches; may be passed to `fit` instead.
        eval_dataloader: gives this rank's batches of held-out data; or an `Evaluator`, a sequence of them,
            or a mapping from label to dataloader.
        max_duration: where `fit` ends, such as "3ep", "100ba", "3e4tok" or "1h30m"; an integer means epochs.
        optimizers: of the model's parameters as they are now; preparation rebinds them.
        schedulers: torch's learning-rate schedulers; ours, which follow time strings; or functions of the
            State, before each batch, that return what the learning rates are multiplied by.
        step_schedulers_every_batch: whether torch's step after each batch, or after each epoch (False, None).
        parallelism_config: whatever `parallelize_composer_model` takes as its config; None trains the model
            as it is: in one process, or already prepared.
        weights: files that fill the prepared model, as for `parallelize_composer_model`.
        precision: "fp32", "amp_bf16", "amp_fp16" (with a loss scaler), "amp_fp8"; None: the parameters' own.
        loss_scaling: how the loss is scaled under "amp_fp16".
        compile: True or torch.compile's options, for a model without a `parallelism_config`, which has its
            own option of that name.
        deterministic: make torch use deterministic algorithms only, until `close`.
        device: where to train; by default the process group's device, else the accelerator.
        device_train_microbatch_size: the most samples in one forward and backward; None takes the whole
            batch; "auto" as many as fit into the memory of every rank, found by trying.
        accumulate: "sharded" reduces each microbatch's gradients at once; "unsharded" reduces once a batch
            and holds whole gradients until then; the logged hyperparameters say how many bytes.
        gradient_clipping: the largest global norm, or a `GradientClipping`.
        seed: for Python, torch, and numpy if it is in use: the same on all ranks during preparation, then
            each rank's own, equal where the data is equal. None leaves the generators alone.
        eval_interval: how often `fit` evaluates, besides at its end; None: never.
        eval_loss: whether evaluation computes the model's loss.
        check_sampler: refuse dataloaders that give all ranks the same samples.
        callbacks: called at every event, in this order; LRMonitor and SpeedMonitor are added if missing.
        loggers: where metrics go.
        progress_bar: show one, on rank 0.
        hang_timeout: how long a rank may make no progress, such as "10m", or {"step": "10m", "save": "1h"};
            None learns it, False waits forever. See `HangGuard`.
        resume: a checkpoint's path, or a `Resume`; True resumes from the newest checkpoint of the
            `CheckpointSaver` among the callbacks, and starts a new run if there is none yet.
        load_path: for `Resume(load_path=...)`.
        autoresume: for `Resume(autoresume=True)`.
        save_folder: adds a `CheckpointSaver` that saves there.
        save_interval: how often it saves; each epoch if None.
        train_subset_num_batches: the most batches of each rank in an epoch; None or -1: all.
        eval_subset_num_batches: likewise in an evaluation, for an `Evaluator` without a `subset`.

    Raises:
        ParallelismValueError: several ranks but neither a `parallelism_config` nor a prepared model; a
            sampler that is not distributed; an option that cannot work here.
        ParallelismTypeError: the model is not a `ComposerModel`; an argument of the wrong type.
    """

    def __init__(
        self,
        *,
        model: ComposerModel,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: EvalData = None,
        max_duration: Time | str | int | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: Schedules | Sequence[Schedules] | None = None,
        step_schedulers_every_batch: bool | None = None,
        parallelism_config: Any = None,
        weights: str | os.PathLike[str] | None = None,
        precision: str | Precision | None = None,
        loss_scaling: LossScaling | None = None,
        compile: bool | Mapping[str, Any] = False,
        deterministic: bool = False,
        device: str | torch.device | None = None,
        device_train_microbatch_size: MicrobatchSize = None,
        accumulate: Accumulate = "sharded",
        gradient_clipping: float | GradientClipping | None = None,
        seed: int | None = None,
        eval_interval: Time | str | int | None = "1ep",
        eval_loss: bool = True,
        check_sampler: bool = True,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        progress_bar: bool = True,
        hang_timeout: Mapping[str, str | float] | str | float | bool | None = None,
        resume: Resume | str | os.PathLike[str] | bool | None = None,
        load_path: str | os.PathLike[str] | None = None,
        autoresume: bool = False,
        save_folder: str | os.PathLike[str] | None = None,
        save_interval: Time | str | int | None = None,
        train_subset_num_batches: int | None = None,
        eval_subset_num_batches: int | None = None,
    ) -> None:
        check_model(model)
        check_options(precision := as_precision(precision), compile, parallelism_config is not None)
        self._check_sampler, self._eval_loss = check_sampler, eval_loss
        self._max_duration = check_duration(max_duration)
        subset = subset_size("eval_subset_num_batches", eval_subset_num_batches)
        self._evaluators = [one.limited(subset) for one in as_evaluators(eval_dataloader)]
        resume = Resume.of(resume, load_path, autoresume)
        optimizers = as_list("optimizers", optimizers, Optimizer)
        torch_schedulers, schedules = sorted_out(schedulers, optimizers)
        options = LoopOptions(
            microbatch_size=device_train_microbatch_size,
            clipping=GradientClipping.of(gradient_clipping),
            accumulate=accumulate,
            schedules=schedules,
            schedule_batches=step_schedulers_every_batch,
            timetable=Timetable(self._evaluators, positive("eval_interval", eval_interval)),
            subset=subset_size("train_subset_num_batches", train_subset_num_batches),
        )
        self._loggers = as_list("loggers", loggers, LoggerDestination)
        self.callbacks = completed(callbacks, save_folder, save_interval, progress_bar)
        self.state = State(
            model=model,
            optimizers=optimizers,
            schedulers=torch_schedulers,
            loss_scaler=LossScaler.of(loss_scaling, precision),
            precision=precision,
            remember=self.state_dict,
        )
        self._event, limits = Event.INIT, hang_limits(hang_timeout)
        self._guard = HangGuard(limits, doing=lambda: self._event.doing(self.state.timestamp.batch))
        self._restore_algorithms = use_deterministic_algorithms() if deterministic else None
        wished = parallelism_config, weights, device, seed
        self.preparation, self._data_part = prepare_model(self.state, self._guard, *wished)
        if compile:
            model.compile(**({} if compile is True else compile))
        self.logger = Logger(self.state, self._loggers)
        replicas = self._data_part["num_replicas"]
        self._loop = TrainingLoop(self.state, self.logger, options, replicas, self.run_event, self._evaluate)
        if train_dataloader is not None:
            self._read(train_dataloader)
        for one in checked(self._evaluators, model):  # now, and not after the first epoch
            self._placed(one.dataloader, "evaluate")
        self._note_settings(options, seed, batch_size(train_dataloader))
        with self._guard.at("setup"):
            self.run_event(Event.INIT)
        self.resumed_from: str | None = None if resume is None else self._resume(resume)
        """The checkpoint with which this Trainer began."""

    def _note_settings(self, options: LoopOptions, seed: int | None, size: int | None) -> None:
        """Logs the hyperparameters, and keeps the settings for checkpoints."""
        settings = {
            "world_size": self.state.world_size,
            "max_duration": str(self._max_duration),
            "precision": str(self.state.precision),
            "device_train_microbatch_size": options.microbatch_size,
            "accumulate": options.accumulate,
            "gradient_clipping": str(options.clipping),
            "seed": seed,
        }
        held = {"accumulated_gradient_bytes": accumulated_bytes(self.state.model, options.accumulate)}
        self.logger.log_hyperparameters(settings | held)
        settings |= {"schedules": options.schedules, "batch_size": size}
        self.state.settings = settings_of(self.state, self.preparation, settings)

    def _resume(self, resume: Resume) -> str | None:
        """Loads a checkpoint, if there is one; returns its path."""
        with self._guard.at("load"):
            path = resume_run(resume, self.state, self.callbacks, self.load_state_dict)
        if self.state.rank == 0 and (batch := self.state.timestamp.batch):
            tell(f"Resuming from {path} after batch {batch}.")
        return path

    def fit(
        self, *, duration: Time | str | int | None = None, train_dataloader: Iterable[Any] | None = None
    ) -> None:
        """Trains until `max_duration`, or for `duration` more.

        The next fit continues where this one ended, in the middle of an epoch too.

        Args:
            duration: how long; `dur` means a share of `max_duration`, of epochs only whole ones.
            train_dataloader: replaces the present one.

        Raises:
            ParallelismValueError: there is nothing to train on or with, or no time left.
        """
        if train_dataloader is not None:
            self._read(train_dataloader)
        now, end = self.state.timestamp, self._max_duration
        if duration is None and self.resumed_from is not None and end is not None and now.reached(end):
            if self.state.rank == 0:
                _log.warning("The run has already reached max_duration='%s'; raise it to continue.", end)
            return
        check_can_train(self.state)
        self._loop.plan(self._max_duration, positive("duration", duration))
        with self._closing_on_error():
            self._loop.run(any(map(may_change_batches, self._listeners)))

    def eval(self, eval_dataloader: EvalData = None, label: str = "eval") -> dict[str, float]:
        """Evaluates, and leaves every module in the mode that it was in.

        Args:
            eval_dataloader: whatever the Trainer takes; by default what it was given.
            label: names the results of a dataloader that has no label.

        Returns:
            `loss/<label>/total` and `metrics/<label>/<name>` over all ranks' data.

        Raises:
            ParallelismValueError: there is nothing to evaluate.
        """
        evaluators = self._evaluators if eval_dataloader is None else as_evaluators(eval_dataloader, label)
        if not evaluators:
            raise ParallelismValueError("Evaluation needs an eval_dataloader.")
        with self._closing_on_error():
            return self._evaluate(evaluators)

    def predict(self, dataloader: Iterable[Any], *, return_outputs: bool = True) -> list[Any]:
        """The model's `eval_forward` of each batch of this rank's dataloader.

        Args:
            dataloader: gives the batches; it may be longer on some ranks than on others.
            return_outputs: False keeps nothing: callbacks see the outputs.

        Returns:
            One entry per batch, its tensors on the CPU.
        """
        with self._closing_on_error():
            return predict(self.state, placed(dataloader, self._data_part), self.run_event, return_outputs)

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to resume, besides model and optimizers; every rank must ask.

        Equal on all ranks; plain values and tensors, except what callbacks and dataloaders return.
        """
        return run_state(self.state, self._loop, self._listeners)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; the next `fit` resumes from there.

        Raises:
            ParallelismValueError: it belongs to a run with other schedulers, or to something else.
        """
        load_run_state(self.state, self._loop, self._listeners, state)

    def run_event(self, event: Event) -> None:
        """Calls every callback, then every logger."""
        self._event = event
        self._guard.beat(event.section)
        run_all(self._listeners, event, self.state, self.logger)

    def close(self) -> None:
        """Closes callbacks and loggers, the last one first, and the preparation."""
        with ExitStack() as closing:  # in the reverse order, all of them whatever one raises
            if self._restore_algorithms is not None:
                closing.callback(self._restore_algorithms)
            if self.preparation is not None:
                closing.callback(self.preparation.close)
            for callback in self._listeners:
                closing.callback(callback.close, self.state, self.logger)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _listeners(self) -> tuple[Callback, ...]:
        """Callbacks, and then loggers."""
        return (*self.callbacks, *self._loggers)

    def _read(self, dataloader: Iterable[Any]) -> None:
        dataloader = self._placed(dataloader, "train")
        if self.state.train_dataloader is not None:  # an earlier process may have begun the first one
            self._loop.go_to(None)  # the start of the epoch
        self.state.train_dataloader = dataloader

    def _placed(self, dataloader: Iterable[Any], purpose: str) -> Iterable[Any]:
        """This rank's part of the data, to train or evaluate on."""
        dataloader = placed(dataloader, self._data_part)
        if self._check_sampler:
            check_sampler(dataloader, self._data_part, purpose)
        return apart(dataloader, self.state.train_dataloader) if purpose == "evaluate" else dataloader

    def _evaluate(self, evaluators: Sequence[Evaluator]) -> dict[str, float]:
        results: dict[str, float] = {}
        self.run_event(Event.EVAL_BEFORE_ALL)
        for one in evaluators:
            one = replace(one, dataloader=self._placed(one.dataloader, "evaluate"))
            results |= evaluate(self.state, one, self.logger, self.run_event, self._eval_loss)
        self.run_event(Event.EVAL_AFTER_ALL)
        return results

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Closes callbacks and loggers on an error or Ctrl-C; if another rank died, raises its report."""
        try:
            with self._guard.at(self._event.section):
                yield
        except BaseException:
            self.close()
            raise
