"""Converts a configuration of another library: recognizes it, converts it, and checks the result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from composer_dist.recipe.converting import accelerate, composer, finetuning_scheduler, lightning
from composer_dist.recipe.converting.foreign import Foreign, Remark, foreign_of, read_foreign
from composer_dist.recipe.first_look.look import check_outline
from composer_dist.recipe.problems import ConfigurationError, Problems
from composer_dist.recipe.read import check_sections
from composer_dist.recipe.schema import Run
from composer_dist.recipe.source import Document

Library = Literal["composer", "finetuning-scheduler", "accelerate", "transformers"]
_CONVERSIONS: dict[str, Callable[[Foreign], None]] = {
    "composer": composer.convert_composer,
    "finetuning-scheduler": finetuning_scheduler.convert_schedule,
    "accelerate": accelerate.convert_accelerate,
    "transformers": accelerate.convert_transformers,
}
_WHOLE = ("model", "data", "trainer")
ORDER = ("out", "seed", "model", "data", "optimizer", "scheduler", "parallelism", "trainer", "callbacks",
         "loggers", "checkpoints", "phases", "resume", "export")  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What a configuration has become."""

    library: str
    values: dict[str, Any]
    """Sections of a run."""
    remarks: list[Remark]
    """The keys that have not become one of ours, in the order of the file."""

    @property
    def whole(self) -> bool:
        """Whether `composer-dist train` can run it: it has a model, data and a length."""
        has = all(section in self.values for section in _WHOLE)
        return has and "max_duration" in self.values["trainer"]

    def text(self, source: str, only: str | None = None) -> str:
        """The file to write: the values, below what is not in them.

        Args:
            source: the name of the file that was converted.
            only: the section to write in place of all, for `ParallelArguments` or `FineTuningPhases`.

        Raises:
            ConfigurationError: there is no such section.
        """
        values: Any = {key: self.values[key] for key in ORDER if key in self.values}
        if only is not None:
            if only not in values:
                has = ", ".join(values) or "nothing"
                raise ConfigurationError(
                    f"{source}: --only {only}: the conversion has {has}, but not {only}."
                )
            values = values[only]["schedule"] if only == "phases" else values[only]
        lines = [f"# Converted from {source} ({self.library}) by composer-dist convert-config."]
        for title, undecided in (("To decide", True), ("Not converted", False)):
            found = [one for one in self.remarks if one.undecided is undecided]
            lines += [f"# {title}:", *(f"#   {one}" for one in found)] if found else []
        dumped = yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)
        return "\n".join([*lines, dumped])


def convert_file(file: Path, library: Library | None = None) -> Conversion:
    """Converts a file.

    Raises:
        ConfigurationError: it cannot be read or recognized, or it asks for what neither library does; names
            the file, the line, the key and the remedy.
    """
    return _converted(read_foreign(file), library)


def convert_values(values: Mapping[str, Any], library: Library | None = None) -> Conversion:
    """Converts a dictionary, such as Composer's `fsdp_config`.

    Raises:
        ConfigurationError: as `convert_file`.
    """
    return _converted(foreign_of(values), library)


def _converted(foreign: Foreign, library: Library | None) -> Conversion:
    name = library or recognized(foreign)
    is_cli = name == "finetuning-scheduler" and isinstance(foreign.get("trainer"), dict)
    (lightning.convert_lightning if is_cli else _CONVERSIONS[name])(foreign)
    foreign.finish()
    done = Conversion(name, foreign.ours, foreign.remarks)
    _check(foreign, done)
    return done


def recognized(foreign: Foreign) -> str:
    """The library whose keys the file has.

    Raises:
        ConfigurationError: it has those of none, or of several.
    """
    inner = foreign.get("fsdp_config", default={})
    keys = set(map(str, foreign.values)) | set(inner if isinstance(inner, dict) else ())
    if finetuning_scheduler.is_schedule(foreign.values) or keys & {"fsdp_plan", "fsdp_default_kwargs"}:
        return "finetuning-scheduler"
    if "trainer" in keys and ("seed_everything" in keys or "callbacks" in str(foreign.get("trainer"))):
        return "finetuning-scheduler"
    if "distributed_type" in keys:
        return "accelerate"
    if "zero_optimization" in keys:
        raise foreign.wrong(f"DeepSpeed cannot be converted: {accelerate.OTHERS['DEEPSPEED']}")
    if any(isinstance(one, dict) and "_component_" in one for one in foreign.values.values()):
        raise foreign.wrong("torchtune cannot be converted: see docs/migration/torchtune.md")
    counts = {
        "composer": len(keys & composer.KEYS),
        "accelerate": len(keys & accelerate.ACCELERATE),
        "transformers": len(keys & accelerate.TRANSFORMERS),
    }
    most = max(counts.values())
    found = [name for name, count in counts.items() if count == most]
    if not most or len(found) > 1:
        raise ConfigurationError(
            f"{foreign.name}: its keys ({', '.join(sorted(keys)[:6])}) do not say which library they are "
            f"for. Pass --from with one of {', '.join(_CONVERSIONS)}."
        )
    return found[0]


def _check(foreign: Foreign, done: Conversion) -> None:
    """Our own checks of the result; what is wrong is reported with the line of the file it comes from."""
    values = {**done.values, "trainer": {"max_duration": "1ep", **done.values.get("trainer", {})}}
    problems = Problems(Document(values, foreign.name, foreign.origins))
    named = {"name": "package.module.Name"}
    rest = {} if done.whole else {"model": {"kind": "module", **named}, "data": {"kind": "function", **named}}
    problems.check(Run, {"out": "out", **values, **rest})
    check_outline(values, problems)
    check_sections(values, Path(foreign.name).parent, problems)
    problems.settle()
