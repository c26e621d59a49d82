"""Toy configurations: a transformers configuration class, shrunk by rule."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.zoo import fields, tables

_FIELDS = {name: own for names, own in fields.FIELDS.items() for name in names.split()}


def toy_config(name: str) -> PretrainedConfig:
    """The configuration of model type `name` at toy size, without chance and key-value cache."""
    config = _build(CONFIG_MAPPING[name], {})
    if config.is_encoder_decoder or name.endswith("encoder-decoder"):
        for field, token in (("decoder_start_token_id", 1), ("pad_token_id", 0)):
            if getattr(config, field, None) is None:
                setattr(config, field, token)
    return config


def _build(cls: type[PretrainedConfig], given: Mapping[str, Any]) -> PretrainedConfig:
    given = {**given, **_FIELDS.get(cls.model_type, {})}
    specs = cls.sub_configs_defaults
    values = {f.name: _shrink(f.name, _default(f)) for f in dataclasses.fields(cls) if f.name not in specs}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # latent attention has no grouped heads
        values["num_key_value_heads"] = tables.HEADS
    for key, spec in specs.items():
        sub = given.pop(key, None)
        if spec.optional and sub is None:
            continue
        own = dict(sub if sub is not None else {k: _shrink(k, v) for k, v in spec.init_kwargs.items()})
        kind = own.pop("model_type", None)
        values[key] = _build(CONFIG_MAPPING[kind] if kind else _class_of(spec), own)
    return cls(**{k: v for k, v in values.items() if v is not dataclasses.MISSING} | given)


def _class_of(spec: Any) -> type[PretrainedConfig]:
    cls = spec.config_class
    return cls if issubclass(cls, PretrainedConfig) else CONFIG_MAPPING[spec.model_type]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _shrink(field: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _shrink(k, v) for k, v in value.items()}
    if field in ("use_cache", "apply_spec_augment"):
        return False
    if "drop" in field or "jitter" in field:
        return _zero(value)
    if re.fullmatch(r".*_token(_id|_index)?", field):
        return _token(field, value) if type(value) is int else value
    many = isinstance(value, (list, tuple))
    if not all(type(v) is int for v in (value if many else [value])):
        return value
    for pattern, size, sizes in tables.SIZES:
        if re.fullmatch(pattern, field):
            if not many:
                return min(value, size)
            return type(value)(min(v, sizes[min(i, len(sizes) - 1)]) for i, v in enumerate(value))
    return value


def _zero(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_zero(v) for v in value)
    return 0.0 if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _token(field: str, value: int) -> int:
    known = tables.TOKENS.get(re.sub(r"_token(_id|_index)?$", "", field))
    if known is not None:
        return known
    return value if 0 <= value < 100 else 100 + sum(map(ord, field)) % 20
