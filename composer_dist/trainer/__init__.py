"""The Trainer, and what its callbacks see."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Callback": f"{__name__}.callbacks",
        "CheckpointSaver": f"{__name__}.callbacks",
        "ConsoleLogger": f"{__name__}.loggers",
        "DistributedDataLoader": f"{__name__}.dataloader",
        "EarlyStopping": f"{__name__}.callbacks",
        "ConstantWithWarmupScheduler": f"{__name__}.schedulers",
        "CosineAnnealingWithWarmupScheduler": f"{__name__}.schedulers",
        "LinearWithWarmupScheduler": f"{__name__}.schedulers",
        "Evaluator": f"{__name__}.evaluator",
        "EMA": f"{__name__}.callbacks",
        "Event": f"{__name__}.events",
        "FileLogger": f"{__name__}.loggers",
        "FineTuningPhases": f"{__name__}.phases",
        "Generate": f"{__name__}.callbacks",
        "GradientClipping": f"{__name__}.options",
        "GradientNorm": f"{__name__}.callbacks",
        "InMemoryLogger": f"{__name__}.loggers",
        "LRMonitor": f"{__name__}.callbacks",
        "LossScaling": "composer_dist.distributed.scaling",
        "Logger": f"{__name__}.loggers",
        "LoggerDestination": f"{__name__}.loggers",
        "MLflowLogger": f"{__name__}.loggers",
        "MemoryMonitor": f"{__name__}.callbacks",
        "NaNMonitor": f"{__name__}.callbacks",
        "NoImprovement": f"{__name__}.phase_schedule",
        "OptimizerMonitor": f"{__name__}.callbacks",
        "PackedDataset": f"{__name__}.packing",
        "PackedStream": f"{__name__}.packing",
        "Phase": f"{__name__}.phase_schedule",
        "ProgressBar": f"{__name__}.callbacks",
        "RuntimeEstimator": f"{__name__}.callbacks",
        "SpeedMonitor": f"{__name__}.callbacks",
        "Resume": f"{__name__}.resuming",
        "State": f"{__name__}.state",
        "TensorBoardLogger": f"{__name__}.loggers",
        "Time": f"{__name__}.time",
        "TimeUnit": f"{__name__}.time",
        "Timestamp": f"{__name__}.time",
        "Trainer": f"{__name__}.trainer",
        "WandBLogger": f"{__name__}.loggers",
        "default_phases": f"{__name__}.phase_schedule",
        "dump_schedule": f"{__name__}.phase_schedule",
        "load_schedule": f"{__name__}.phase_schedule",
    },
)

if TYPE_CHECKING:
    from composer_dist.distributed.scaling import LossScaling as LossScaling
    from composer_dist.trainer.callbacks import EMA as EMA
    from composer_dist.trainer.callbacks import Callback as Callback
    from composer_dist.trainer.callbacks import CheckpointSaver as CheckpointSaver
    from composer_dist.trainer.callbacks import EarlyStopping as EarlyStopping
    from composer_dist.trainer.callbacks import Generate as Generate
    from composer_dist.trainer.callbacks import GradientNorm as GradientNorm
    from composer_dist.trainer.callbacks import LRMonitor as LRMonitor
    from composer_dist.trainer.callbacks import MemoryMonitor as MemoryMonitor
    from composer_dist.trainer.callbacks import NaNMonitor as NaNMonitor
    from composer_dist.trainer.callbacks import OptimizerMonitor as OptimizerMonitor
    from composer_dist.trainer.callbacks import ProgressBar as ProgressBar
    from composer_dist.trainer.callbacks import RuntimeEstimator as RuntimeEstimator
    from composer_dist.trainer.callbacks import SpeedMonitor as SpeedMonitor
    from composer_dist.trainer.dataloader import DistributedDataLoader as DistributedDataLoader
    from composer_dist.trainer.evaluator import Evaluator as Evaluator
    from composer_dist.trainer.events import Event as Event
    from composer_dist.trainer.loggers import ConsoleLogger as ConsoleLogger
    from composer_dist.trainer.loggers import FileLogger as FileLogger
    from composer_dist.trainer.loggers import InMemoryLogger as InMemoryLogger
    from composer_dist.trainer.loggers import Logger as Logger
    from composer_dist.trainer.loggers import LoggerDestination as LoggerDestination
    from composer_dist.trainer.loggers import MLflowLogger as MLflowLogger
    from composer_dist.trainer.loggers import TensorBoardLogger as TensorBoardLogger
    from composer_dist.trainer.loggers import WandBLogger as WandBLogger
    from composer_dist.trainer.options import GradientClipping as GradientClipping
    from composer_dist.trainer.packing import PackedDataset as PackedDataset
    from composer_dist.trainer.packing import PackedStream as PackedStream
    from composer_dist.trainer.phase_schedule import NoImprovement as NoImprovement
    from composer_dist.trainer.phase_schedule import Phase as Phase
    from composer_dist.trainer.phase_schedule import default_phases as default_phases
    from composer_dist.trainer.phase_schedule import dump_schedule as dump_schedule
    from composer_dist.trainer.phase_schedule import load_schedule as load_schedule
    from composer_dist.trainer.phases import FineTuningPhases as FineTuningPhases
    from composer_dist.trainer.resuming import Resume as Resume
    from composer_dist.trainer.schedulers import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
    from composer_dist.trainer.schedulers import (
        CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler,
    )
    from composer_dist.trainer.schedulers import LinearWithWarmupScheduler as LinearWithWarmupScheduler
    from composer_dist.trainer.state import State as State
    from composer_dist.trainer.time import Time as Time
    from composer_dist.trainer.time import Timestamp as Timestamp
    from composer_dist.trainer.time import TimeUnit as TimeUnit
    from composer_dist.trainer.trainer import Trainer as Trainer
