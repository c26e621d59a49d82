"""Callbacks: code that runs at the Trainer's events."""

from composer_dist.trainer.callbacks.base import Callback as Callback
from composer_dist.trainer.callbacks.progress_bar import ProgressBar as ProgressBar

__all__ = ["Callback", "ProgressBar"]
