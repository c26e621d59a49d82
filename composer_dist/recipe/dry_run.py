"""What a run would do: needs no process group and no memory for the model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from composer_dist.checkpoint.convert import model_like  # not public: it knows which classes may be built
from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.config.yaml import parse_value
from composer_dist.distributed import (
    ParallelPlan,
    init_context,
    named_parameters_canonical,
    plan_parallelism,
    process_group,
)
from composer_dist.distributed.plan.text import table  # not public: it knows the terminal
from composer_dist.distributed.weights.initialize import find_components  # nor this: preparation asks it
from composer_dist.errors import ParallelismError, ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision, as_precision, require_fp8
from composer_dist.random_states import seed_all
from composer_dist.recipe.build import (
    callbacks_of,
    check_monitored,
    check_steps,
    check_total,
    earlier_run,
    loggers_of,
    optimizer_of,
    resume_of,
    scheduler_of,
    start_of,
)
from composer_dist.recipe.data import batches, datasets, epoch_of, loader
from composer_dist.recipe.first_look.places import check_places
from composer_dist.recipe.models import build_model, tokenizer_of
from composer_dist.recipe.named import OPTIMIZERS, find, resolve
from composer_dist.recipe.problems import blamed_on
from composer_dist.recipe.read import Configuration, read_configuration
from composer_dist.recipe.schema import HubModel, PreferenceData, Run
from composer_dist.structure.families import quiet_imports  # not public: users see its effect only
from composer_dist.structure.structure import read_structure
from composer_dist.trainer import (
    Callback,
    Generate,
    GradientClipping,
    Logger,
    LoggerDestination,
    NoImprovement,
    Phase,
)

# Not public: only recipes and the Trainer check.
from composer_dist.trainer.arguments import as_list, check_options
from composer_dist.trainer.data.loader import sample_count  # not public: for recipes and the Trainer
from composer_dist.trainer.resuming.resume import check_resume


def describe(configuration: Configuration, world: int) -> str:
    """The plan for `world` ranks, and the run in numbers, as tables.

    Raises:
        ParallelismError: the run would fail, mostly with the same error.
    """
    run = configuration.run
    check_places(run)
    mesh = configuration.parallelism.mesh if configuration.parallelism else None
    for device in (run.trainer.get("device"), getattr(mesh, "device_type", None)):
        if device is not None:
            process_group.device_here(device)
    seed_all(run.seed)
    tokenizer = tokenizer_of(run)
    train, held_out = datasets(run, tokenizer, configuration.folder)
    train_loader = loader(train, configuration, tokenizer, training=True)
    epoch = epoch_of(run, train_loader)
    model = build_model(run, tokenizer, configuration.folder, empty=True).model
    phases = configuration.phases(model)
    check_monitored(configuration, model, held_out is not None)
    optimizer = optimizer_of(run, model, configuration)
    schedulers = scheduler_of(run, optimizer, configuration, epoch)
    plan: ParallelPlan | None = None
    parallelism = _launched(configuration, world)
    if parallelism is None and world > 1:
        raise ParallelismValueError(f"{world} ranks need parallelism: set it to fsdp, for example.")
    _check_arguments(run, parallelism is not None)
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
    _check_initialized(run, model)
    state = start_of(run, model, optimizer, schedulers, epoch)
    check_steps(configuration, train, train_loader, state, streams=True)
    callbacks: list[Callback] = as_list("callbacks", callbacks_of(configuration), Callback)
    as_list("loggers", loggers_of(configuration), LoggerDestination)
    for callback in callbacks:
        if isinstance(callback, Generate):
            callback.init(state, Logger(state, []))
    if (resume := resume_of(run)) is not None:
        with earlier_run(run):
            if check_resume(resume, state, callbacks, train_loader) is not None:
                check_total(state, run)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    rows = {
        "ranks": world,
        "model": type(getattr(model, "model", None) or getattr(model, "module", model)).__name__,
        "parameters": f"{sum(p.numel() for p in parameters):,}, of which {trained:,} train",
        "samples to train on": _count(sample_count(train)),
        "samples to evaluate on": "none" if held_out is None else _count(sample_count(held_out)),
        "samples in a step": _shares(run.data.batch_size, plan),
        "steps in an epoch": _count(epoch),
        "steps": _steps(run.trainer.get("max_duration"), epoch),
        **_phases(phases, dict(named_parameters_canonical(model))),
        "writes to": run.out,
    }
    shown = {name: str(value) for name, value in rows.items()}
    text = table("Run", {"": "left", " ": "right"}, shown.items())
    return text if plan is None else f"{text}\n{plan}\n{_memory(run, plan)}"


def _memory(run: Run, plan: ParallelPlan) -> str:
    """What a rank needs; without the step if the forward cannot be traced, which the run does not need."""
    try:
        return str(plan.memory(_batch(run, plan)))
    except Exception as error:
        return f"{plan.memory()}\nThe memory of a step is not known: {error}"


def _check_arguments(run: Run, prepares: bool) -> None:
    """Raises what the Trainer would raise."""
    options = run.trainer
    precision = as_precision(options.get("precision"))
    check_options(precision, options.get("compile", False), prepares)
    if precision is Precision.AMP_FP8:
        require_fp8(torch.device(options.get("device") or torch.accelerator.current_accelerator() or "cpu"))
    GradientClipping.of(options.get("gradient_clipping"))


def _check_initialized(run: Run, model: nn.Module) -> None:
    """Raises if nothing initializes a tensor of a new model."""
    if isinstance(run.model, HubModel) and run.model.pretrained is not None:
        return
    structure = read_structure(model)
    on_meta = {name for name, held in structure.tensors.items() if held.get().is_meta}
    if on_meta and not (isinstance(run.model, HubModel) and run.model.adapter is not None):
        find_components(structure, on_meta)


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
    share, rest = divmod(size, plan.mesh["dp_replicate"] * plan.mesh["dp_shard"])
    return f"{size}, {share}{f' or {share + 1}' if rest else ''} on each rank"


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


@dataclass(frozen=True)
class Planned:
    """A plan, what it was made of, and the batch of one rank if the configuration says so."""

    plan: ParallelPlan
    model: nn.Module
    wishes: Mapping[str, Any]
    """Arguments of `plan_parallelism` and `suggest`."""
    batch: Any = None
    """That is computed with at once."""
    share: tuple[int, int] | None = None
    """In a step."""


def planned(
    model: str,
    world: int,
    config: Path | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    overrides: Sequence[str] = (),
) -> Planned:
    """The plan of what `model` names: a config.json, a model directory, a run's YAML or `module:function`.

    Args:
        config: a YAML file with the fields of `ParallelismConfig`.
        precision: of the computation.
        optimizer: the name of a class, as in a run; AdamW if None.
        overrides: of the values of a run, which has the other arguments in its file.

    Raises:
        ParallelismError: the model cannot be built, or not be prepared like this.
    """
    file = Path(model)
    with quiet_imports():
        if file.suffix in (".yaml", ".yml"):
            given = {"--config": config, "--precision": precision, "--optimizer": optimizer}
            if ignored := [name for name, value in given.items() if value is not None]:
                raise ParallelismValueError(
                    f"{', '.join(ignored)}: {model} is a run, which sets this itself. Override its values "
                    "instead: parallelism=..., trainer.precision=amp_bf16, optimizer=sgd."
                )
            return _of_run(file, world, overrides)
        if overrides:
            raise ParallelismValueError(
                f"{' '.join(overrides)}: only values of a run's YAML can be overridden, not of {model}."
            )
        built = _built(model)
    kind = find("--optimizer", OPTIMIZERS, optimizer or "adamw", Path())
    wishes: dict[str, Any] = {
        "config": "fsdp" if config is None else _mapping(config),
        "optimizer": kind([parameter for parameter in built.parameters() if parameter.requires_grad]),
        "precision": precision,
    }
    return Planned(plan_parallelism(built, world_size=world, **wishes), built, wishes)


def _of_run(file: Path, world: int, overrides: Sequence[str]) -> Planned:
    configuration = read_configuration(file, overrides)
    run = configuration.run
    with blamed_on(configuration.document):
        tokenizer = tokenizer_of(run)
        model = build_model(run, tokenizer, configuration.folder, empty=True).model
        wishes: dict[str, Any] = {
            "config": configuration.parallelism or "fsdp",
            "optimizer": optimizer_of(run, model, configuration),
            "precision": run.trainer.get("precision"),
            "composer": True,
        }
        plan = plan_parallelism(model, world_size=world, **wishes)
    return Planned(plan, model, wishes, _batch(run, plan), _share(run, plan))


def _share(run: Run, plan: ParallelPlan) -> tuple[int, int] | None:
    """The samples and tokens of a rank in a step; None for data that is not text."""
    share = -(-run.data.batch_size // (plan.mesh["dp_replicate"] * plan.mesh["dp_shard"]))
    context = getattr(run.data, "context", None)
    return (share, context) if isinstance(context, int) else None


def _batch(run: Run, plan: ParallelPlan) -> Any:
    """What a rank computes with at once: samples and tokens, or pairs of answers."""
    share, microbatch = _share(run, plan), run.trainer.get("device_train_microbatch_size")
    if share is not None and isinstance(microbatch, int):
        share = min(share[0], microbatch), share[1]
    if share is None or not isinstance(run.data, PreferenceData):
        return share
    pair = torch.zeros(share[0], 2, share[1], dtype=torch.long)
    return dict.fromkeys(("input_ids", "attention_mask", "labels"), pair)


def _built(name: str) -> nn.Module:
    """The model, on the meta device."""
    file = Path(name)
    if file.is_dir() or file.name == "config.json":
        folder = file if file.is_dir() else file.parent
        if (folder / "config.json").is_file():
            return model_like(folder, "Its config.json must name an architecture")  # type: ignore[no-any-return]
    if ":" not in name:
        raise ParallelismValueError(
            f"{name} is not a model: expected a directory with a config.json, a file called config.json, a "
            "run's YAML, or package.module:function for a function that returns one."
        )
    with init_context():
        made = resolve(name, Path())()
    if not isinstance(made, nn.Module):
        raise ParallelismTypeError(f"{name} returns {type(made).__name__}, not a model.")
    return made


def _mapping(file: Path) -> Mapping[str, Any]:
    try:
        values = parse_value(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParallelismValueError(f"{file}: {error}") from None
    found = values.get("parallelism", values) if isinstance(values, Mapping) else None
    if not isinstance(found, Mapping):
        raise ParallelismTypeError(f"{file} is not a mapping of the fields of ParallelismConfig.")
    return found
