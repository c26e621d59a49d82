"""Random seeds."""

from __future__ import annotations

import random
import sys

import torch


def seed_all(seed: int) -> None:
    """Seeds Python, torch on all devices, and numpy if it has been imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
