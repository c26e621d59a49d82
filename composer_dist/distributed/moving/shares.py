"""Which share of a tensor in files each rank reads, where several ranks hold the same part."""

from collections.abc import Iterator, Mapping

from composer_dist.distributed.mesh.layout import Layout

SMALL = 1 << 20
"""Smaller parts, in bytes, are read in full by every rank that holds them."""
WINDOW = 4 << 20
"""Most bytes gathered at a time; more is not faster, and gloo buffers it twice."""


def shared_along(layout: Layout, nbytes: int, sizes: Mapping[str, int]) -> list[str]:
    """The dimensions of the mesh along which ranks hold the same part of `nbytes`, each reading a share."""
    cut = {"dp_replicate": False, "tp": layout.tp_dim is not None}
    shared = [name for name, size in sizes.items() if size > 1 and not cut.get(name, layout.rows)]
    return shared if nbytes >= SMALL else []


def windows(numel: int, itemsize: int, holders: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Windows of a part, in which all its holders have equal shares: (first element, length).

    The remainder at the end, less than one element per holder, is in no window.
    """
    step = max(1, min(bucket_bytes, WINDOW) // (itemsize * holders)) * holders
    whole = numel // holders * holders
    for first in range(0, whole, step):
        yield first, min(step, whole - first)
