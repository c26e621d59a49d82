"""Reads a configuration with its overrides and checks it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from composer_dist import ParallelismConfig, Trainer
from composer_dist.config.parallelism import resolve_config
from composer_dist.config.yaml import KeyPath
from composer_dist.recipe import named
from composer_dist.recipe.first_look.configurations import check_configuration, imported_keys
from composer_dist.recipe.first_look.look import DATA_OF, read_sections
from composer_dist.recipe.models import peft_class
from composer_dist.recipe.problems import Problems
from composer_dist.recipe.schema import Run
from composer_dist.recipe.signature import arguments_of
from composer_dist.recipe.source import Document
from composer_dist.trainer import CheckpointSaver, FineTuningPhases, NoImprovement, Phase, Resume

OURS = frozenset(
    {"self", "model", "train_dataloader", "eval_dataloader", "optimizers", "schedulers"}
    | {"parallelism_config", "weights", "callbacks", "loggers", "seed", "resume"}
    | {"load_path", "autoresume", "save_folder", "save_interval"}
)
"""The Trainer's arguments that have sections of their own."""


@dataclass(frozen=True)
class Configuration:
    """A checked run, and where its configuration comes from."""

    run: Run
    folder: Path
    """Where files that it names are looked for."""
    parallelism: ParallelismConfig | None
    document: Document

    def phases(self, model: nn.Module) -> list[tuple[Phase, list[str]]]:
        """The phases, and the names of the parameters that each adds; none if the run has none.

        Raises:
            ConfigurationError: some do not match the model, each with its line.
        """
        if self.run.phases is None:
            return []
        schedule = self.run.phases.get("schedule")
        found = FineTuningPhases(**self.run.phases).select(model)
        problems = Problems(self.document)
        for wrong in found.mismatches:
            if wrong.phase is None:
                problems.add(wrong.text, "phases", "no_decay")
            elif not isinstance(schedule, list | dict):  # a file, or the default
                problems.add(f"{schedule}: {wrong}", "phases", "schedule")
            else:
                phase = wrong.phase if isinstance(schedule, list) else str(wrong.phase)
                listed = isinstance(schedule[wrong.phase]["params"], list)
                entry = (wrong.entry,) if listed and wrong.entry is not None else ()
                problems.add(wrong.text, "phases", "schedule", phase, "params", *entry)
        problems.settle()
        return list(zip(found.phases, found.parts, strict=True))


def read_configuration(file: Path, assignments: Sequence[str] = ()) -> Configuration:
    """Reads and checks a configuration with its overrides.

    Raises:
        ConfigurationError: everything that is wrong with it, each with its line and the closest valid key.
    """
    document, problems, run = read_sections(file, assignments)
    parallelism = check_sections(document.values, file.parent, problems)
    problems.settle()
    assert run is not None
    return Configuration(run, file.parent, parallelism, document)


def check_sections(values: dict[str, Any], folder: Path, problems: Problems) -> ParallelismConfig | None:
    """Checks what is named by a string: only its own signature knows its arguments."""
    if isinstance(model := values.get("model"), dict):
        _check_model(model, folder, problems)
    if isinstance(data := values.get("data"), dict):
        _check_function(data, "data", folder, problems)
    if isinstance(trainer := values.get("trainer"), dict):
        problems.check(arguments_of(Trainer, OURS), trainer, "trainer")
    for section, known, given in (
        ("optimizer", named.OPTIMIZERS, {"params"}),
        ("scheduler", named.SCHEDULERS, {"optimizer", "state", *named.WHOLE_RUN}),
    ):
        value = values.get(section)
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            with problems.at(section, "name"):
                arguments = {key: inner for key, inner in value.items() if key != "name"}
                ours = frozenset(given.difference(named.WHOLE_RUN.intersection(arguments)))
                target = named.find(section, known, value["name"], folder)
                problems.check(arguments_of(target, ours), arguments, section)
    for section, known in (("callbacks", named.CALLBACKS), ("loggers", named.LOGGERS)):
        if isinstance(entries := values.get(section), dict):
            _check_each((section,), known, entries, folder, problems)
    if isinstance(phases := values.get("phases"), dict):
        problems.check(arguments_of(FineTuningPhases), phases, "phases")
        _check_schedule(phases.get("schedule"), problems)
    if isinstance(checkpoints := values.get("checkpoints"), dict):
        ours = frozenset({"folder"}.difference(checkpoints))
        problems.check(arguments_of(CheckpointSaver, ours), checkpoints, "checkpoints")
    if isinstance(resume := values.get("resume"), dict):
        problems.check(arguments_of(Resume), resume, "resume")
    return _parallelism(values.get("parallelism", "fsdp"), problems)


def _check_each(
    path: KeyPath, known: dict[str, str], entries: dict[Any, Any], folder: Path, problems: Problems
) -> None:
    """Callbacks, loggers or metrics by name; the schema reports arguments that are not a mapping."""
    for name, arguments in entries.items():
        with problems.at(*path, name):
            target = named.find(str(path[-1]).removesuffix("s"), known, str(name), folder)
            if isinstance(arguments, dict | None):
                ours = frozenset(named.PLACES.get(name, {})).difference(arguments or {})
                problems.check(arguments_of(target, ours), arguments or {}, *path, name)


def _check_schedule(schedule: Any, problems: Problems) -> None:
    """The phases, as far as that needs no model."""
    known = len(problems)
    written: Iterable[Any] = enumerate(schedule) if isinstance(schedule, list) else ()
    if isinstance(schedule, dict):
        written = ((str(key), phase) for key, phase in schedule.items())
    for number, phase in written:
        if isinstance(phase, dict):
            rest = dict(phase)
            if isinstance(rest.get("until"), dict):
                problems.check(NoImprovement, rest.pop("until"), "phases", "schedule", number, "until")
            problems.check(Phase, rest, "phases", "schedule", number)
    if isinstance(schedule, list | dict | str) and len(problems) == known:
        with problems.at("phases", "schedule"):
            FineTuningPhases(schedule)


def _parallelism(value: Any, problems: Problems) -> ParallelismConfig | None:
    if value is None:
        return None
    path: KeyPath = ("parallelism",)
    if isinstance(value, dict):
        fields = {key: inner for key, inner in value.items() if key != "strategy"}
        if problems.check(ParallelismConfig, fields, *path) is None:
            return None
        path = ("parallelism", "strategy")
    with problems.at(*path):
        return resolve_config(value)
    return None


def _check_model(model: dict[str, Any], folder: Path, problems: Problems) -> None:
    """What the model's section names, as far as that can be known without building it."""
    if DATA_OF.get(str(model.get("kind"))) in (None, DATA_OF["module"]):
        _check_function(model, "model", folder, problems)
    if isinstance(model.get("config"), dict):
        from transformers import CONFIG_MAPPING

        check_configuration(model["config"], CONFIG_MAPPING.keys(), imported_keys, problems)
    if isinstance(metrics := model.get("metrics"), dict):
        _check_each(("model", "metrics"), named.METRICS, metrics, folder, problems)
    if isinstance(adapter := model.get("adapter"), dict):
        with problems.at("model", "adapter", "method"):
            arguments = {key: value for key, value in adapter.items() if key != "method"}
            given = frozenset({"task_type", "peft_type", "inference_mode"})
            target = peft_class(adapter.get("method", "lora"))
            problems.check(arguments_of(target, given), arguments, "model", "adapter")


def _check_function(values: dict[str, Any], section: str, folder: Path, problems: Problems) -> None:
    if isinstance(values.get("name"), str):
        with problems.at(section, "name"):
            target = named.resolve(values["name"], folder)
            problems.check(arguments_of(target), values.get("arguments") or {}, section, "arguments")
    if isinstance(values.get("collate"), str):
        with problems.at(section, "collate"):
            named.resolve(values["collate"], folder)
