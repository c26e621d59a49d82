"""Composer: `fsdp_config` and `parallelism_config`, and whole runs as LLM Foundry's YAML describes them."""

from pathlib import Path
from typing import Any

from composer_dist.recipe import named
from composer_dist.recipe.converting.foreign import Foreign
from composer_dist.recipe.converting.foundry import convert_data, convert_model
from composer_dist.recipe.converting.sharding import COMPOSERS_FSDP1, composers_fsdp
from composer_dist.recipe.signature import known_names

_FSDP = {
    *COMPOSERS_FSDP1,
    "sharding_strategy",
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
}
_FSDP |= {"activation_checkpointing", "activation_cpu_offload", "mixed_precision", "state_dict_type"}
_FSDP |= {"reshard_after_forward", "cpu_offload", "verbose", "sharded_ckpt_prefix_dir"}
_HERE = Path()
_SHARED = {"activation_checkpointing", "cpu_offload", "reshard_after_forward", "state_dict_type"}
_SHARED |= {"backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params"}
KEYS = (_FSDP - _SHARED) | {
    *("parallelism_config", "global_train_batch_size", "train_loader", "eval_loader", "tp_config"),
    *("device_train_microbatch_size", "max_duration", "save_folder", "autoresume", "algorithms", "precision"),
}
"""Keys by which a file is recognized as Composer's."""

_SIMPLE = {
    "seed": "seed",
    "global_seed": "seed",
    "precision": "trainer.precision",
    "max_duration": "trainer.max_duration",
    "device_train_microbatch_size": "trainer.device_train_microbatch_size",
    "global_train_batch_size": "data.batch_size",
    "progress_bar": "trainer.progress_bar",
    "deterministic_mode": "trainer.deterministic",
    "step_schedulers_every_batch": "trainer.step_schedulers_every_batch",
}
_SUBSETS = ("train_subset_num_batches", "eval_subset_num_batches")
_SAVED = {
    "save_folder": "checkpoints.folder",
    "save_interval": "checkpoints.interval",
    "save_latest_filename": "checkpoints.latest",
    "save_weights_only": "checkpoints.weights_only",
}
_LOADED = ("load_path", "load_weights_only", "load_strict_model_weights", "load_ignore_keys")
_SCHEDULERS = {
    "cosine_with_warmup": "cosine",
    "linear_decay_with_warmup": "linear",
    "constant_with_warmup": "constant",
}
_CALLBACKS = {"early_stopper": "early_stopping"}
_RENAMED = {
    "memory_monitor": {"dist_aggregate_batch_interval": "interval"},
    "optimizer_monitor": {"batch_log_interval": "interval"},
    "mlflow": {"experiment_name": "experiment"},
}
_LOGGERS = {"inmemory": "in_memory", "file_logger": "file"}
_UNNEEDED = {
    "dist_timeout": "has no counterpart: torch's timeouts hold, and trainer.hang_timeout ends stalled runs",
    "expandable_segments": "an environment variable: PYTORCH_ALLOC_CONF=expandable_segments:True",
    "max_split_size_mb": "an environment variable: PYTORCH_ALLOC_CONF=max_split_size_mb:N",
    "save_overwrite": "automatic: a run resumes, and another one needs another `out`",
    "device_eval_batch_size": "evaluation uses data.batch_size, which is for all ranks together",
    "eval_first": "has no counterpart: call trainer.eval() before trainer.fit() in Python",
    "max_seq_len": "data.context",
    "python_log_level": "has no counterpart: set the level of the logger `composer_dist` in Python",
    "accumulate_train_batch_on_tokens": "automatic: the loss is the mean over all tokens of all ranks",
    "spin_dataloaders": "automatic: the position in the data is saved and restored",
    "n_gpus": "the command line's: composer-dist train ... -n N, or torchrun",
}


def convert_composer(foreign: Foreign) -> None:
    """What Composer's keys become."""
    if foreign.get("max_duration") is None and not foreign.get("train_loader") and _is_fsdp(foreign):
        composers_fsdp(foreign)
        return
    foreign.take("variables")
    for theirs, ours in _SIMPLE.items():
        foreign.move(ours, theirs)
    if foreign.get("train_loader") is not None and foreign.get("precision") is None:
        foreign.put("amp_bf16", "trainer.precision")  # LLM Foundry's default
    for key in _SUBSETS:
        if foreign.take(key, default=-1) != -1:
            foreign.move(f"trainer.{key}", key)
    if not foreign.get("deterministic_mode", default=False):
        foreign.ours.get("trainer", {}).pop("deterministic", None)
    if (name := foreign.take("run_name")) is not None:
        foreign.put(f"runs/{name}", "out", "run_name")
    _parallelism(foreign)
    if foreign.get("model") is not None:
        convert_model(foreign)
    if foreign.get("train_loader") is not None:
        convert_data(foreign)
    _optimizer(foreign)
    _scheduler(foreign)
    _algorithms(foreign)
    _checkpoints(foreign)
    _entries(foreign, "callbacks", _CALLBACKS, named.CALLBACKS)
    _entries(foreign, "loggers", _LOGGERS, named.LOGGERS)
    if foreign.take("log_to_console", default=False):
        interval = foreign.take("console_log_interval", default="1ba")
        foreign.put({"interval": interval}, "loggers.console", "log_to_console")
    foreign.take("console_log_interval")
    if foreign.get("eval_loader") is None:
        foreign.drop("there is no eval_loader", "eval_interval")
    elif str(foreign.get("eval_interval", default=1)) in ("0", "0ep", "0ba"):
        foreign.ours.get("data", {}).pop("evaluate", None)
        foreign.take("eval_interval")
        text = "0 means no evaluation, so the eval_loader is left out"
        foreign.remark(text, "eval_interval", undecided=False)
    else:
        foreign.move("trainer.eval_interval", "eval_interval")
    for key, text in _UNNEEDED.items():
        foreign.drop(text, key)


def _is_fsdp(foreign: Foreign) -> bool:
    return bool(_FSDP.intersection(foreign.values)) and "fsdp_config" not in foreign.values


def _parallelism(foreign: Foreign) -> None:
    sections = [
        ("fsdp_config",),
        ("fsdp2_config",),
        ("parallelism_config", "fsdp"),
        ("parallelism_config", "fsdp2"),
    ]
    given = [path for path in sections if foreign.get(*path) is not None]
    for path in given:
        composers_fsdp(foreign, *path)
    for path in (("tp_config",), ("parallelism_config", "tp")):
        if foreign.get(*path) is not None:
            foreign.put(
                foreign.take(*path, "tensor_parallel_degree", default=1), "parallelism.mesh.tp", *path
            )
            foreign.put({}, "parallelism.tp", *path)
            text = "the model's own plan is used, or one inferred from it; parallelism: {tp: {plan: ...}}"
            foreign.drop(text, *path, "layer_plan")
            foreign.drop(text, *path, "strategy")
            given.append(path)
    if not given:
        foreign.put("ddp", "parallelism")
    compile_config = foreign.take("compile_config")
    if compile_config is not None and isinstance(foreign.ours["parallelism"], dict):
        foreign.put(compile_config or True, "parallelism.compile", "compile_config")
    elif compile_config is not None:
        foreign.put({"strategy": "ddp", "compile": compile_config or True}, "parallelism", "compile_config")


def _optimizer(foreign: Foreign) -> None:
    """Composer's decoupled weight decay is torch's, divided by the first learning rate."""
    given = foreign.mapping("optimizer")
    if not given:
        return
    name = str(given.get("name", "decoupled_adamw")).lower()
    kinds = {
        "decoupled_adamw": "adamw",
        "decoupled_sgdw": "sgd",
        "adam": "adam",
        "adamw": "adamw",
        "sgd": "sgd",
    }
    foreign.take("optimizer")
    if name not in kinds:
        remedy = "choose another, or give a class as package.module.Name; without one it is adamw"
        foreign.remark(f"there is no {name!r} here: {remedy}", "optimizer", "name")
        return
    rest = {key: value for key, value in given.items() if key != "name"}
    if name.startswith("decoupled"):
        rate = foreign.number(1e-3 if name == "decoupled_adamw" else None, "optimizer", "lr")
        decay = foreign.number(1e-5 if name == "decoupled_adamw" else 0.0, "optimizer", "weight_decay")
        if not rate:
            raise foreign.wrong("expected a learning rate above 0", "optimizer", "lr")
        rest |= {"lr": rate, "weight_decay": decay / rate}
        if name == "decoupled_adamw":
            rest.setdefault("betas", [0.9, 0.95])  # Composer's default
        if name == "decoupled_sgdw" and decay:
            text = "torch's SGD adds the decay to the gradient, so with momentum or dampening it differs"
            foreign.remark(text, "optimizer", "weight_decay")
    foreign.put({"name": kinds[name], **rest}, "optimizer", "optimizer")


def _scheduler(foreign: Foreign) -> None:
    given = foreign.mapping("scheduler")
    foreign.take("scheduler")
    if not given:
        return
    name = str(given.get("name"))
    if name not in _SCHEDULERS:
        remedy = "choose cosine, linear or constant, or give a class or function as package.module.Name"
        foreign.remark(f"there is no {name!r} here: {remedy}", "scheduler", "name")
        return
    known = known_names(named.resolve(named.SCHEDULERS[_SCHEDULERS[name]], _HERE))
    values = {"name": _SCHEDULERS[name]}
    for key, value in given.items():
        if key in known:
            values[key] = value
        elif key != "name" and value not in (False, None):
            foreign.remark("has no counterpart", "scheduler", key, undecided=False)
    foreign.put(values, "scheduler", "scheduler")


def _algorithms(foreign: Foreign) -> None:
    for name in foreign.mapping("algorithms"):
        path = ("algorithms", name)
        given = foreign.mapping(*path)
        foreign.take(*path)
        kind = given.get("clipping_type")
        if name == "gradient_clipping" and kind in ("norm", "value"):
            foreign.put({kind: given.get("clipping_threshold")}, "trainer.gradient_clipping", *path)
        elif name == "gradient_clipping":
            text = f"gradients are clipped by norm or by value; {kind!r} needs a callback of your own"
            foreign.remark(text, *path)
        else:
            text = "there are no algorithms: write a callback, and name it package.module.Name"
            if name == "ema":
                text = "here it is a callback: callbacks: {ema: {half_life: ...}}"
            foreign.remark(text, *path)


def _checkpoints(foreign: Foreign) -> None:
    if foreign.get("save_folder") is None:
        if foreign.get("train_loader") is not None:
            foreign.put(None, "checkpoints")
        for key in ("save_interval", "save_num_checkpoints_to_keep", "save_filename", *_SAVED):
            foreign.drop("there is no save_folder, so nothing is saved", key)
    else:
        for theirs, ours in _SAVED.items():
            foreign.move(ours, theirs)
        foreign.ours["checkpoints"].setdefault("interval", "1000ba")
        keep = foreign.take("save_num_checkpoints_to_keep", default=-1)
        foreign.put(None if keep == -1 else keep, "checkpoints.keep", "save_num_checkpoints_to_keep")
        _names(foreign)
    resume: Any = {key: foreign.take(key) for key in _LOADED}
    resume = {key: value for key, value in resume.items() if value not in (None, False)}
    automatic = bool(foreign.take("autoresume", default=False))
    if resume.get("load_path"):
        resume = {key: value for key, value in resume.items() if key != "load_strict_model_weights"}
        if foreign.get("load_strict_model_weights") is False:
            resume["load_strict_model_weights"] = False
        foreign.put(resume | ({"autoresume": True} if automatic else {}), "resume", "load_path")
        text = (
            "load checkpoints of this library, or weights in safetensors (model.pretrained); not Composer's"
        )
        foreign.remark(f"{text}: export them there first", "load_path")
    elif foreign.get("autoresume") is not None:
        foreign.put(automatic, "resume", "autoresume")


def _names(foreign: Foreign) -> None:
    """Names of checkpoints, without ranks: a checkpoint is one for all ranks."""
    for theirs, ours in (("save_filename", "filename"), ("save_latest_filename", "latest")):
        name = foreign.take(theirs)
        if name is not None and "{rank}" in str(name):
            foreign.ours["checkpoints"].pop(ours, None)
            foreign.remark(
                "a checkpoint is one for all ranks, so its name has no {rank}", theirs, undecided=False
            )
        elif name is not None:
            foreign.put(name, f"checkpoints.{ours}", theirs)
    folder = str(foreign.ours["checkpoints"]["folder"])
    if "{run_name}" in folder:
        name = foreign.get("run_name", default=foreign.name.rpartition("/")[2].partition(".")[0])
        foreign.ours["checkpoints"]["folder"] = folder.replace("{run_name}", str(name))


def _entries(foreign: Foreign, section: str, renamed: dict[str, str], known: dict[str, str]) -> None:
    """Callbacks or loggers, with the arguments that ours have too."""
    for theirs in foreign.mapping(section):
        given = foreign.mapping(section, theirs)
        foreign.take(section, theirs)
        name = renamed.get(theirs, theirs)
        if name == "hf_checkpointer":
            foreign.remark(
                "automatic: export: true writes the model when the run ends", section, theirs, undecided=False
            )
            continue
        if name not in known:
            text = f"there is no such {section[:-1]}: composer-dist keys {section} lists ours"
            foreign.remark(text, section, theirs, undecided=False)
            continue
        accepted = known_names(named.resolve(known[name], _HERE))
        values = {}
        for key, value in given.items():
            ours = _RENAMED.get(name, {}).get(key, key)
            if ours in accepted and value is not None:
                values[ours] = (
                    f"{value}ba" if key.endswith("batch_interval") or key == "batch_log_interval" else value
                )
            elif value is not None and (name != "early_stopping" or key not in _WATCHED):
                foreign.remark("has no counterpart", section, theirs, key, undecided=False)
        if name == "early_stopping":
            _early_stopping(foreign, values, given, section, theirs)
        foreign.put(values, f"{section}.{name}", section, theirs)


_WATCHED = ("dataloader_label", "comp")
"""Keys of an early_stopper that are parts of others here."""


def _early_stopping(foreign: Foreign, values: dict[str, Any], given: dict[str, Any], *path: str) -> None:
    """Composer watches a metric of a dataloader; ours has both in its name."""
    label, monitor = given.get("dataloader_label", "eval"), given.get("monitor", "loss")
    values["monitor"] = f"loss/{label}/total" if "loss" in monitor else f"metrics/{label}/{monitor}"
    if given.get("comp") is not None:
        values["mode"] = "min" if "less" in str(given["comp"]) or "min" in str(given["comp"]) else "max"
