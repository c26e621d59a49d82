"""The keys of a run's configuration: as rows to read, and as a JSON Schema for editors."""

import json
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from composer_dist import DDPConfig, FSDP2Config, MeshConfig, ParallelismConfig, Rule, TPConfig, Trainer
from composer_dist.config.parallelism import STRATEGIES
from composer_dist.recipe import named
from composer_dist.recipe.read import OURS
from composer_dist.recipe.schema import (
    Adapter,
    ChatData,
    FunctionData,
    HubModel,
    LabeledData,
    ModuleModel,
    Named,
    PreferenceData,
    Run,
    TableData,
    TextData,
)
from composer_dist.recipe.signature import arguments_of
from composer_dist.trainer import CheckpointSaver, FineTuningPhases, NoImprovement, Phase, Resume

LIMITS: dict[str, dict[str, dict[str, float]]] = {
    "AdamW Adam SGD Adagrad RMSprop": {
        "lr weight_decay eps momentum alpha lr_decay initial_accumulator_value": {"minimum": 0},
        "betas": {"minimum": 0, "exclusiveMaximum": 1},
    },
    "RMSprop": {"alpha": {"exclusiveMaximum": 1}},
    "ConstantWithWarmupScheduler CosineAnnealingWithWarmupScheduler LinearWithWarmupScheduler": {
        "alpha alpha_f alpha_i": {"minimum": 0}
    },
    "OneCycleLR": {
        "max_lr": {"minimum": 0},
        "div_factor final_div_factor": {"exclusiveMinimum": 0},
        "pct_start": {"minimum": 0, "maximum": 1},
    },
    "CheckpointSaver": {"keep save_top_k": {"exclusiveMinimum": 0}},
    "DDPConfig": {"bucket_cap_mb averaging_period": {"exclusiveMinimum": 0}},
    "EarlyStopping": {"patience": {"exclusiveMinimum": 0}, "min_delta": {"minimum": 0}},
    "Generate": {"batch_size": {"exclusiveMinimum": 0}},
    "GradientClipping": {"norm norm_type value": {"exclusiveMinimum": 0}},
    "ParallelismConfig": {"bucket_bytes": {"exclusiveMinimum": 0}},
    "Profiler": {"active": {"exclusiveMinimum": 0}, "skip_first wait warmup repeat": {"minimum": 0}},
    "SpeedMonitor": {"window_size peak_flops": {"exclusiveMinimum": 0}},
    "Trainer": {"gradient_clipping": {"exclusiveMinimum": 0}},
}
"""Of numbers, for the first look at a configuration; the classes check most of them too."""


@dataclass(frozen=True)
class KeyEntry:
    """One key."""

    key: str
    type: str
    default: str
    text: str
    """One line."""


def sections() -> dict[str, list[KeyEntry]]:
    """The keys of every section, by the section's name; the top of the file is ""."""
    schemas: dict[str, Any] = {"": Run, "model": HubModel, "model (kind: module)": ModuleModel}
    schemas |= {"model.adapter": Adapter, "data (kind: text)": TextData}
    schemas |= {"data (kind: labeled_text)": LabeledData, "data (kind: function)": FunctionData}
    schemas |= {"data (kind: chat)": ChatData, "data (kind: preferences)": PreferenceData}
    schemas["data (kind: table)"] = TableData
    schemas |= _of_names("optimizer", named.OPTIMIZERS, {"params"})
    schemas |= _of_names("scheduler", named.SCHEDULERS, {"optimizer"})
    for name, config in (
        ("", ParallelismConfig),
        (".mesh", MeshConfig),
        (".fsdp2", FSDP2Config),
        (".tp", TPConfig),
        (".ddp", DDPConfig),
        (".rules", Rule),
    ):
        schemas[f"parallelism{name}"] = _arguments(config)
    schemas["trainer"] = _arguments(Trainer, OURS)
    schemas |= _of_names("callbacks", named.CALLBACKS) | _of_names("loggers", named.LOGGERS)
    schemas["checkpoints"] = _arguments(CheckpointSaver, {"folder"})
    schemas |= {"phases": _arguments(FineTuningPhases), "phases.schedule": _arguments(Phase)}
    schemas |= {"phases.schedule.until": _arguments(NoImprovement), "resume": _arguments(Resume)}
    found = {name: [_entry(*field) for field in one.model_fields.items()] for name, one in schemas.items()}
    found[""] = [replace(one, default="runs/NAME") if one.key == "out" else one for one in found[""]]
    found["trainer"] = [
        replace(one, type="str | int", default="required") if one.key == "max_duration" else one
        for one in found["trainer"]
    ]
    return found


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file."""

    def choice(known: dict[str, str], **given: Any) -> Any:
        fields: Any = {name: (one | None, None) for name, one in _of_names("", known, **given).items()}
        return pydantic.create_model("Known", __config__=pydantic.ConfigDict(extra="allow"), **fields)

    fields: dict[str, Any] = {
        "out": (Path | None, None),
        "optimizer": (_by_name(named.OPTIMIZERS, {"params"}), "adamw"),
        "scheduler": (_by_name(named.SCHEDULERS, {"optimizer", "state"}) | None, None),
        "parallelism": (str | _arguments(ParallelismConfig) | None, "fsdp"),
        "trainer": (_arguments(Trainer, OURS), ...),
        "callbacks": (choice(named.CALLBACKS), {}),
        "loggers": (choice(named.LOGGERS, given={"path", "log_dir"}, extra="allow"), {}),
        "checkpoints": (_arguments(CheckpointSaver, {"folder"}) | None, {}),
        "phases": (_arguments(FineTuningPhases) | None, None),
        "resume": (bool | _arguments(Resume), True),
    }
    described: dict[str, Any] = {
        name: (kind, pydantic.Field(default, description=Run.model_fields[name].description))
        for name, (kind, default) in fields.items()
    }
    configuration: Any = pydantic.create_model("Configuration", __base__=Run, **described)
    found: dict[str, Any] = configuration.model_json_schema(schema_generator=_Lenient)
    for kinds, limits in LIMITS.items():
        for kind in kinds.split():
            properties = found["$defs"][kind]["properties"]
            for keys, limit in limits.items():
                for key in properties.keys() & set(keys.split()):
                    _limit(properties[key], limit)
    found["$defs"]["Trainer"]["required"] = ["max_duration"]
    folder = {"type": "string", "description": "Where checkpoints are written; by default in `out`."}
    found["$defs"]["CheckpointSaver"]["properties"]["folder"] = folder
    by_name = {"type": "string", "examples": [*STRATEGIES]}
    found["properties"]["parallelism"]["anyOf"][0] = by_name
    strategy = {
        "anyOf": [by_name, {"type": "null"}],
        "description": "One by name, which the other keys change.",
    }
    found["$defs"]["ParallelismConfig"]["properties"]["strategy"] = strategy
    found["$defs"]["Profiler"].pop("required", None)  # its folder is in `out` too
    return {"$schema": GenerateJsonSchema.schema_dialect} | found | {"title": "A run of composer-dist train"}


def _limit(schema: dict[str, Any], limit: dict[str, float]) -> None:
    """Limit the numbers that a part of the schema describes."""
    if schema.get("type") in ("number", "integer"):
        schema.update(limit)
    for inner in (*schema.get("anyOf", ()), *schema.get("prefixItems", ()), schema.get("items")):
        if isinstance(inner, dict):
            _limit(inner, limit)


_WRITTEN_AS_STRINGS = frozenset({"Time", "Precision", "device", "Path", "PathLike"})


class _Lenient(GenerateJsonSchema):
    """Leaves out what a file cannot hold, such as functions and devices."""

    _alternatives = False

    def union_schema(self, schema: Any) -> Any:
        """One of several types, without those that a file cannot hold."""
        before, self._alternatives = self._alternatives, True
        try:
            return super().union_schema(schema)
        finally:
            self._alternatives = before

    def model_schema(self, schema: Any) -> Any:
        """A mapping, with all of its keys."""
        before, self._alternatives = self._alternatives, False
        try:
            return super().model_schema(schema)
        finally:
            self._alternatives = before

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
        """A type without a JSON schema: left out of a union, and otherwise any value."""
        if self._alternatives:
            raise PydanticOmit
        return {}

    def emit_warning(self, kind: Any, detail: str) -> None:
        """Defaults that are objects are silently left out."""


def _by_name(known: dict[str, str], given: set[str]) -> Any:
    """A short name, or a mapping with a name and its arguments; torch's are the same in all versions."""
    kinds: Any = str | Reference
    for name, reference in known.items():
        ours, target = not reference.startswith("torch."), named.resolve(reference, Path())
        base = arguments_of(target, frozenset(given), documented=ours)
        kinds |= pydantic.create_model(base.__name__, __base__=base, name=(Literal[name], ...))  # type: ignore[arg-type]
    return kinds


class Reference(Named):
    """Something that is not ours; the other keys are its arguments."""

    name: str = pydantic.Field(pattern=r"\.", description="`package.module.Name` or `file.py:Name`.")


def _of_names(
    section: str, known: dict[str, str], given: set[str] | None = None, extra: Literal["allow"] | None = None
) -> dict[str, Any]:
    found = {name: named.resolve(reference, Path()) for name, reference in known.items()}
    return {
        f"{section}.{name}" if section else name: _arguments(target, given or set(), extra)
        for name, target in found.items()
    }


def _arguments(
    target: Callable[..., Any], given: Any = frozenset(), extra: Literal["allow"] | None = None
) -> Any:
    return arguments_of(target, frozenset(given), documented=True, extra=extra)


def _entry(name: str, field: Any) -> KeyEntry:
    default = "required" if field.is_required() else _plain(field.get_default(call_default_factory=True))
    text = " ".join((field.description or "").split())
    return KeyEntry(
        field.alias or name, _type(field.annotation), default, re.split(r"(?<=\.)\s|;\s", text)[0]
    )


def _plain(value: Any) -> str:
    try:
        return json.dumps(value.model_dump() if isinstance(value, pydantic.BaseModel) else value)
    except TypeError:
        return str(value)


def _type(hint: Any) -> str:
    """The type in the words of a file."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type(inner[0])
    if origin in (typing.Union, types.UnionType):
        names = dict.fromkeys(_type(one) for one in inner)
        return " | ".join(name for name in names if "str" not in names or name not in _WRITTEN_AS_STRINGS)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if hint in (None, type(None)):
        return "null"
    name = getattr(origin or hint, "__name__", str(hint))
    return {"Any": "any", "dict": "mapping", "Mapping": "mapping", "list": "list", "Sequence": "list"}.get(
        name, name
    )
