"""torch's DataLoader, and the history of a CUDA device's memory for pytorch.org/memory_viz (torch 2.1)."""

from traceback import walk_tb

from torch.cuda.memory import _dump_snapshot as dump_memory_history
from torch.cuda.memory import _record_memory_history as record_memory_history

__all__ = ["dump_memory_history", "raised_by_samples", "record_memory_history"]


def raised_by_samples(error: StopIteration) -> bool:
    """Whether a `StopIteration` from a DataLoader is one that a map-style dataset or collate_fn has raised.

    By the frames of its traceback: the fetcher of such datasets in this process, or the wrapper that raises a
    worker's errors again, and which a worker does not use for the end of a stream. Since torch 1.2.
    """
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    callers = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return any(isinstance(caller, (ExceptionWrapper, _MapDatasetFetcher)) for caller in callers)
