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
    "one_cycle": "torch.optim.lr_scheduler.OneCycleLR",
    "constant": "torch.optim.lr_scheduler.ConstantLR",
}
WHOLE_RUN = frozenset({"total_steps", "T_max"})
"""Arguments of schedulers that are the run's number of batches, unless the configuration says otherwise."""
CALLBACKS = {
    "progress_bar": "composer_dist.trainer.ProgressBar",
}
LOGGERS = {
    "console": "composer_dist.trainer.ConsoleLogger",
    "in_memory": "composer_dist.trainer.InMemoryLogger",
}


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
