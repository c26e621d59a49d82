"""The states of all random generators: taken, set back, and set aside for a while."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def derived_seed(*parts: object) -> int:
    """A seed that is a function of `parts`, and unlike those of any other parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are signed


def host_states() -> dict[str, Any]:
    """The states of Python's, numpy's (if it is in use) and torch's generators on the CPU."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators that training on `device` draws from, in plain and tensor types."""
    states = host_states()
    version, words, gauss = states["python"]
    states["python"] = {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
    if "numpy" in states:
        _, keys, position, has_gauss, gaussian = states["numpy"]
        words = torch.tensor(keys.tolist(), dtype=torch.int64)
        states["numpy"] = {"words": words, "rest": [int(position), int(has_gauss), float(gaussian)]}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """The inverse of `generator_states`; what has no state there stays as it is."""
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy as np

        position, has_gauss, gaussian = states["numpy"]["rest"]
        words = states["numpy"]["words"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", words, position, has_gauss, gaussian))
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type].cpu(), device)


def set_host_states(states: Mapping[str, Any]) -> None:
    """The inverse of `host_states`."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


@contextmanager
def set_aside() -> Iterator[None]:
    """Whatever the body draws or seeds on the host, the generators are afterwards where they were."""
    states = host_states()
    try:
        yield
    finally:
        set_host_states(states)


class OwnRandomness:
    """Generators of the host that only its bodies draw from: they go on where the last one ended.

    Args:
        seed: where they begin.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Puts them in the place of the process's own while the body runs."""
        with set_aside():
            if self._states is None:
                seed_host(self._seed)
            else:
                set_host_states(self._states)
            try:
                yield
            finally:
                self._states = host_states()


def seed_host(seed: int) -> None:
    """Seeds Python, torch on the CPU, and numpy if it has been imported."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
