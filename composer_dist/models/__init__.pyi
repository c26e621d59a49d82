from .base import ComposerClassifier as ComposerClassifier
from .base import ComposerModel as ComposerModel
from .huggingface import HuggingFaceModel as HuggingFaceModel
