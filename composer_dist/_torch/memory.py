"""The history of a CUDA device's memory, for pytorch.org/memory_viz (torch 2.1)."""

from torch.cuda.memory import _dump_snapshot as dump_memory_history
from torch.cuda.memory import _record_memory_history as record_memory_history

__all__ = ["dump_memory_history", "record_memory_history"]
