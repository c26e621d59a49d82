"""Loggers: where metrics, tables and hyperparameters go."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ConsoleLogger": f"{__name__}.console",
        "FileLogger": f"{__name__}.file",
        "InMemoryLogger": f"{__name__}.in_memory",
        "Logger": f"{__name__}.logger",
        "LoggerDestination": f"{__name__}.logger",
        "MLflowLogger": f"{__name__}.mlflow",
        "TensorBoardLogger": f"{__name__}.tensorboard",
        "WandBLogger": f"{__name__}.wandb",
        "WritingLogger": f"{__name__}.writing",
    },
)

if TYPE_CHECKING:
    from composer_dist.trainer.loggers.console import ConsoleLogger as ConsoleLogger
    from composer_dist.trainer.loggers.file import FileLogger as FileLogger
    from composer_dist.trainer.loggers.in_memory import InMemoryLogger as InMemoryLogger
    from composer_dist.trainer.loggers.logger import Logger as Logger
    from composer_dist.trainer.loggers.logger import LoggerDestination as LoggerDestination
    from composer_dist.trainer.loggers.mlflow import MLflowLogger as MLflowLogger
    from composer_dist.trainer.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from composer_dist.trainer.loggers.wandb import WandBLogger as WandBLogger
    from composer_dist.trainer.loggers.writing import WritingLogger as WritingLogger
