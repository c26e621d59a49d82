from .base import ComposerClassifier as ComposerClassifier
from .base import ComposerModel as ComposerModel
from .huggingface import HuggingFaceModel as HuggingFaceModel
from .metrics import LanguagePerplexity as LanguagePerplexity
from .metrics import PreferenceAccuracy as PreferenceAccuracy
from .metrics import TokenAccuracy as TokenAccuracy
from .preferences import DPOModel as DPOModel
