"""From a checked configuration to a Trainer that is ready, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer_dist import ComposerModel, Trainer
from composer_dist.distributed import process_group
from composer_dist.errors import CheckpointError, CheckpointValueError, ParallelismValueError, kind_of
from composer_dist.recipe import named
from composer_dist.recipe.data import datasets, loader
from composer_dist.recipe.models import build_model
from composer_dist.recipe.read import Configuration
from composer_dist.recipe.schema import HubModel, Run
from composer_dist.recipe.signature import known_names
from composer_dist.recipe.tokenizer import tokenizer_named
from composer_dist.trainer import CheckpointSaver, FineTuningPhases, Resume, Time, TimeUnit, seed_all

CHECKPOINTS = "checkpoints"
"""Where they are, in the run's folder."""


@dataclass
class Session:
    """A run that is ready to start."""

    run: Run
    model: ComposerModel
    trainer: Trainer


def build(configuration: Configuration) -> Session:
    """Makes the process group, model, data, optimizer and Trainer; every rank calls it.

    Raises:
        ParallelismError: on every rank: something cannot be made as the configuration asks.
    """
    run, folder = configuration.run, configuration.folder
    process_group.init(device=run.trainer.get("device"), reuse=True)
    with process_group.together("the run's folder"):  # before anything that takes long
        _make(run.out)
    seed_all(run.seed)
    with process_group.together("reading the data"):
        tokenizer = tokenizer_of(run)
        train, held_out = datasets(run, tokenizer, folder)
        train_loader = loader(train, run, training=True)
        eval_loader = None if held_out is None else loader(held_out, run, training=False)
    with process_group.together("building the model"):
        seed_all(run.seed)
        model = build_model(run, tokenizer, folder)
        configuration.phases(model)  # whose error has lines, unlike that of the callback
        optimizer = optimizer_of(run, model, configuration)
        schedulers = scheduler_of(run, optimizer, configuration, len(train_loader))
    stepped = any(isinstance(one, LRScheduler) for one in schedulers)
    options: dict[str, Any] = {"step_schedulers_every_batch": True if stepped else None} | run.trainer
    with _earlier_run(run):
        trainer = Trainer(
            model=model,
            train_dataloader=train_loader,
            optimizers=optimizer,
            schedulers=schedulers,
            eval_dataloader=eval_loader,
            parallelism_config=configuration.parallelism,
            seed=run.seed,
            resume=_resume(run),
            callbacks=_callbacks(configuration),
            loggers=_loggers(configuration),
            **options,
        )
        _check_steps(trainer, run)
    return Session(run, model, trainer)


def tokenizer_of(run: Run) -> Any:
    """The tokenizer of a Hugging Face model; None for any other."""
    if not isinstance(run.model, HubModel):
        return None
    return tokenizer_named(run.model.tokenizer or run.model.pretrained or "bytes")


def optimizer_of(run: Run, model: ComposerModel, configuration: Configuration) -> Optimizer:
    """An optimizer of the parameters that train."""
    kind = named.find("optimizer", named.OPTIMIZERS, run.optimizer.name, configuration.folder)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: Optimizer = kind(trainable, **run.optimizer.arguments)
    return made


def scheduler_of(run: Run, optimizer: Optimizer, configuration: Configuration, epoch: int) -> list[Any]:
    """The learning rate's schedule, if there is one; one of torch's steps once a batch.

    Raises:
        ParallelismValueError: torch's must know the number of batches, and the run's end does not tell it.
    """
    if run.scheduler is None:
        return []
    kind = named.find("scheduler", named.SCHEDULERS, run.scheduler.name, configuration.folder)
    arguments = run.scheduler.arguments
    if not issubclass(kind, LRScheduler) and "optimizer" not in known_names(kind):
        return [kind(**arguments)]
    for name in named.WHOLE_RUN.intersection(known_names(kind)).difference(arguments):
        arguments[name] = batches(run.trainer.get("max_duration"), epoch)
    return [kind(optimizer, **arguments)]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParallelismValueError(f"out={folder} cannot be made: {error.strerror}.") from None


@contextmanager
def _earlier_run(run: Run) -> Iterator[None]:
    """What is wrong with the checkpoints of an earlier run says what else there is to do."""
    try:
        yield
    except CheckpointError as error:
        text = f"{error} To begin anew, choose another out than {run.out}, which has an earlier run."
        raise kind_of(error)(text) from error


def _check_steps(trainer: Trainer, run: Run) -> None:
    """Refuses to go on beyond the last step of a schedule that an earlier process has begun."""
    for scheduler in trainer.state.schedulers:
        last = getattr(scheduler, "total_steps", None)
        if last is None or trainer.resumed_from is None:
            continue
        if batches(run.trainer["max_duration"], trainer.state.train_length or 0) > last:
            raise CheckpointValueError(
                f"The run was begun for {last} batches, beyond which {type(scheduler).__name__} cannot go; "
                "'cosine', 'linear' and 'constant' can."
            )


def _callbacks(configuration: Configuration) -> list[Any]:
    run, folder = configuration.run, configuration.folder
    made = [
        named.find("callback", named.CALLBACKS, name, folder)(**(arguments or {}))
        for name, arguments in run.callbacks.items()
    ]
    if run.phases is not None:
        made.append(FineTuningPhases(**run.phases))
    if run.checkpoints is not None:
        made.append(CheckpointSaver(run.out / CHECKPOINTS, **run.checkpoints))
    return made


def _resume(run: Run) -> Resume | None:
    """Where the run begins: by default at its newest checkpoint."""
    if isinstance(run.resume, dict):
        asked: dict[str, Any] = {"autoresume": run.checkpoints is not None} | run.resume
        return Resume(**asked)
    if run.checkpoints is None:
        return None
    if run.resume:
        return Resume(autoresume=True)
    folder = run.out / CHECKPOINTS
    if process_group.broadcast(folder.is_dir() and any(folder.iterdir())):
        raise ParallelismValueError(
            f"resume=false, but {folder} has checkpoints of an earlier run; remove it, or choose another out."
        )
    return None


def _loggers(configuration: Configuration) -> list[Any]:
    return [
        named.find("logger", named.LOGGERS, name, configuration.folder)(
            **named.placed(name, arguments, configuration.run.out)
        )
        for name, arguments in configuration.run.loggers.items()
    ]


def batches(duration: Time | str | int | None, epoch: int) -> int:
    """How many batches a duration has.

    Raises:
        ParallelismValueError: it is in a unit that does not say.
    """
    time = Time.of(duration) if duration is not None else None
    if time is not None and time.unit is TimeUnit.BATCH:
        return int(time.value)
    if time is not None and time.unit is TimeUnit.EPOCH:
        return int(time.value) * epoch
    raise ParallelismValueError(
        "The schedule of the learning rate needs to know the number of batches; "
        f"max_duration={duration!r} does not tell it. Write it in batches ('200ba') or epochs ('3ep')."
    )
