"""Callbacks: code that runs at the Trainer's events."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Callback": f"{__name__}.base",
        "CheckpointSaver": f"{__name__}.checkpoint_saver",
        "EMA": f"{__name__}.ema",
        "EarlyStopping": f"{__name__}.early_stopping",
        "Generate": f"{__name__}.generate",
        "GradientNorm": f"{__name__}.gradient_norm",
        "LRMonitor": f"{__name__}.lr_monitor",
        "MemoryMonitor": f"{__name__}.memory_monitor",
        "NaNMonitor": f"{__name__}.nan_monitor",
        "OptimizerMonitor": f"{__name__}.optimizer_monitor",
        "ProgressBar": f"{__name__}.progress_bar",
        "RuntimeEstimator": f"{__name__}.runtime_estimator",
        "SpeedMonitor": f"{__name__}.speed_monitor",
    },
)

if TYPE_CHECKING:
    from composer_dist.trainer.callbacks.base import Callback as Callback
    from composer_dist.trainer.callbacks.checkpoint_saver import CheckpointSaver as CheckpointSaver
    from composer_dist.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from composer_dist.trainer.callbacks.ema import EMA as EMA
    from composer_dist.trainer.callbacks.generate import Generate as Generate
    from composer_dist.trainer.callbacks.gradient_norm import GradientNorm as GradientNorm
    from composer_dist.trainer.callbacks.lr_monitor import LRMonitor as LRMonitor
    from composer_dist.trainer.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from composer_dist.trainer.callbacks.nan_monitor import NaNMonitor as NaNMonitor
    from composer_dist.trainer.callbacks.optimizer_monitor import OptimizerMonitor as OptimizerMonitor
    from composer_dist.trainer.callbacks.progress_bar import ProgressBar as ProgressBar
    from composer_dist.trainer.callbacks.runtime_estimator import RuntimeEstimator as RuntimeEstimator
    from composer_dist.trainer.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
