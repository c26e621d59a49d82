"""Make the model a user already has ready to train on many devices, in one call."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

__version__ = "0.1.0"

_CONFIG = "composer_dist.distributed.config"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Trainer": "composer_dist.trainer",
        "ComposerModel": "composer_dist.models",
        "ComposerClassifier": "composer_dist.models",
        "HuggingFaceModel": "composer_dist.models",
        "Precision": "composer_dist.precision",
        "MeshConfig": _CONFIG,
        "Rule": _CONFIG,
        "FSDP2Config": _CONFIG,
        "TPConfig": _CONFIG,
        "DDPConfig": _CONFIG,
        "ParallelismConfig": _CONFIG,
        "ParallelismError": "composer_dist.errors",
        "CheckpointError": "composer_dist.errors",
    },
)

if TYPE_CHECKING:
    from composer_dist.distributed.config import DDPConfig as DDPConfig
    from composer_dist.distributed.config import FSDP2Config as FSDP2Config
    from composer_dist.distributed.config import MeshConfig as MeshConfig
    from composer_dist.distributed.config import ParallelismConfig as ParallelismConfig
    from composer_dist.distributed.config import Rule as Rule
    from composer_dist.distributed.config import TPConfig as TPConfig
    from composer_dist.errors import CheckpointError as CheckpointError
    from composer_dist.errors import ParallelismError as ParallelismError
    from composer_dist.models.base import ComposerClassifier as ComposerClassifier
    from composer_dist.models.base import ComposerModel as ComposerModel
    from composer_dist.models.huggingface import HuggingFaceModel as HuggingFaceModel
    from composer_dist.precision import Precision as Precision
    from composer_dist.trainer.trainer import Trainer as Trainer
