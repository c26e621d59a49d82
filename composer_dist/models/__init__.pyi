from .base import ComposerClassifier as ComposerClassifier
from .base import ComposerModel as ComposerModel
from .huggingface import HuggingFaceModel as HuggingFaceModel
from .metrics import LanguagePerplexity as LanguagePerplexity
from .metrics import TokenAccuracy as TokenAccuracy
from .preferences import DPOModel as DPOModel
from .preferences import PreferenceAccuracy as PreferenceAccuracy
