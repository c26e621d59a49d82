"""What a run would do: needs no process group and no memory for the model."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.distributed import ParallelPlan, named_parameters_canonical, plan_parallelism
from composer_dist.distributed.plan.text import table  # not public: it knows the terminal
from composer_dist.errors import ParallelismError, ParallelismValueError
from composer_dist.recipe.build import (
    batches,
    callbacks_of,
    epoch_of,
    optimizer_of,
    scheduler_of,
    tokenizer_of,
)
from composer_dist.recipe.data import datasets, length, loader
from composer_dist.recipe.models import build_model
from composer_dist.recipe.output.folder import check_writable
from composer_dist.recipe.read import Configuration
from composer_dist.recipe.schema import Run
from composer_dist.trainer import GradientClipping, NoImprovement, Phase, Resume

# Not public: only recipes and the Trainer check and seed.
from composer_dist.trainer.arguments import check_microbatch_size, positive
from composer_dist.trainer.data.randomness import seed_all


def describe(configuration: Configuration, world: int) -> str:
    """The plan for `world` ranks, and the run in numbers, as tables.

    Raises:
        ParallelismError: the run would fail, mostly with the same error.
    """
    run = configuration.run
    seed_all(run.seed)
    tokenizer = tokenizer_of(run)
    train, held_out = datasets(run, tokenizer, configuration.folder)
    train_loader = loader(train, run, configuration.folder, training=True)
    epoch = epoch_of(train_loader)
    model = build_model(run, tokenizer, configuration.folder, empty=True)
    phases = configuration.phases(model)
    optimizer = optimizer_of(run, model, configuration)
    scheduler_of(run, optimizer, configuration, epoch)
    callbacks_of(configuration)
    _check_numbers(run)
    check_writable(run.out)
    plan: ParallelPlan | None = None
    parallelism = _launched(configuration, world)
    if parallelism is None and world > 1:
        raise ParallelismValueError(f"{world} ranks need parallelism: set it to fsdp, for example.")
    if parallelism is not None:
        plan = plan_parallelism(
            model,
            parallelism,
            world_size=world,
            optimizer=optimizer,
            precision=run.trainer.get("precision"),
            composer=True,
        )
        train_loader.placed(plan.mesh["dp_replicate"] * plan.mesh["dp_shard"], 0)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    rows = {
        "ranks": world,
        "model": type(getattr(model, "model", None) or getattr(model, "module", model)).__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}, of which {trained:,} train",
        "samples to train on": _count(length(train)),
        "samples to evaluate on": "none" if held_out is None else _count(length(held_out)),
        "samples in a step": _shares(run.data.batch_size, plan),
        "steps in an epoch": _count(epoch),
        "steps": _steps(run.trainer.get("max_duration"), epoch),
        **_phases(phases, dict(named_parameters_canonical(model))),
        "writes to": run.out,
    }
    told = {name: str(value) for name, value in rows.items()}
    return table("Run", {"": "left", " ": "right"}, told.items()) + ("" if plan is None else f"\n{plan}")


def _check_numbers(run: Run) -> None:
    """Raise what the Trainer would raise, and for a checkpoint that is not there."""
    for name in ("max_duration", "eval_interval"):
        positive(name, run.trainer.get(name))
    check_microbatch_size(run.trainer.get("device_train_microbatch_size"))
    GradientClipping.of(run.trainer.get("gradient_clipping"))
    path = str(Resume(**run.resume).load_path or "") if isinstance(run.resume, dict) else ""
    if path and "://" not in path and not os.path.lexists(path):
        raise ParallelismValueError(f"resume.load_path: there is no checkpoint at {path}.")


def _phases(phases: list[tuple[Phase, list[str]]], parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """What each phase adds, and how long it lasts."""
    rows = {}
    for number, (phase, names) in enumerate(phases):
        match phase.until:
            case None:
                length = "to the end"
            case NoImprovement(metric=metric):
                length = f"while {metric} improves"
            case time:
                length = f"for {time}"
        rows[f"phase {number} adds"] = f"{sum(parameters[name].numel() for name in names):,}, {length}"
    return rows


def _shares(size: int, plan: ParallelPlan | None) -> str:
    """The batch, and each rank's share of it."""
    if plan is None or plan.world_size == 1:
        return str(size)
    return f"{size}, {size / (plan.mesh['dp_replicate'] * plan.mesh['dp_shard']):g} on each rank"


def _launched(configuration: Configuration, world: int) -> ParallelismConfig | None:
    """The parallelism as `world` ranks on this host would have it: some strategies ask the launcher."""
    given = configuration.document.values.get("parallelism", "fsdp")
    before = {name: os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.update(
        {name: value or str(world) for name, value in before.items()} | {"WORLD_SIZE": str(world)}
    )
    try:
        return None if given is None else resolve_config(given)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _count(number: int | None) -> str:
    return "unknown: a stream" if number is None else f"{number:,}"


def _steps(duration: Any, epoch: int | None) -> str:
    try:
        return f"{batches(duration, epoch):,}"
    except ParallelismError:
        return f"until {duration}"
