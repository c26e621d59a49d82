"""The short names that a configuration may use, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_dist.distributed.from_dict import near_miss
from composer_dist.errors import ParallelismValueError
from composer_dist.run.reference import resolve

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
"""Arguments of torch's schedulers that are the run's number of batches, unless somebody says otherwise."""
CALLBACKS = {
    "early_stopping": "composer_dist.trainer.callbacks.EarlyStopping",
    "ema": "composer_dist.trainer.callbacks.EMA",
    "generate": "composer_dist.trainer.callbacks.Generate",
    "gradient_norm": "composer_dist.trainer.callbacks.GradientNorm",
    "lr_monitor": "composer_dist.trainer.callbacks.LRMonitor",
    "memory_monitor": "composer_dist.trainer.callbacks.MemoryMonitor",
    "nan_monitor": "composer_dist.trainer.callbacks.NaNMonitor",
    "optimizer_monitor": "composer_dist.trainer.callbacks.OptimizerMonitor",
    "progress_bar": "composer_dist.trainer.callbacks.ProgressBar",
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
PLACES = {"file": {"path": "metrics.jsonl"}, "tensorboard": {"log_dir": "tensorboard"}}
"""Where loggers write below the run's folder, unless the configuration says otherwise."""


def placed(name: str, arguments: Mapping[str, Any] | None, out: Path) -> dict[str, Any]:
    """A logger's arguments, completed by its place in the run's folder."""
    return {key: str(out / place) for key, place in PLACES.get(name, {}).items()} | dict(arguments or {})


def find(kind: str, known: Mapping[str, str], name: str, folder: Path) -> Any:
    """The class of a short name, or of a `package.module.Name` or `file.py:Name`.

    Raises:
        ParallelismValueError: there is none; names those that there are.
    """
    if name in known:
        return resolve(known[name], folder)
    if "." in name:
        return resolve(name, folder)
    raise ParallelismValueError(
        f"There is no {kind} {name!r}.{near_miss(name, known)} There are {', '.join(known)}, and any class "
        "as package.module.Name or file.py:Name."
    )
