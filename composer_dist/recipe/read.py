"""From a file and overrides to a run that is known to make sense, or to all that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.resolve import resolve_config
from composer_dist.errors import ParallelismValueError
from composer_dist.recipe import named as registry
from composer_dist.recipe.models import peft_class
from composer_dist.recipe.named import resolve
from composer_dist.recipe.phases import check_phases, check_schedule
from composer_dist.recipe.problems import Faults
from composer_dist.recipe.schema import Run
from composer_dist.recipe.signature import arguments_of
from composer_dist.recipe.source import Document, Problem, override, parse
from composer_dist.trainer.callbacks import CheckpointSaver
from composer_dist.trainer.finetuning.phases import FineTuningPhases
from composer_dist.trainer.finetuning.schedule import Phase
from composer_dist.trainer.resume import Resume
from composer_dist.trainer.trainer import Trainer
from composer_dist.wording import near_miss

OURS = frozenset(
    {
        "self",
        "model",
        "train_dataloader",
        "eval_dataloader",
        "optimizers",
        "schedulers",
        "parallelism_config",
        "callbacks",
        "loggers",
        "seed",
        "resume",
    }
)
"""The Trainer's arguments that have sections of their own."""


_DATA_OF = {
    "causal_lm": ("text", "function"),
    "masked_lm": ("text", "function"),
    "sequence_classification": ("labeled_text", "function"),
    "module": ("function",),
}


_DATA_KINDS = {"text", "labeled_text", "function"}


class ConfigurationError(ParallelismValueError):
    """A configuration that cannot be run; says all that is wrong with it, and where."""


@dataclass(frozen=True)
class Configuration:
    """A run, and where its configuration came from."""

    run: Run
    folder: Path
    """Where files that it names are looked for."""
    parallelism: ParallelismConfig | None
    document: Document

    def phases(self, model: nn.Module) -> list[tuple[Phase, list[str]]]:
        """The phases, and the names of the parameters that each adds; none where the run has none.

        Raises:
            ConfigurationError: some do not fit the model, each with its line.
        """
        if self.run.phases is None:
            return []
        faults = Faults()
        phases = check_phases(self.run.phases, model, faults)
        if faults.problems:
            raise ConfigurationError(_told(self.document, faults.problems))
        return phases


def read_configuration(file: Path, assignments: Sequence[str] = ()) -> Configuration:
    """Reads and checks a configuration with its overrides.

    Raises:
        ConfigurationError: all that is wrong with it, each with its line and the nearest known key.
    """
    document, problems = _document(file)
    faults = Faults(problems + override(document, assignments))
    if not problems:
        document.values.setdefault("out", f"runs/{file.stem}")
        for section in ("optimizer", "scheduler"):
            if isinstance(name := document.values.get(section), str):
                document.values[section] = {"name": name}
        run = faults.check(Run, document.values)
        parallelism = _check_sections(document.values, file.parent, faults)
    if faults.problems:
        raise ConfigurationError(_told(document, faults.problems))
    return Configuration(run, file.parent, parallelism, document)


def _document(file: Path) -> tuple[Document, list[Problem]]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigurationError(f"{file}: {reason}. 'composer-dist init' writes a configuration.") from None
    return parse(text, str(file))


def _check_sections(values: dict[str, Any], folder: Path, faults: Faults) -> ParallelismConfig | None:
    """What is named by a string, so that only its own signature knows its arguments."""
    if isinstance(model := values.get("model"), dict):
        _check_model(model, folder, faults)
    if isinstance(data := values.get("data"), dict):
        _check_data(data, model, folder, faults)
    if isinstance(trainer := values.get("trainer"), dict):
        faults.check(arguments_of(Trainer, OURS), trainer, ("trainer",))
        if trainer.get("max_duration") is None:
            text = "'max_duration' is missing: how long the run is, such as '3ep' or '1000ba'"
            faults.problems.append(Problem(("trainer",), text))
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get("name"), str):
        _check_named("optimizer", registry.OPTIMIZERS, optimizer, {"params"}, folder, faults)
    scheduler = values.get("scheduler")
    if isinstance(scheduler, dict) and isinstance(scheduler.get("name"), str):
        _check_named("scheduler", registry.SCHEDULERS, scheduler, {"optimizer"}, folder, faults)
    for section, known in (("callbacks", registry.CALLBACKS), ("loggers", registry.LOGGERS)):
        if isinstance(given := values.get(section), dict):
            _check_each(section, known, given, folder, faults)
    if isinstance(phases := values.get("phases"), dict):
        faults.check(arguments_of(FineTuningPhases), phases, ("phases",))
        check_schedule(phases.get("schedule"), faults)
    if isinstance(checkpoints := values.get("checkpoints"), dict):
        faults.check(arguments_of(CheckpointSaver, frozenset({"folder"})), checkpoints, ("checkpoints",))
    if isinstance(resume := values.get("resume"), dict):
        faults.check(arguments_of(Resume), resume, ("resume",))
    return _parallelism(values.get("parallelism", "fsdp"), faults)


def _check_each(
    section: str, known: dict[str, str], given: dict[Any, Any], folder: Path, faults: Faults
) -> None:
    """Callbacks or loggers by name; that arguments are a mapping is the schema's to say."""
    for name, arguments in given.items():
        with faults.at(section, name):
            target = registry.find(section.removesuffix("s"), known, str(name), folder)
            if isinstance(arguments, dict | None):
                ours = frozenset(registry.PLACES.get(name, {})).difference(arguments or {})
                faults.check(arguments_of(target, ours), arguments or {}, (section, name))


def _check_named(
    section: str, known: dict[str, str], values: dict[str, Any], given: set[str], folder: Path, faults: Faults
) -> None:
    with faults.at(section, "name"):
        target = registry.find(section, known, values["name"], folder)
        arguments = {key: value for key, value in values.items() if key != "name"}
        ours = registry.WHOLE_RUN.difference(arguments) if section == "scheduler" else frozenset()
        faults.check(arguments_of(target, frozenset(given | ours)), arguments, (section,))


def _parallelism(value: Any, faults: Faults) -> ParallelismConfig | None:
    if value is None:
        return None
    path: tuple[str, ...] = ("parallelism",)
    if isinstance(value, dict):
        fields = {key: inner for key, inner in value.items() if key != "strategy"}
        if faults.check(ParallelismConfig, fields, path) is None:
            return None
        path = ("parallelism", "strategy")
    with faults.at(*path):
        return resolve_config(value)
    return None


def _check_model(model: dict[str, Any], folder: Path, faults: Faults) -> None:
    """What the model's section names, as far as that can be known without building it."""
    if isinstance(model.get("name"), str):
        with faults.at("model", "name"):
            arguments = model.get("arguments") or {}
            faults.check(arguments_of(resolve(model["name"], folder)), arguments, ("model", "arguments"))
    if isinstance(model.get("config"), dict):
        _check_transformers(model["config"], faults)
    if isinstance(model.get("adapter"), dict):
        with faults.at("model", "adapter", "method"):
            arguments = {key: value for key, value in model["adapter"].items() if key != "method"}
            given = frozenset({"task_type", "peft_type", "inference_mode"})
            kind = peft_class(model["adapter"].get("method", "lora"))
            faults.check(arguments_of(kind, given), arguments, ("model", "adapter"))


def _check_data(data: dict[str, Any], model: Any, folder: Path, faults: Faults) -> None:
    if isinstance(data.get("name"), str):
        with faults.at("data", "name"):
            arguments = data.get("arguments") or {}
            faults.check(arguments_of(resolve(data["name"], folder)), arguments, ("data", "arguments"))
    kinds = _DATA_OF.get(model.get("kind", "") if isinstance(model, dict) else "", ())
    if kinds and data.get("kind") in _DATA_KINDS.difference(kinds):
        text = f"a model of kind {model['kind']} needs data of kind {' or '.join(kinds)}"
        faults.problems.append(Problem(("data", "kind"), text))


def _check_transformers(config: dict[str, Any], faults: Faults) -> None:
    """Transformers takes any key; a misspelt one would be lost in silence."""
    from transformers import CONFIG_MAPPING

    path = ("model", "config")
    kind = config.get("model_type")
    if kind is None:
        faults.problems.append(Problem(path, "'model_type' is missing: 'llama', 'bert', 'qwen3', ..."))
    elif kind not in CONFIG_MAPPING:
        near = near_miss(str(kind), CONFIG_MAPPING.keys())
        faults.problems.append(Problem((*path, "model_type"), f"transformers has no model {kind!r}.{near}"))
    else:
        cls = CONFIG_MAPPING[kind]
        known = {field for base in cls.__mro__ for field in getattr(base, "__annotations__", {})}
        known |= cls.attribute_map.keys()
        for key in config.keys() - known - {"model_type"}:
            text = f"unknown key {key!r}; {cls.__name__} has none of this name.{near_miss(key, known)}"
            faults.problems.append(Problem((*path, key), text))


def _told(document: Document, problems: Sequence[Problem]) -> str:
    lines = []
    for problem in sorted(problems, key=document.order):
        path = ".".join(map(str, problem.path))
        lines.append(
            f"{document.place(problem)}: {f'{path}: ' if path else ''}{problem.text.removesuffix('.')}"
        )
    return "\n".join(lines)
