"""Models that the Trainer can train: their interface, and what wraps models that lack it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_dist.models.base import ComposerClassifier as ComposerClassifier
    from composer_dist.models.base import ComposerModel as ComposerModel
    from composer_dist.models.huggingface import HuggingFaceModel as HuggingFaceModel

_HOMES = {
    "ComposerModel": "base",
    "ComposerClassifier": "base",
    "HuggingFaceModel": "huggingface",
}

__all__ = ["ComposerClassifier", "ComposerModel", "HuggingFaceModel"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: transformers takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
