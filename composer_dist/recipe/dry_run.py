"""What a run would do: needs no process group and no memory for the model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from composer_dist.distributed import ParallelPlan, named_parameters_canonical, plan_parallelism
from composer_dist.distributed.plan.text import table  # not public: it knows the terminal
from composer_dist.errors import ParallelismError
from composer_dist.recipe.build import batches, optimizer_of, scheduler_of, tokenizer_of
from composer_dist.recipe.data import datasets, loader
from composer_dist.recipe.models import build_model
from composer_dist.recipe.read import Configuration
from composer_dist.trainer import NoImprovement, Phase
from composer_dist.trainer.data.randomness import seed_all  # not public: only recipes and the Trainer seed


def describe(configuration: Configuration, world: int) -> str:
    """The plan for `world` ranks, and the run in numbers, as tables.

    Raises:
        ParallelismError: the run would fail, mostly with the same error.
    """
    run = configuration.run
    seed_all(run.seed)
    tokenizer = tokenizer_of(run)
    train, held_out = datasets(run, tokenizer, configuration.folder)
    train_loader = loader(train, run, training=True)
    model = build_model(run, tokenizer, configuration.folder, empty=True)
    phases = configuration.phases(model)
    optimizer = optimizer_of(run, model, configuration)
    scheduler_of(run, optimizer, configuration, len(train_loader))
    plan: ParallelPlan | None = None
    if configuration.parallelism is not None:
        plan = plan_parallelism(
            model,
            configuration.parallelism,
            world_size=world,
            optimizer=optimizer,
            precision=run.trainer.get("precision"),
            composer=True,
        )
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    rows = {
        "ranks": world,
        "model": type(getattr(model, "model", None) or getattr(model, "module", model)).__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}, of which {trained:,} train",
        "samples to train on": f"{len(train):,}",  # type: ignore[arg-type]
        "samples to evaluate on": f"{len(held_out):,}" if held_out is not None else "none",  # type: ignore[arg-type]
        "samples in a step": _shares(run.data.batch_size, plan),
        "steps in an epoch": f"{len(train_loader):,}",
        "steps": _steps(run.trainer.get("max_duration"), len(train_loader)),
        **_phases(phases, dict(named_parameters_canonical(model))),
        "writes to": run.out,
    }
    told = {name: str(value) for name, value in rows.items()}
    return table("Run", {"": "left", " ": "right"}, told.items()) + ("" if plan is None else f"\n{plan}")


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


def _steps(duration: Any, epoch: int) -> str:
    try:
        return f"{batches(duration, epoch):,}"
    except ParallelismError:
        return f"until {duration}"
