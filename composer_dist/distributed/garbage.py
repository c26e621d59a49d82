"""The garbage collector rests while many objects are made that will all stay.

Each of its full collections walks everything that is alive, so that making n objects would cost more
than n: planning and sharding 4000 blocks took 1.5 times as long with it (benchmarks/scaling.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, or in a function that this decorates, nothing is collected."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
