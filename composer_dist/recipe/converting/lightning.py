"""Files of Lightning's command line, as far as the Fine-Tuning Scheduler's examples use them."""

import re
from typing import Any

from composer_dist import DDPConfig
from composer_dist.recipe.converting.finetuning_scheduler import convert_callbacks
from composer_dist.recipe.converting.foreign import Foreign
from composer_dist.recipe.converting.sharding import put_strategy
from composer_dist.recipe.signature import known_names

_PRECISIONS = {
    "32": "fp32", "32-true": None, "16": "amp_fp16", "16-mixed": "amp_fp16", "bf16": "amp_bf16",
    "bf16-mixed": "amp_bf16", "bf16-true": None, "16-true": None,
}  # fmt: skip
_SCHEDULERS = {"OneCycleLR": "one_cycle"}
_NAMES = {"torch.optim.AdamW": "adamw", "torch.optim.Adam": "adam", "torch.optim.SGD": "sgd"}
_DEFAULT = "ModelParallelStrategy"
"""Of a part of a file, whose other part names it."""
_FIT = ("limit_train_batches", "limit_val_batches")


def convert_lightning(foreign: Foreign) -> None:
    """What the keys of Lightning's command line become."""
    seed = foreign.take("seed_everything")
    if seed is not None and seed is not False:
        foreign.put(0 if seed is True else seed, "seed", "seed_everything")  # true is 0 there
    callbacks = "callbacks+" if foreign.get("trainer", "callbacks+") is not None else "callbacks"
    convert_callbacks(foreign, "trainer", callbacks)
    _length(foreign)
    _precision(foreign)
    _strategy(foreign)
    kind = foreign.one_of(("NORM", "VALUE"), "", "trainer", "gradient_clip_algorithm", default="norm").lower()
    if norm := foreign.take("trainer", "gradient_clip_val"):  # 0 clips nothing there
        foreign.put({kind: norm}, "trainer.gradient_clipping", "trainer", "gradient_clip_val")
    for theirs, ours in zip(_FIT, ("train_subset_num_batches", "eval_subset_num_batches"), strict=True):
        if isinstance(count := foreign.take("trainer", theirs), int):
            foreign.put(count, f"trainer.{ours}", "trainer", theirs)
        elif count not in (None, 1.0):
            foreign.remark("batches are limited by their number, not by a share", "trainer", theirs)
    for section in ("optimizer", "lr_scheduler"):
        _named(foreign, section)
    for section in ("model", "data"):
        if foreign.get(section) is not None:
            text = f"write our {section} section: composer-dist keys {section} lists its keys"
            foreign.drop(text, section, undecided=True)
    text = "loggers: {tensorboard: {}}, or wandb, mlflow, file, console"
    foreign.drop(text, "trainer", "logger")
    foreign.drop("callbacks: {profiler: {}}", "trainer", "profiler")


def _length(foreign: Foreign) -> None:
    for theirs, unit in (("max_epochs", "ep"), ("max_steps", "ba")):
        if (count := foreign.take("trainer", theirs)) not in (None, -1):
            if "max_duration" in foreign.ours.get("trainer", {}):
                text = "a run has one length, here these batches; there it ends at the first of both"
                foreign.remark(text, "trainer", theirs)
            foreign.put(f"{count}{unit}", "trainer.max_duration", "trainer", theirs)


def _precision(foreign: Foreign) -> None:
    if (given := foreign.take("trainer", "precision")) is None:
        return
    if str(given) not in _PRECISIONS:
        raise foreign.wrong(f"{given!r} is not one of {', '.join(_PRECISIONS)}", "trainer", "precision")
    if (ours := _PRECISIONS[str(given)]) is not None:
        foreign.put(ours, "trainer.precision", "trainer", "precision")
    elif str(given) != "32-true":
        foreign.put(
            {"bf16-true": "bfloat16", "16-true": "float16"}[str(given)], "model.dtype", "trainer", "precision"
        )


def _strategy(foreign: Foreign) -> None:
    """ModelParallelStrategy by its two sizes, FSDPStrategy and DDPStrategy by name."""
    path = ("trainer", "strategy")
    given = foreign.get(*path)
    if given is None:
        return
    name = given if isinstance(given, str) else foreign.mapping(*path).get("class_path", _DEFAULT)
    name = str(name).rpartition(".")[2]
    args = {} if isinstance(given, str) else dict(foreign.mapping(*path, "init_args"))
    foreign.take(*path)
    if name == "ModelParallelStrategy":
        sizes = {"dp_shard": "data_parallel_size", "tp": "tensor_parallel_size"}
        mesh = {}
        for ours, theirs in sizes.items():
            size = args.pop(theirs, "auto")
            mesh[ours] = -1 if size == "auto" else foreign.number(1, *path, "init_args", theirs)
        if set(mesh.values()) == {-1}:
            text = (
                "data_parallel_size and tensor_parallel_size are auto: all ranks shard; MeshConfig.auto() is"
            )
            foreign.remark(f"{text} tensor parallel within hosts", *path)
        else:
            foreign.put(mesh, "parallelism.mesh", *path)
            if mesh["tp"] != 1:
                foreign.put({}, "parallelism.tp", *path)
    elif name in ("FSDPStrategy", "fsdp"):
        offload, strategy = args.pop("cpu_offload", False), args.pop("sharding_strategy", None)
        foreign.put({"cpu_offload": True} if offload else {}, "parallelism.fsdp2", *path)
        if strategy is not None:
            put_strategy(foreign, str(strategy), *path)
        if isinstance(foreign.ours["parallelism"], dict):  # and not replicas
            _classes(foreign, args, *path)
    elif name.startswith(("DDPStrategy", "ddp")):
        if unused := re.fullmatch(r"ddp.*_find_unused_parameters_(true|false)", name):
            args["find_unused_parameters"] = unused[1] == "true"
        known = known_names(DDPConfig)
        found = {key: args.pop(key) for key in [*args] if key in known and args[key] is not None}
        foreign.put(found, "parallelism.ddp", *path)
    else:
        foreign.remark("choose a strategy: fsdp, hsdp, tp or ddp", *path)
    for key in (key for key, value in args.items() if value is not None):
        text = {"save_distributed_checkpoint": "automatic: checkpoints are sharded"}.get(
            key, "has no counterpart"
        )
        foreign.remark(text, *path, "init_args", key, undecided=False)


def _classes(foreign: Foreign, args: dict[str, Any], *path: str) -> None:
    """Classes of modules that FSDPStrategy wraps or recomputes become rules."""
    rules: list[dict[str, Any]] = list(foreign.ours.get("parallelism", {}).get("rules", []))
    for theirs, field in (("auto_wrap_policy", "shard"), ("activation_checkpointing_policy", "act_ckpt")):
        policy = args.pop(theirs, None)
        inner = policy.get("init_args") if isinstance(policy, dict) else None
        classes = inner.get("module_classes") if isinstance(inner, dict) else None
        if isinstance(classes, dict | list) and classes:
            names = [f"type:{name}" for name in classes]
            rules.append({"match": names, field: True if field == "shard" else "composable"})
        elif policy is not None:
            foreign.remark("parallelism: {rules: [...]} chooses units", *path, "init_args", theirs)
    if any("shard" in one for one in rules):
        rules.append({"match": "", "shard": True})
    if rules:
        foreign.put(rules, "parallelism.rules", *path)


def _named(foreign: Foreign, section: str) -> None:
    """An optimizer or scheduler by its class."""
    given = foreign.take(section)
    if not isinstance(given, dict) or "class_path" not in given:
        return
    name = str(given["class_path"])
    short = _NAMES.get(name) or _SCHEDULERS.get(name.rpartition(".")[2]) or name
    ours = "scheduler" if section == "lr_scheduler" else section
    if section == "lr_scheduler":
        foreign.put(False, "trainer.step_schedulers_every_batch", section)
    foreign.put({"name": short, **foreign.mapping(section, "init_args")}, ours, section)
