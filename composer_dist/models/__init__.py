"""Models that the Trainer can train: their interface, and what wraps models that lack it."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ComposerModel": f"{__name__}.base",
        "ComposerClassifier": f"{__name__}.base",
        "HuggingFaceModel": f"{__name__}.huggingface",
    },
)

if TYPE_CHECKING:
    from composer_dist.models.base import ComposerClassifier as ComposerClassifier
    from composer_dist.models.base import ComposerModel as ComposerModel
    from composer_dist.models.huggingface import HuggingFaceModel as HuggingFaceModel
