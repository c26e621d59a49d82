"""The first look at a configuration: its sections, and what is wrong with them, without torch."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from composer_dist.recipe import named
from composer_dist.recipe.first_look.configurations import check_configuration, written_keys, written_types
from composer_dist.recipe.first_look.places import check_places
from composer_dist.recipe.outline import mapping_of, strategies
from composer_dist.recipe.problems import ConfigurationError, Problems, blamed_on
from composer_dist.recipe.schema import (
    ChatData,
    Data,
    LabeledData,
    PreferenceData,
    RowData,
    Run,
    Source,
    TextData,
)
from composer_dist.recipe.source import Document, override, read_document
from composer_dist.recipe.sources.files import BUILT_IN, chat_template, files_of
from composer_dist.trainer.arguments import CHECKS
from composer_dist.wording import unknown_strategy

DATA_OF = {
    "causal_lm": ("text", "chat", "preferences", "function"),
    "masked_lm": ("text", "function"),
    "seq2seq_lm": ("table", "function"),
    "sequence_classification": ("labeled_text", "table", "function"),
    "module": ("function",),
}
"""The kinds of data of each kind of model."""
_METRICS_OF = {
    "perplexity": ("causal_lm", "masked_lm", "seq2seq_lm"),
    "token_accuracy": ("causal_lm", "masked_lm", "seq2seq_lm"),
    "accuracy": ("sequence_classification",),
}
_DATA_KINDS = {kind for kinds in DATA_OF.values() for kind in kinds}


def read_sections(file: Path, assignments: Sequence[str]) -> tuple[Document, Problems, Run | None]:
    """A configuration with its overrides, and what is wrong with it, as far as that is known without torch.

    Raises:
        ConfigurationError: the file cannot be read, or is not YAML.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ConfigurationError(
            f"{file} is a pipe or a device, but a run reads its configuration several times. Use a file."
        )
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        near = _near(file) if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(
            f"{file}: {reason}.{near} 'composer-dist init' writes a configuration."
        ) from None
    document, wrong = read_document(text, str(file))
    problems = Problems(document, wrong + override(document, assignments))
    if wrong:
        problems.settle()
    document.values.setdefault("out", f"runs/{file.stem}")
    for section in ("optimizer", "scheduler"):
        if isinstance(name := document.values.get(section), str):
            document.values[section] = {"name": name}
    check_outline(document.values, problems)
    return document, problems, problems.check(Run, document.values)


def check_outline(values: dict[str, Any], problems: Problems) -> None:
    """What the sections name, and the arguments of what is known by a short name."""
    _check_kinds(values, problems)
    if isinstance(trainer := values.get("trainer"), dict):
        if trainer.get("max_duration") is None:
            text = "'max_duration' is missing: the length of the run, such as '3ep' or '1000ba'"
            problems.add(text, "trainer", "max_duration")
        problems.check(mapping_of("trainer"), trainer, "trainer")
        for key, check in CHECKS.items():
            if not problems.has("trainer", key):
                with problems.at("trainer", key):
                    check(trainer.get(key))
    for section in ("parallelism", "callbacks", "loggers", "checkpoints", "resume"):
        if isinstance(value := values.get(section), dict):
            problems.check(mapping_of(section), value, section)
    for section, known in (("optimizer", named.OPTIMIZERS), ("scheduler", named.SCHEDULERS)):
        value = values.get(section)
        if isinstance(value, dict) and isinstance(name := value.get("name"), str):
            problems.check(mapping_of(section, name), value, section)
            with problems.at(section, "name"):
                named.reference(section, known, name)
    for section, known in (("callbacks", named.CALLBACKS), ("loggers", named.LOGGERS)):
        for name in value if isinstance(value := values.get(section), dict) else ():
            with problems.at(section, name):
                named.reference(section.removesuffix("s"), known, str(name))


def _check_kinds(values: dict[str, Any], problems: Problems) -> None:
    """Whether the model can have the data and the metrics."""
    model, data = values.get("model"), values.get("data")
    if not isinstance(model, dict):
        return
    kind, metrics = str(model.get("kind")), model.get("metrics")
    for name, kinds in _METRICS_OF.items():
        if isinstance(metrics, dict) and name in metrics and kind not in kinds:
            others = [other for other, of in _METRICS_OF.items() if kind in of]
            text = f"a model of kind {kind} has no {name}"
            text += f"; it has {' and '.join(others)}" if others else ""
            problems.add(text, "model", "metrics", name)
    if not isinstance(data, dict):
        return
    fitting = DATA_OF.get(kind, ())
    if fitting and str(data.get("kind")) in _DATA_KINDS.difference(fitting):
        problems.add(f"a model of kind {kind} needs data of kind {' or '.join(fitting)}", "data", "kind")
    if data.get("kind") == "preferences" and metrics:
        problems.add("for data of kind preferences the metric is the PreferenceAccuracy", "model", "metrics")


def _check_strategy(values: dict[str, Any], problems: Problems) -> None:
    """The name of a strategy, unless the configuration names code, which may register others."""
    path, value = ["parallelism"], values.get("parallelism")
    if isinstance(value, dict):
        path, value = [*path, "strategy"], value.get("strategy")
    loaded = sys.modules.get("composer_dist.config.parallelism")  # this process may have registered some
    known = loaded._strategies if loaded else strategies()
    if isinstance(value, str) and value not in known and not _names_code(values):
        problems.add(unknown_strategy(value, known), *path)


def _names_code(values: dict[str, Any]) -> bool:
    """Whether a configuration names anything that is not known by a short name, so that it is imported."""
    known = {*named.OPTIMIZERS, *named.SCHEDULERS, *named.CALLBACKS, *named.LOGGERS, *named.METRICS}
    model, data = values.get("model"), values.get("data")
    sections = (model, data, values.get("optimizer"), values.get("scheduler"))
    names = [one.get(key) for one in sections if isinstance(one, dict) for key in ("name", "collate")]
    metrics = model.get("metrics") if isinstance(model, dict) else None
    for mapping in (values.get("callbacks"), values.get("loggers"), metrics):
        names += mapping if isinstance(mapping, dict) else ()
    return any(name not in known for name in names if isinstance(name, str))


def _check_config(values: dict[str, Any], problems: Problems) -> None:
    """The keys of a new model's configuration, unless code that is named may register its type."""
    model, types = values.get("model"), written_types()
    config = model.get("config") if isinstance(model, dict) else None
    if isinstance(config, dict) and (not _names_code(values) or config.get("model_type") in types):
        check_configuration(config, types, written_keys, problems)


def _near(file: Path) -> str:
    """The sentence about the configuration in the same folder whose name is the closest, if one is close."""
    there = {one.stem: one for one in file.parent.glob("*.y*ml")}
    close = get_close_matches(file.stem, there, n=1)
    return f" Did you mean {str(there[close[0]])!r}?" if close else ""


def _check_files(data: Data, folder: Path, problems: Problems) -> None:
    """The files that the data is read from."""
    sources: dict[tuple[str, ...], Source | None] = {}
    match data:
        case TextData() if data.source not in BUILT_IN:
            sources["source",] = data.source
        case LabeledData():
            sources = {("classes", name): one for name, one in data.classes.items() if one not in BUILT_IN}
        case RowData():
            sources = {("source",): data.source, ("evaluate",): data.evaluate}
    for path, source in sources.items():
        if isinstance(source, str | list):
            with problems.at("data", *path):
                files_of(source)
    if isinstance(data, ChatData | PreferenceData):
        with problems.at("data", "chat_template"):
            chat_template(data, folder)


def faults_at_once(
    file: Path, assignments: Sequence[str], files: bool = False, writes: bool = True
) -> list[str]:
    """What is wrong with a configuration, as far as that is known without torch.

    Args:
        file: of the configuration.
        assignments: its overrides.
        files: look for those of the data, too.
        writes: see whether the places to write to are writable, if `files`.

    Raises:
        ConfigurationError: the file cannot be read, or is not YAML, so that nothing else is known of it.
    """
    document, problems, run = read_sections(file, assignments)
    _check_strategy(document.values, problems)
    _check_config(document.values, problems)
    if files and run is not None:
        _check_files(run.data, file.parent, problems)
        for key in ("pretrained", "tokenizer"):
            if (name := getattr(run.model, key, None)) is not None:
                with problems.at("model", key):
                    named.check_directory(name, name)
    if not (files and writes) or run is None or problems:
        return problems.lines()
    try:
        with blamed_on(document):
            check_places(run)
    except ConfigurationError as error:
        return [str(error)]
    return []
