"""The Trainer: sets a run up, and then trains, evaluates and predicts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer_dist.composer_model import ComposerModel
from composer_dist.distributed.account import Preparation
from composer_dist.distributed.prepare import parallelize_composer_model
from composer_dist.distributed.prepared import mesh_of
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.reports import told_to_all
from composer_dist.distributed.training.gradients import Accumulate, accumulated_bytes
from composer_dist.errors import ParallelismValueError
from composer_dist.precision import Precision, as_precision
from composer_dist.trainer import checks, setup
from composer_dist.trainer.callbacks import Callback, LRMonitor, ProgressBar, SpeedMonitor
from composer_dist.trainer.clock import Time
from composer_dist.trainer.data.batch import num_samples
from composer_dist.trainer.data.feed import Feed, Size, length_of
from composer_dist.trainer.data.randomness import (
    generator_states,
    seed_all,
    set_generator_states,
    use_deterministic_algorithms,
)
from composer_dist.trainer.data.sampling import check_sampler, placed
from composer_dist.trainer.evaluation import Evaluator, as_evaluators, evaluate, predict, timetable
from composer_dist.trainer.events import Event
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.loggers.destination import LoggerDestination
from composer_dist.trainer.loop import LoopOptions, TrainingLoop
from composer_dist.trainer.microbatch import MicrobatchSize
from composer_dist.trainer.resume import Resume, load_run_state, resume_run, run_state
from composer_dist.trainer.scaling import LossScaler, LossScaling
from composer_dist.trainer.schedulers import Schedule, sorted_out
from composer_dist.trainer.state import State
from composer_dist.trainer.step import GradientClipping, measure

EvalData = Iterable[Any] | Evaluator | Sequence[Evaluator] | Mapping[str, Any] | None


class Trainer:
    """Trains, evaluates and predicts with a `ComposerModel`, on one process or many.

    Gradients are those of the mean loss over the batches of all ranks together, whatever the
    microbatch size, and however samples and tokens are spread. Losses, metrics and counts are those
    of all ranks together, and equal on all of them.

    Args:
        model: the model; with a `parallelism_config` it is prepared in place.
        train_dataloader: gives this rank's batches; may be given to `fit` instead.
        eval_dataloader: gives this rank's batches of the data held out; or an `Evaluator`, a sequence of
            them, or a mapping from label to dataloader.
        max_duration: where `fit` ends, such as "3ep", "100ba", "3e4tok" or "1h30m"; an integer
            means epochs.
        optimizers: of the model's parameters as they are now; preparation rebinds them.
        schedulers: torch's learning-rate schedulers, or ours, which follow time strings.
        step_schedulers_every_batch: step torch's after each batch (True) or each epoch (False; also
            None, with a warning if the run is too short for that).
        parallelism_config: whatever `parallelize_composer_model` takes as its config; None trains
            the model as it is: in one process, or prepared already.
        precision: "fp32", "amp_bf16", "amp_fp16" (with a loss scaler) or "amp_fp8"; None computes in the
            parameters' own dtype.
        loss_scaling: how the loss is scaled under "amp_fp16".
        compile: torch.compile's options, or True, for a model that is trained without a
            `parallelism_config`, which has an option of that name itself.
        deterministic: have torch use deterministic algorithms only, until `close`.
        device: where to train; by default the process group's device, else the accelerator.
        device_train_microbatch_size: the most samples in one forward and backward; None takes the
            whole batch; "auto" as many as fit into the memory of every rank, found by trying.
        accumulate: "sharded" reduces each microbatch's gradients at once; "unsharded" once a batch, and
            holds whole gradients until then, as many bytes as the hyperparameters say.
        gradient_clipping: the largest global norm, or a `GradientClipping`.
        seed: for Python, torch, and numpy where it is in use: the same on all ranks during
            preparation; afterwards a rank's own, equal where the data is equal. None leaves the
            generators alone.
        eval_interval: how often `fit` evaluates, beside at its end; None: never.
        eval_loss: whether evaluation computes the model's loss.
        check_sampler: refuse dataloaders that give all ranks the same samples.
        callbacks: called at every event, in this order; an LRMonitor and a SpeedMonitor are added where
            they are missing.
        loggers: where metrics go.
        progress_bar: show one, on rank 0.
        resume: go on from a checkpoint: its path, or a `Resume`; True finds the newest one of the
            `CheckpointSaver` among the callbacks, and begins anew where there is none yet.

    Raises:
        ParallelismValueError: several ranks and neither a `parallelism_config` nor a prepared
            model; a sampler that is not distributed; an option that cannot work here.
        ParallelismTypeError: the model is no `ComposerModel`; an argument of another kind.
    """

    def __init__(
        self,
        *,
        model: ComposerModel,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: EvalData = None,
        max_duration: Time | str | int | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: LRScheduler | Schedule | Sequence[LRScheduler | Schedule] | None = None,
        step_schedulers_every_batch: bool | None = None,
        parallelism_config: Any = None,
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
        resume: Resume | str | os.PathLike[str] | bool | None = None,
    ) -> None:
        checks.check_model(model)
        checks.check_microbatch_size(device_train_microbatch_size)
        checks.check_accumulate(accumulate)
        self._precision = as_precision(precision)
        checks.check_precision(self._precision, parallelism_config is not None, loss_scaling)
        checks.check_compile(compile, parallelism_config is not None)
        self._max_duration = checks.positive("max_duration", max_duration)
        self._schedule_batches = step_schedulers_every_batch
        self._check_sampler = check_sampler
        self._evaluators = as_evaluators(eval_dataloader)
        self._eval_loss = eval_loss
        interval = checks.positive("eval_interval", eval_interval)
        resume = Resume.of(resume)
        clipping = GradientClipping.of(gradient_clipping)
        optimizers = checks.listed("optimizers", optimizers, Optimizer)
        self._loggers = checks.listed("loggers", loggers, LoggerDestination)
        self.callbacks = checks.listed("callbacks", callbacks, Callback)
        standard = (LRMonitor, SpeedMonitor, ProgressBar) if progress_bar else (LRMonitor, SpeedMonitor)
        given = {type(callback) for callback in self.callbacks}
        self.callbacks += [kind() for kind in standard if kind not in given]

        self._restore_algorithms = use_deterministic_algorithms() if deterministic else None
        if process_group.is_distributed() or parallelism_config is not None:
            process_group.init(device=device, reuse=True)
        if seed is not None:
            seed_all(seed)
        self.preparation: Preparation | None = None
        """What the preparation of the model did, if this Trainer prepared it."""
        if parallelism_config is not None:
            self.preparation = parallelize_composer_model(
                model, optimizers or None, parallelism_config, self._precision
            )
        mesh = mesh_of(model)
        self._data_part = setup.data_part(mesh)
        if seed is not None:
            seed_all(seed + self._data_part["rank"])
        if compile:
            model.compile(**({} if compile is True else compile))
        world, rank = process_group.world_and_rank()
        torch_schedulers, schedules = sorted_out(schedulers, optimizers)
        self.state = State(
            model=model,
            device=setup.settle(model, mesh, device),
            optimizers=optimizers,
            schedulers=torch_schedulers,
            schedules=schedules,
            loss_scaler=LossScaler(loss_scaling) if self._precision is Precision.AMP_FP16 else None,
            precision=self._precision,
            rank=rank,
            world_size=world,
        )
        self.logger = Logger(self.state, self._loggers)
        options = LoopOptions(
            microbatch_size=device_train_microbatch_size,
            clipping=clipping,
            accumulate=accumulate,
            schedule_batches=bool(step_schedulers_every_batch),
            evaluators=timetable(self._evaluators, interval),
            replicas=self._data_part["num_replicas"],
        )
        self._loop = TrainingLoop(self.state, self.logger, options, self.run_event, self._evaluate)
        if train_dataloader is not None:
            self._read(train_dataloader)
        self.logger.log_hyperparameters(
            {
                "world_size": world,
                "max_duration": str(self._max_duration),
                "precision": str(self._precision),
                "device_train_microbatch_size": device_train_microbatch_size,
                "accumulate": accumulate,
                "accumulated_gradient_bytes": accumulated_bytes(model, accumulate),
                "gradient_clipping": str(clipping),
                "seed": seed,
            }
        )
        self.run_event(Event.INIT)
        self.state.remember = self.state_dict
        self.resumed_from: str | None = None
        """The checkpoint with which this Trainer began."""
        if resume is not None:
            self.resumed_from = resume_run(resume, self.state, self.callbacks, self.load_state_dict)

    def fit(
        self,
        *,
        duration: Time | str | int | None = None,
        train_dataloader: Iterable[Any] | None = None,
    ) -> None:
        """Trains until `max_duration`, or for `duration` more; call it again to go on.

        After a fit that ended in the middle of an epoch, the next one goes on there.

        Args:
            duration: how long; `dur` means a share of `max_duration`.
            train_dataloader: takes the place of the one that was there.

        Raises:
            ParallelismValueError: there is nothing to train on or with, or no time left.
        """
        if train_dataloader is not None:
            self._read(train_dataloader)
        state = self.state
        if state.train_dataloader is None:
            raise ParallelismValueError("Training needs a train_dataloader.")
        state.plan_fit(self._max_duration, checks.positive("duration", duration))
        checks.check_trainable(state)
        checks.check_schedule(state, self._schedule_batches, length_of(state.train_dataloader))
        with self._closing_on_error():
            self._loop.run()

    def eval(self, eval_dataloader: EvalData = None, label: str = "eval") -> dict[str, float]:
        """Evaluates; every module is afterwards in the mode in which it was.

        Args:
            eval_dataloader: whatever the Trainer takes; by default what it was given.
            label: what the results are called by, of a dataloader that has no label.

        Returns:
            `loss/<label>/total` and `metrics/<label>/<name>` over the data of all ranks.

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
            dataloader = placed(dataloader, self._data_part)
            feed = Feed(dataloader, "predict", lambda batch: Size(samples=num_samples(batch)))
            return predict(self.state, feed, self.run_event, return_outputs)

    def state_dict(self) -> dict[str, Any]:
        """What a later process must know to go on, beside model and optimizers: equal on all ranks.

        Plain values and tensors, except what callbacks and dataloaders give; every rank must ask.
        """
        generators = generator_states(self.state.device, self._loop.generators())
        return run_state(self.state, self._listeners) | {
            "data": self._loop.place(),
            "generators": process_group.gather_objects(generators),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave; the next `fit` goes on from there.

        Raises:
            ParallelismValueError: it is of a run with other schedulers, or of something else.
        """
        state = dict(state)
        place, generators = state.pop("data", None), state.pop("generators", [])
        load_run_state(self.state, self._listeners, state)
        self._loop.go_to(place)
        if self.state.rank < len(generators):  # a rank that was not there draws as it was seeded
            set_generator_states(generators[self.state.rank], self.state.device)

    def run_event(self, event: Event) -> None:
        """Calls every callback, then every logger."""
        for callback in self._listeners:
            callback.run_event(event, self.state, self.logger)

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
        """Takes a training dataloader."""
        dataloader = placed(dataloader, self._data_part)
        if self._check_sampler:
            check_sampler(dataloader, self._data_part)
        if self.state.train_dataloader is not None:  # the first one may have been begun by a process before
            self._loop.restart_epoch()
        self.state.train_dataloader = dataloader

    def _evaluate(self, evaluators: Sequence[Evaluator]) -> dict[str, float]:
        results: dict[str, float] = {}
        self.run_event(Event.EVAL_BEFORE_ALL)
        for one in evaluators:
            batches = placed(one.dataloader, self._data_part)
            feed = Feed(replace(one, dataloader=batches).batches, one.label, partial(measure, self.state))
            results |= evaluate(self.state, feed, one, self.logger, self.run_event, self._eval_loss)
        self.run_event(Event.EVAL_AFTER_ALL)
        return results

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Closes what is open, also on Ctrl-C; ranks that have lost another one raise what it reports."""
        try:
            with told_to_all():
                yield
        except BaseException:
            self.close()
            raise
