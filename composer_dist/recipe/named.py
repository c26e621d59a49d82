"""What a configuration names: `package.module.Name`, `file.py:Name` next to it, a short name, a directory."""

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_dist.errors import ParallelismValueError
from composer_dist.users_code import is_of_users_code
from composer_dist.wording import near_miss


def resolve(reference: str, folder: Path) -> Any:
    """The object that `reference` names.

    Args:
        reference: `package.module.Name`, `package.module:Name` or `file.py:Name`.
        folder: the configuration's, where files are looked up.

    Raises:
        ParallelismValueError: it does not exist, or cannot be imported.
    """
    where, colon, name = reference.rpartition(":")
    if not colon:
        where, _, name = reference.rpartition(".")
    if not where or not name or where.startswith("."):
        raise ParallelismValueError(
            f"{reference!r} is not a reference: expected package.module.Name, or file.py:Name "
            "for a file next to the configuration."
        )
    module = _load(folder / where) if where.endswith(".py") else _import(where, folder)
    if not hasattr(module, name):
        raise ParallelismValueError(f"{where} has no {name!r}.{near_miss(name, vars(module))}")
    return getattr(module, name)


def check_directory(name: str, what: str) -> None:
    """Raise an error about `what` unless `name` is a directory, or may be one on the Hugging Face hub."""
    if os.path.isfile(name):
        raise ParallelismValueError(f"{what} is a file: give the directory of the model.")
    if not os.path.isdir(name) and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ParallelismValueError(f"{what}: there is no such directory (seen from {Path.cwd()}).")


def _load(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise ParallelismValueError(f"There is no file {file}.")
    name = f"composer_dist_run_{file.stem}"
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(file):
        return known  # one module object, so that classes stay the same and pickle
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if is_of_users_code(error):
            raise
        file = Path(*name.split(".")).with_suffix(".py")
        beside = f" Write {file}:... for the file in {folder}." if (folder / file).is_file() else ""
        raise ParallelismValueError(f"{name} cannot be imported: {error}{_line(error)}.{beside}") from error


def _line(error: BaseException) -> str:
    """The first line of the imported code that leads to the error, with a space before it."""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<") and frame.filename not in (__file__, importlib.__file__):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""


OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}
SCHEDULERS = {
    "constant": "composer_dist.trainer.schedulers.ConstantWithWarmupScheduler",
    "linear": "composer_dist.trainer.schedulers.LinearWithWarmupScheduler",
    "cosine": "composer_dist.trainer.schedulers.CosineAnnealingWithWarmupScheduler",
    "one_cycle": "torch.optim.lr_scheduler.OneCycleLR",
}
WHOLE_RUN = frozenset({"total_steps", "T_max"})
"""Arguments of torch's schedulers that default to the run's number of batches."""
CALLBACKS = {
    "early_stopping": "composer_dist.trainer.callbacks.EarlyStopping",
    "ema": "composer_dist.trainer.callbacks.EMA",
    "generate": "composer_dist.trainer.callbacks.Generate",
    "gradient_norm": "composer_dist.trainer.callbacks.GradientNorm",
    "lr_monitor": "composer_dist.trainer.callbacks.LRMonitor",
    "memory_monitor": "composer_dist.trainer.callbacks.MemoryMonitor",
    "nan_monitor": "composer_dist.trainer.callbacks.NaNMonitor",
    "optimizer_monitor": "composer_dist.trainer.callbacks.OptimizerMonitor",
    "profiler": "composer_dist.trainer.callbacks.Profiler",
    "progress_bar": "composer_dist.trainer.callbacks.ProgressBar",
    "replica_check": "composer_dist.trainer.callbacks.ReplicaCheck",
    "runtime_estimator": "composer_dist.trainer.callbacks.RuntimeEstimator",
    "speed_monitor": "composer_dist.trainer.callbacks.SpeedMonitor",
}
LOGGERS = {
    "console": "composer_dist.trainer.loggers.ConsoleLogger",
    "file": "composer_dist.trainer.loggers.FileLogger",
    "in_memory": "composer_dist.trainer.loggers.InMemoryLogger",
    "mlflow": "composer_dist.trainer.loggers.MLflowLogger",
    "tensorboard": "composer_dist.trainer.loggers.TensorBoardLogger",
    "wandb": "composer_dist.trainer.loggers.WandBLogger",
}
METRICS = {
    "accuracy": "torchmetrics.classification.MulticlassAccuracy",
    "perplexity": "composer_dist.models.LanguagePerplexity",
    "token_accuracy": "composer_dist.models.TokenAccuracy",
}
GROUPS = {"callback": "composer_dist.callbacks", "logger": "composer_dist.loggers"}
"""The groups of entry points by which installed packages give their classes short names."""
PLACES = {
    "file": {"path": "metrics.jsonl"},
    "tensorboard": {"log_dir": "tensorboard"},
    "profiler": {"folder": "profile"},
}
"""Where loggers and callbacks write in the run's folder by default."""


def placed(name: str, arguments: Mapping[str, Any] | None, out: Path) -> dict[str, Any]:
    """A logger's or callback's arguments, with its place in the run's folder."""
    return {key: str(out / place) for key, place in PLACES.get(name, {}).items()} | dict(arguments or {})


def find(kind: str, known: Mapping[str, str], name: str, folder: Path) -> Any:
    """The class of a short name, or of a `package.module.Name` or `file.py:Name`.

    Raises:
        ParallelismValueError: it does not exist.
    """
    return resolve(reference(kind, known, name), folder)


def reference(kind: str, known: Mapping[str, str], name: str) -> str:
    """What a short name stands for, or `name` itself if it is a reference.

    Installed packages may add short names to those of callbacks and loggers, but not replace them.

    Raises:
        ParallelismValueError: there is no such short name; lists those that there are.
    """
    if name not in known and kind in GROUPS:
        known = {one.name: one.value for one in entry_points(group=GROUPS[kind])} | dict(known)
    if name in known:
        return known[name]
    if "." in name:
        return name
    near = near_miss(name.lower(), known)
    if kind == "callback" and "checkpoint" in name.lower():
        near = " Did you mean 'checkpoints:' at the top of the file?"
    raise ParallelismValueError(
        f"There is no {kind} {name!r}.{near} Valid names: {', '.join(known)}, or any class "
        "as package.module.Name or file.py:Name."
    )
