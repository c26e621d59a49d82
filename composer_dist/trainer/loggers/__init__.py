"""Loggers: where metrics and hyperparameters go."""

from composer_dist.trainer.loggers.console import ConsoleLogger as ConsoleLogger
from composer_dist.trainer.loggers.in_memory import InMemoryLogger as InMemoryLogger
from composer_dist.trainer.loggers.logger import Logger as Logger
from composer_dist.trainer.loggers.logger import LoggerDestination as LoggerDestination

__all__ = ["ConsoleLogger", "InMemoryLogger", "Logger", "LoggerDestination"]
