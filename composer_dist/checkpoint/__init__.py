"""States and checkpoints: from shards to what people exchange, and back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_dist.checkpoint.huggingface import export_pretrained as export_pretrained
    from composer_dist.checkpoint.state import LoadResult as LoadResult
    from composer_dist.checkpoint.state import full_model_state as full_model_state
    from composer_dist.checkpoint.state import load_full_model_state as load_full_model_state

_HOMES = {
    "LoadResult": "state",
    "export_pretrained": "huggingface",
    "full_model_state": "state",
    "load_full_model_state": "state",
}

__all__ = ["LoadResult", "export_pretrained", "full_model_state", "load_full_model_state"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
