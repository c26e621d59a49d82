"""Composer's and accelerate's options of FSDP become a ParallelismConfig."""

import re
import warnings
from typing import Any

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.yaml import KeyPath
from composer_dist.errors import ParallelismError
from composer_dist.recipe.converting.foreign import Foreign

FSDP2 = "parallelism.fsdp2"
UNITS = (
    "parallelism: {rules: [{match: 'type:NAME', shard: true}]} chooses units; by default they are the "
    "model's blocks"
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP1, in the order of its numbers from 1."""
_STRATEGY_REMEDY = "Or remove it, which means FULL_SHARD."
_PREFETCH = "automatic: FSDP2 gathers the next unit while the present one computes"
_NO_OBJECTS = "has no counterpart: a file cannot hold it"

COMPOSERS_FSDP1 = {
    "activation_checkpointing_reentrant": "automatic: activation checkpointing is non-reentrant, unless "
    "activation_checkpointing: [composable, {checkpoint_impl: REENTRANT}]",
    "auto_wrap": UNITS,
    "te_checkpoint_wrapper": "has no counterpart: this library does not use Transformer Engine",
    "te_shard_fp8_weight": "has no counterpart: this library does not use Transformer Engine",
    "backward_prefetch": _PREFETCH,
    "backward_prefetch_limit": _PREFETCH,
    "forward_prefetch": _PREFETCH,
    "forward_prefetch_limit": _PREFETCH,
    "ignored_modules": "parallelism: {rules: [{match: NAME, shard: false}]} leaves modules whole",
    "keep_low_precision_grads": "has no counterpart: gradients have the dtype of the parameters, and "
    "mixed_precision says in which dtype they are reduced",
    "limit_all_gathers": "automatic: FSDP2 needs no limit",
    "load_monolith_rank0_only": "automatic: no rank holds the whole of a single-file checkpoint",
    "load_planner": _NO_OBJECTS,
    "save_planner": _NO_OBJECTS,
    "process_group": _NO_OBJECTS,
    "device_mesh": "has no counterpart in a file: parallelism: {mesh: {dp_shard: ..., dp_replicate: ...}}",
    "sync_module_states": "automatic: all ranks start from the same weights",
    "use_orig_params": "automatic: names and groups of parameters stay as they are",
}
"""Keys of Composer's fsdp_config without a counterpart, and what is so instead."""


def composers_fsdp(foreign: Foreign, *path: str) -> None:
    """Composer's `fsdp_config`, for FSDP1 or FSDP2.

    Raises:
        ConfigurationError: a value that Composer does not have either.
    """
    strategy = foreign.one_of(
        (*STRATEGIES, "_HYBRID_SHARD_ZERO2"), _STRATEGY_REMEDY, *path, "sharding_strategy"
    ).removeprefix("_")
    if (name := foreign.take(*path, "sharded_ckpt_prefix_dir")) is not None:
        foreign.put(name, "checkpoints.filename", *path, "sharded_ckpt_prefix_dir")
    sizes = {"dp_shard": "data_parallel_shard_degree", "dp_replicate": "data_parallel_replicate_degree"}
    given = {ours: foreign.take(*path, key) for ours, key in sizes.items()}
    _mesh(foreign, given, strategy, *path)
    for key, text in COMPOSERS_FSDP1.items():
        foreign.drop(text, *path, key)
    attrs = {key: foreign.take(*path, key) for key in foreign.mapping(*path) if key not in sizes.values()}
    kept = {key: value for key, value in attrs.items() if value is not None and key not in _SETTLED}
    if strategy == "NO_SHARD":
        foreign.put("ddp", "parallelism", *path, "sharding_strategy")
        for key in kept:
            foreign.remark("has no effect on replicas", *path, key, undecided=False)
        return
    if "SHARD_GRAD_OP" in strategy or "ZERO2" in strategy:
        kept.setdefault("reshard_after_forward", False)
    with warnings.catch_warnings(record=True) as ignored:
        warnings.simplefilter("always")
        try:
            config = FSDP2Config.from_compatible_attrs(kept)
        except ParallelismError as error:
            text = str(error).partition("\n")[0]
            field = re.match(r"FSDP2Config\.(\w+): |(\w+)", text)
            key = "" if field is None else field[1] or field[2]
            raise foreign.wrong(text, *path, *([key] if key in kept else [])) from None
    for key in kept:
        if any(f"has no {key!r}" in str(one.message) for one in ignored):
            foreign.remark("unknown to Composer's FSDP2Config and to ours", *path, key, undecided=False)
    _put_fsdp2(foreign, config, path)


_SETTLED = {*COMPOSERS_FSDP1, "sharding_strategy", "sharded_ckpt_prefix_dir"}


def _put_fsdp2(foreign: Foreign, config: FSDP2Config, path: KeyPath) -> None:
    """The fields that are not the defaults; the two of activations go where they live here."""
    values = config.to_dict()
    if (activations := config.activations) is not None:
        for key in ("activation_checkpointing", "activation_cpu_offload"):
            values.pop(key, None)
        mode = activations[0] if isinstance(activations, tuple) and not activations[1] else activations
        value = list(mode) if isinstance(mode, tuple) else mode
        foreign.put(value, "parallelism.activation_checkpointing", *path, "activation_checkpointing")
    foreign.put(foreign.ours.get("parallelism", {}).get("fsdp2", {}), FSDP2, *path)
    for key, value in values.items():
        foreign.put(value, f"{FSDP2}.{key}", *path, key)


def _mesh(foreign: Foreign, given: dict[str, Any], strategy: str, *path: str) -> None:
    sizes = {key: value for key, value in given.items() if value is not None}
    if sizes:
        for key, value in sizes.items():
            foreign.put(value, f"parallelism.mesh.{key}", *path)
    elif strategy.startswith("HYBRID"):
        foreign.put("hsdp", "parallelism.strategy", *path, "sharding_strategy")


_AUTOMATIC = {
    "backward_prefetch": _PREFETCH,
    "forward_prefetch": _PREFETCH,
    "limit_all_gathers": COMPOSERS_FSDP1["limit_all_gathers"],
    "use_orig_params": COMPOSERS_FSDP1["use_orig_params"],
    "sync_module_states": COMPOSERS_FSDP1["sync_module_states"],
    "cpu_ram_efficient_loading": "automatic: build the model inside init_context(), or pass weights=, and no "
    "rank holds more than its part and two buckets",
    "param_init_fn": "parallelize_model has an argument of that name",
    "ignored_modules": COMPOSERS_FSDP1["ignored_modules"],
    "min_num_params": UNITS,
    "activation_checkpointing_offload": "parallelism: {activation_checkpointing: [composable, "
    "{offload: true}]}",
    "state_dict_config": _NO_OBJECTS,
    "optim_state_dict_config": _NO_OBJECTS,
    "mixed_precision_policy": "trainer.precision, and parallelism: {fsdp2: {mixed_precision: "
    "{param_dtype: ...}}}",
    "xla": "has no counterpart: this library does not run on XLA",
    "xla_fsdp_v2": "has no counterpart: this library does not run on XLA",
    "xla_fsdp_settings": "has no counterpart: this library does not run on XLA",
    "xla_fsdp_grad_ckpt": "has no counterpart: this library does not run on XLA",
}
"""Options of accelerate's FSDP plugin without a key here, and what is so instead."""


def accelerates_fsdp(foreign: Foreign, *path: str, version: int) -> None:
    """The `fsdp_config` of accelerate's files and of transformers, whose keys may begin with `fsdp_`.

    Args:
        foreign: the file.
        path: where the section is.
        version: of FSDP where the section does not say it.
    """
    section = foreign.mapping(*path)

    def key(name: str) -> str:
        return next((one for one in (name, f"fsdp_{name}") if one in section), name)

    number = foreign.number(version, *path, key("version"))
    foreign.put({}, FSDP2, *path)
    names = map(key, ("reshard_after_forward", "sharding_strategy"))
    name = next((one for one in names if section.get(one) is not None), "")
    for other in (key("reshard_after_forward"), key("sharding_strategy")):
        foreign.take(*path, other)
    if name:
        _reshard(foreign, number, *path, name)
    if foreign.ours["parallelism"] == "ddp":
        return
    for theirs in ("cpu_offload", "offload_params"):
        if _truth(foreign, *path, key(theirs)):
            foreign.put(True, f"{FSDP2}.cpu_offload", *path, key(theirs))
    if kind := foreign.one_of(
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
        "Here it is parallelism: {fsdp2: {state_dict_type: full or sharded}}.",
        *path,
        key("state_dict_type"),
    ):
        value = "full" if kind.startswith("FULL") else "sharded"
        foreign.put(value, f"{FSDP2}.state_dict_type", *path, key("state_dict_type"))
    if _truth(foreign, *path, key("activation_checkpointing")):
        offload = _truth(foreign, *path, key("activation_checkpointing_offload"))
        mode: Any = ["composable", {"offload": True}] if offload else "composable"
        foreign.put(mode, "parallelism.activation_checkpointing", *path, key("activation_checkpointing"))
    _units(foreign, key("auto_wrap_policy"), key("transformer_layer_cls_to_wrap"), *path)
    for theirs, text in _AUTOMATIC.items():
        foreign.drop(text, *path, key(theirs))


def _truth(foreign: Foreign, *path: str) -> bool:
    """A flag; accelerate's files have some of them as strings."""
    value = foreign.take(*path, default=False)
    if str(value).lower() not in ("true", "false"):
        raise foreign.wrong(f"expected true or false, got {value!r}", *path)
    return str(value).lower() == "true"


def _reshard(foreign: Foreign, version: int, *path: str) -> None:
    value = str(foreign.take(*path)).upper()
    if version == 2 or value in ("TRUE", "FALSE"):
        foreign.put(_truth(foreign, *path), f"{FSDP2}.reshard_after_forward", *path)
        return
    put_strategy(foreign, dict(zip("12345", STRATEGIES, strict=True)).get(value, value), *path)


def put_strategy(foreign: Foreign, strategy: str, *path: str) -> None:
    """A sharding strategy of FSDP1, by its name."""
    strategy = strategy.upper().removeprefix("_")
    if strategy not in STRATEGIES:
        raise foreign.wrong(f"{strategy} is not one of {', '.join(STRATEGIES)}. {_STRATEGY_REMEDY}", *path)
    if strategy == "NO_SHARD":
        foreign.put("ddp", "parallelism", *path)
        return
    foreign.put("OP" not in strategy and "ZERO2" not in strategy, f"{FSDP2}.reshard_after_forward", *path)
    if strategy.startswith("HYBRID"):
        foreign.put("hsdp", "parallelism.strategy", *path)


def _units(foreign: Foreign, policy: str, classes: str, *path: str) -> None:
    """Classes become rules; without them both libraries ask the model for its blocks."""
    kind = foreign.one_of(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), UNITS, *path, policy)
    names = foreign.take(*path, classes, default=[])
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise foreign.wrong(f"expected names of classes, got {names!r}", *path, classes)
    rules: list[dict[str, Any]] = [{"match": "", "shard": True}]
    if kind == "SIZE_BASED_WRAP":
        foreign.remark(f"units are not chosen by their size: {UNITS}", *path, policy)
    elif kind == "NO_WRAP":
        foreign.put(rules, "parallelism.rules", *path, policy)
    elif names:
        match = [f"type:{name}" for name in names]
        rules.insert(0, {"match": match[0] if len(match) == 1 else match, "shard": True})
        foreign.put(rules, "parallelism.rules", *path, classes)
