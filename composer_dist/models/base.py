"""The base classes by their public path; they are defined below `distributed/`, which asks for them too."""

from composer_dist.composer_model import ComposerClassifier as ComposerClassifier
from composer_dist.composer_model import ComposerModel as ComposerModel
