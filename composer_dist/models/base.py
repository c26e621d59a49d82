"""The public path of the base classes; they are defined below `distributed/`, which uses them too."""

from composer_dist.composer_model import ComposerClassifier as ComposerClassifier
from composer_dist.composer_model import ComposerModel as ComposerModel
