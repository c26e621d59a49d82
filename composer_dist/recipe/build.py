"""Builds the Trainer of a checked configuration, step by step."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer_dist import ComposerModel, Trainer
from composer_dist.checkpoint import latest_checkpoint
from composer_dist.config.yaml import KeyPath
from composer_dist.distributed import meta_init, process_group
from composer_dist.errors import CheckpointError, CheckpointValueError, ParallelismValueError, kind_of
from composer_dist.precision import as_precision
from composer_dist.random_states import seed_all, set_aside
from composer_dist.recipe import named
from composer_dist.recipe.data import Loader, batches, datasets, epoch_of, loader
from composer_dist.recipe.models import Built, build_model, tokenizer_of
from composer_dist.recipe.other_libraries.failures import blaming, check_wandb
from composer_dist.recipe.output.summary import RunSummary
from composer_dist.recipe.problems import Problems
from composer_dist.recipe.read import Configuration
from composer_dist.recipe.schema import Entries, HubModel, Run
from composer_dist.recipe.signature import known_names
from composer_dist.recipe.trial import check_eps, samples_to_try, try_step
from composer_dist.trainer import (
    CheckpointSaver,
    FineTuningPhases,
    NoImprovement,
    Resume,
    State,
    Timestamp,
    TimeUnit,
)

# Not public: only recipes and the Trainer check.
from composer_dist.trainer.arguments import as_list, check_duration
from composer_dist.trainer.data.batch import num_samples, num_tokens
from composer_dist.trainer.data.loader import sample_count
from composer_dist.trainer.evaluation import check_metrics
from composer_dist.trainer.improvement import measured_on
from composer_dist.trainer.schedulers import sorted_out
from composer_dist.wording import near_miss

CHECKPOINTS = "checkpoints"
"""The name of their folder in the run's."""


@dataclass
class Session:
    """A run that is ready to start."""

    run: Run
    model: ComposerModel
    trainer: Trainer
    summary: RunSummary


def build(configuration: Configuration) -> Session:
    """Makes the process group, model, data, optimizer and Trainer; every rank calls it.

    Raises:
        ParallelismError: on every rank; something cannot be made as the configuration asks.
    """
    run, summary = configuration.run, RunSummary()
    train, train_loader, eval_loader, built = data_and_model(configuration)
    model = built.model
    with process_group.together("building the optimizer"):
        check_monitored(configuration, model, eval_loader is not None)
        optimizer = optimizer_of(run, model, configuration)
        epoch = epoch_of(run, train_loader)
        schedulers = scheduler_of(run, optimizer, configuration, epoch)
        state = start_of(run, model, optimizer, schedulers, epoch)
        check_steps(configuration, train, train_loader, state)
        callbacks, loggers = callbacks_of(configuration), loggers_of(configuration)
    stepped = any(isinstance(one, LRScheduler) for one in schedulers)
    options: dict[str, Any] = {"step_schedulers_every_batch": True if stepped else None} | run.trainer
    with earlier_run(run):
        trainer = Trainer(
            model=model,
            train_dataloader=train_loader,
            optimizers=optimizer,
            schedulers=schedulers,
            eval_dataloader=eval_loader,
            parallelism_config=built.parallelism,
            weights=built.weights,
            seed=run.seed,
            resume=resume_of(run),
            callbacks=[*callbacks, summary],
            loggers=loggers,
            **options,
        )
        if trainer.resumed_from is not None:
            check_total(trainer.state, run)
    return Session(run, model, trainer, summary)


def data_and_model(configuration: Configuration) -> tuple[Any, Loader, Loader | None, Built]:
    """Makes the process group, the data to train on, the loaders and the model; every rank calls it."""
    run, folder = configuration.run, configuration.folder
    process_group.init(device=run.trainer.get("device"), reuse=True)
    seed_all(run.seed)
    with process_group.together("reading the data"):
        tokenizer = tokenizer_of(run)
        train, held_out = datasets(run, tokenizer, folder)
        train_loader = loader(train, configuration, tokenizer, training=True)
        eval_loader = None if held_out is None else loader(held_out, configuration, tokenizer, training=False)
    with process_group.together("building the model"):
        seed_all(run.seed)
        built = build_model(run, tokenizer, folder, configuration.parallelism)
        if built.parallelism is None:
            meta_init(built.model)  # as the preparation would
    return train, train_loader, eval_loader, built


def optimizer_of(run: Run, model: ComposerModel, configuration: Configuration) -> Optimizer:
    """An optimizer of the parameters that train."""
    kind = named.find("optimizer", named.OPTIMIZERS, run.optimizer.name, configuration.folder)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    arguments = default_rate(run) | run.optimizer.arguments
    with blaming(f"optimizer {run.optimizer.name!r}"):
        made: Optimizer
        (made,) = as_list("optimizer.name", kind(trainable, **arguments), Optimizer)
    return check_eps(made)


def default_rate(run: Run) -> dict[str, float]:
    """The learning rate of Adam if the configuration has none: torch's is 50 times too high to fine-tune."""
    if not isinstance(run.model, HubModel) or run.optimizer.name not in ("adam", "adamw"):
        return {}
    if run.model.pretrained is not None:
        return {"lr": 2e-5 if run.model.adapter is None else 2e-4}
    return {"lr": 1e-3 if run.model.adapter is None else 4e-3}


def scheduler_of(
    run: Run, optimizer: Optimizer, configuration: Configuration, epoch: int | None
) -> list[Any]:
    """The schedule of the learning rate, if there is one; torch's schedulers step once a batch by default."""
    if run.scheduler is None:
        return []
    kind = named.find("scheduler", named.SCHEDULERS, run.scheduler.name, configuration.folder)
    arguments = run.scheduler.arguments
    torchs = isinstance(kind, type) and issubclass(kind, LRScheduler)
    if not isinstance(kind, type) and "state" in known_names(kind):
        return [partial(kind, **arguments)]
    if not torchs and "optimizer" not in known_names(kind):
        return [kind(**arguments)]
    for name in named.WHOLE_RUN.intersection(known_names(kind)).difference(arguments):
        arguments[name] = _scheduler_steps(run, epoch)
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    with blaming(f"scheduler {run.scheduler.name!r}{given and f' with {given}'}"):
        made = kind(optimizer, **arguments)
    last = getattr(made, "total_steps", None)
    if last is not None and (steps := _scheduler_steps(run, epoch)) > last:
        raise ParallelismValueError(f"scheduler.total_steps is {last}, but the run has {steps} steps.")
    return [made]


def _scheduler_steps(run: Run, epoch: int | None) -> int:
    """How often torch's schedulers step: after each batch, or after each epoch if the run says so."""
    count = batches(run.trainer.get("max_duration"), epoch)
    return count if run.trainer.get("step_schedulers_every_batch", True) else count // (epoch or 1)


def start_of(
    run: Run, model: ComposerModel, optimizer: Optimizer, schedulers: Sequence[Any], epoch: int | None
) -> State:
    """The state of a new run at its start.

    Raises:
        ParallelismError: the schedules have times that cannot be compared, or cannot be stepped.
    """
    torchs, schedules = sorted_out(schedulers, [optimizer])
    state = State(model=model, optimizers=[optimizer], schedulers=torchs, train_length=epoch)
    state.plan_fit(check_duration(run.trainer.get("max_duration")), None)
    for schedule in schedules:
        schedule.factor(state)
    return state


def check_steps(
    configuration: Configuration, train: Any, train_loader: Loader, state: State, streams: bool = False
) -> None:
    """Raises if some samples make no batch or the model cannot take it, or if a scheduler cannot step.

    Args:
        streams: read samples of a stream too, which a run would lose.
    """
    run = configuration.run
    parameters = {id(one): one for one in state.model.parameters()}
    for scheduler in state.schedulers:
        try:
            trial = deepcopy(scheduler, dict(parameters))
        except Exception:  # a scheduler of the user's own may hold anything
            continue
        with blaming("scheduler"), warnings.catch_warnings(action="ignore"):  # no optimizer has stepped
            trial.step()
    if (count := sample_count(train)) is None and not streams:
        return
    with set_aside(), blaming("data: some samples do not make a batch"):
        samples, size = samples_to_try(train, count), run.data.batch_size
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        batches = [train_loader.collate_fn(part) for part in parts]
    after = Timestamp()
    for batch in batches:
        after = after.next_batch(samples=num_samples(batch), tokens=num_tokens(batch))
    given = [run.trainer.get("max_duration"), run.trainer.get("eval_interval")]
    given += [
        (run.checkpoints or {}).get("interval"),
        *(run.scheduler.arguments if run.scheduler else {}).values(),
    ]
    if any(str(time).endswith("tok") for time in given):
        after.get(TimeUnit.TOKEN)
    if set(named.CALLBACKS).issuperset(run.callbacks):  # others may change the model before it trains
        kind = named.find("optimizer", named.OPTIMIZERS, run.optimizer.name, configuration.folder)
        precision = as_precision(run.trainer.get("precision"))
        for batch in batches:
            try_step(state.model, kind, run.optimizer.arguments, precision, batch)


def check_monitored(configuration: Configuration, model: ComposerModel, evaluates: bool) -> None:
    """Raises if there will be no metric that a callback or a phase waits for, or if one has no values.

    A model or callbacks of the user's own may log any metric: then the run finds out.

    Raises:
        ConfigurationError: names the metrics, each problem with its line.
    """
    run, problems = configuration.run, Problems(configuration.document)
    monitored: dict[KeyPath, str] = {}
    for number, (phase, _) in enumerate(configuration.phases(model)):  # its errors have lines too
        if isinstance(phase.until, NoImprovement):
            monitored["phases", "schedule", number, "until", "metric"] = phase.until.metric
    if (stopping := run.callbacks.get("early_stopping")) is not None:
        monitored["callbacks", "early_stopping", "monitor"] = stopping["monitor"]
    if (best := (run.checkpoints or {}).get("monitor")) is not None:
        monitored["checkpoints", "monitor"] = best
    evaluates = evaluates and run.trainer.get("eval_interval", "") is not None
    labels = ["train", "eval"] if evaluates else ["train"]
    for label in labels:
        check_metrics(model.get_metrics(label == "train"))
    known = [f"metrics/{label}/{name}" for label in labels for name in model.get_metrics(label == "train")]
    known += [f"loss/{one}/total" for one in labels if one == "train" or run.trainer.get("eval_loss", True)]
    ours = type(model).__module__.startswith("composer_dist.")
    ours = ours and set(named.CALLBACKS).issuperset(run.callbacks)
    for path, metric in monitored.items():
        kind = metric.partition("/")[0]
        unknown = ours and kind in ("loss", "metrics", metric) and not metric.startswith(tuple(known))
        if unknown or measured_on(metric) not in (None, *labels):
            near = near_miss(metric, known)
            problems.add(f"there is no metric {metric!r}.{near} Logged metrics: {', '.join(known)}", *path)
    problems.settle()


@contextmanager
def earlier_run(run: Run) -> Iterator[None]:
    """Errors of an earlier run's checkpoints say how to start over; others name `resume.load_path`."""
    there = any((run.out / CHECKPOINTS).glob("*"))
    try:
        yield
    except CheckpointError as error:
        named = isinstance(run.resume, dict) and "load_path" in run.resume
        text = f"resume.load_path: {error}" if named else str(error)
        if there:
            text = f"{error} To start over, choose another out than {run.out}, which has an earlier run."
        raise kind_of(error)(text) from error


def check_total(state: State, run: Run) -> None:
    """Refuses to continue beyond the last step of a schedule that an earlier process started."""
    for scheduler in state.schedulers:
        last = getattr(scheduler, "total_steps", None)
        if last is not None and _scheduler_steps(run, state.train_length or 0) > last:
            raise CheckpointValueError(
                f"The run was started for {last} batches, and {type(scheduler).__name__} cannot go further; "
                "'cosine', 'linear' and 'constant' can."
            )


def _by_name(
    section: str, known: dict[str, str], entries: Entries, configuration: Configuration, problems: Problems
) -> list[Any]:
    """The callbacks or loggers; what they say against their arguments is added to the problems."""
    made = []
    for name, arguments in entries.items():
        with problems.at(section, name):
            kind = named.find(section.removesuffix("s"), known, name, configuration.folder)
            made.append(kind(**named.placed(name, arguments, configuration.run.out)))
    return made


def callbacks_of(configuration: Configuration) -> list[Any]:
    """The callbacks that the configuration names, its phases and its checkpoints.

    Raises:
        ConfigurationError: some refuse their arguments, each with its line.
    """
    run, problems = configuration.run, Problems(configuration.document)
    made = _by_name("callbacks", named.CALLBACKS, run.callbacks, configuration, problems)
    if run.phases is not None:
        with problems.at("phases"):
            made.append(FineTuningPhases(**run.phases))
    if run.checkpoints is not None:
        with problems.at("checkpoints"):
            made.append(CheckpointSaver(**{"folder": run.out / CHECKPOINTS, **run.checkpoints}))
    problems.settle()
    return made


def resume_of(run: Run) -> Resume | None:
    """Where the run starts: by default at its newest checkpoint."""
    if isinstance(run.resume, dict):
        asked: dict[str, Any] = {"autoresume": run.checkpoints is not None} | run.resume
        return Resume(**asked)
    if run.checkpoints is None:
        return None
    if run.resume:
        return Resume(autoresume=True)
    if run.checkpoints.get("overwrite"):
        return None
    folder = run.checkpoints.get("folder", run.out / CHECKPOINTS)
    there = Path(folder).is_dir() and any(Path(folder).iterdir())
    if process_group.broadcast(there) or latest_checkpoint(folder, verify=False):
        raise ParallelismValueError(
            f"resume=false, but {folder} has checkpoints of an earlier run; remove it, choose "
            "another out, or set checkpoints.overwrite."
        )
    return None


def loggers_of(configuration: Configuration) -> list[Any]:
    """The loggers that the configuration names.

    Raises:
        ConfigurationError: some refuse their arguments, each with its line.
    """
    run, problems = configuration.run, Problems(configuration.document)
    made = _by_name("loggers", named.LOGGERS, run.loggers, configuration, problems)
    if "wandb" in run.loggers and process_group.world_and_rank()[1] == 0:  # the rank that logs
        with problems.at("loggers", "wandb"):
            check_wandb(run.loggers["wandb"] or {})
    problems.settle()
    return made
