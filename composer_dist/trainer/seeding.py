"""Random seeds, and algorithms that give the same every time."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import torch


def seed_all(seed: int) -> None:
    """Seeds Python, torch on all devices, and numpy if it has been imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def use_deterministic_algorithms() -> Callable[[], None]:
    """Has torch raise where it has no deterministic algorithm; returns what undoes that.

    cuBLAS is deterministic only with a workspace of fixed size, which it reads from the environment when
    it is first used (see torch.use_deterministic_algorithms); nothing else reads that variable.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

    def restore() -> None:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark

    return restore
