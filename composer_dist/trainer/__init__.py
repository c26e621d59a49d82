"""The Trainer, and what its callbacks see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_dist.trainer.callbacks import Callback as Callback
    from composer_dist.trainer.callbacks import ProgressBar as ProgressBar
    from composer_dist.trainer.events import Event as Event
    from composer_dist.trainer.loggers import ConsoleLogger as ConsoleLogger
    from composer_dist.trainer.loggers import InMemoryLogger as InMemoryLogger
    from composer_dist.trainer.loggers import Logger as Logger
    from composer_dist.trainer.loggers import LoggerDestination as LoggerDestination
    from composer_dist.trainer.options import GradientClipping as GradientClipping
    from composer_dist.trainer.state import State as State
    from composer_dist.trainer.time import Time as Time
    from composer_dist.trainer.time import Timestamp as Timestamp
    from composer_dist.trainer.time import TimeUnit as TimeUnit
    from composer_dist.trainer.trainer import Trainer as Trainer

_HOMES = {
    "Callback": "callbacks",
    "ConsoleLogger": "loggers",
    "Event": "events",
    "GradientClipping": "options",
    "InMemoryLogger": "loggers",
    "Logger": "loggers",
    "LoggerDestination": "loggers",
    "ProgressBar": "callbacks",
    "State": "state",
    "Time": "time",
    "TimeUnit": "time",
    "Timestamp": "time",
    "Trainer": "trainer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
