from .composer_model import ComposerClassifier as ComposerClassifier
from .composer_model import ComposerModel as ComposerModel
from .config.fully_shard import FSDP2Config as FSDP2Config
from .config.mesh import MeshConfig as MeshConfig
from .config.parallelism import ParallelismConfig as ParallelismConfig
from .config.replicate import DDPConfig as DDPConfig
from .config.rule import Rule as Rule
from .config.tensor_parallel import TPConfig as TPConfig
from .errors import CheckpointError as CheckpointError
from .errors import ParallelismError as ParallelismError
from .models.huggingface import HuggingFaceModel as HuggingFaceModel
from .precision import Precision as Precision
from .trainer.trainer import Trainer as Trainer

__version__: str
