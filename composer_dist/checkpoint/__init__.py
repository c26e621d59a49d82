"""States and checkpoints: from shards to what people exchange, and back."""

from typing import TYPE_CHECKING

from composer_dist._lazy import lazy_names

_HERE = "composer_dist.checkpoint"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "full_model_state": f"{_HERE}.state",
        "load_full_model_state": f"{_HERE}.state",
        "full_optimizer_state": f"{_HERE}.full_optimizer",
        "load_full_optimizer_state": f"{_HERE}.full_optimizer",
        "LoadResult": f"{_HERE}.state",
        "save_checkpoint": f"{_HERE}.save",
        "load_checkpoint": f"{_HERE}.load",
        "latest_checkpoint": f"{_HERE}.latest",
        "PendingSave": f"{_HERE}.async_save",
        "load_pretrained": f"{_HERE}.pretrained",
        "export_pretrained": f"{_HERE}.huggingface",
    },
)

if TYPE_CHECKING:
    from composer_dist.checkpoint.async_save import PendingSave as PendingSave
    from composer_dist.checkpoint.full_optimizer import full_optimizer_state as full_optimizer_state
    from composer_dist.checkpoint.full_optimizer import load_full_optimizer_state as load_full_optimizer_state
    from composer_dist.checkpoint.huggingface import export_pretrained as export_pretrained
    from composer_dist.checkpoint.latest import latest_checkpoint as latest_checkpoint
    from composer_dist.checkpoint.load import load_checkpoint as load_checkpoint
    from composer_dist.checkpoint.pretrained import load_pretrained as load_pretrained
    from composer_dist.checkpoint.save import save_checkpoint as save_checkpoint
    from composer_dist.checkpoint.state import LoadResult as LoadResult
    from composer_dist.checkpoint.state import full_model_state as full_model_state
    from composer_dist.checkpoint.state import load_full_model_state as load_full_model_state
