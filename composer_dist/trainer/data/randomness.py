"""Random seeds, the states of all random generators, and deterministic algorithms."""

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def derived_seed(*parts: object) -> int:
    """A seed that depends on `parts` alone, and differs for other parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are signed


def seed_host(seed: int) -> None:
    """Seeds Python, torch on the CPU, and numpy if it has been imported."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def host_states() -> dict[str, Any]:
    """The states of Python's, torch's and (if it is in use) numpy's generators on the CPU."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def set_host_states(states: Mapping[str, Any]) -> None:
    """The inverse of `host_states`."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])


def generator_states(device: torch.device, host: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All generators that training on `device` draws from, as tensors and plain values."""
    states = to_plain(host or host_states())
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """The inverse of `generator_states`; a generator without a saved state stays as it is."""
    set_host_states(from_plain(states))
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"].cpu(), device)


def to_plain(host: Mapping[str, Any]) -> dict[str, Any]:
    """`host_states` as tensors and plain values, which any checkpoint takes."""
    version, words, gauss = host["python"]
    plain = {"python": [version, torch.tensor(words), gauss], "torch": host["torch"]}
    if "numpy" in host:
        name, keys, *rest = host["numpy"]
        plain["numpy"] = [name, torch.tensor(keys.tolist()), *rest]
    return plain


def from_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_plain`."""
    version, words, gauss = plain["python"]
    host = {"python": (version, tuple(words.tolist()), gauss), "torch": plain["torch"].cpu()}
    if "numpy" in plain:
        name, keys, *rest = plain["numpy"]
        host["numpy"] = (name, keys.tolist(), *rest)
    return host


@contextmanager
def set_aside() -> Iterator[None]:
    """Restores the host's generators afterwards, whatever the body draws or seeds."""
    states = host_states()
    try:
        yield
    finally:
        set_host_states(states)


class OwnRandomness:
    """Host generators of one's own, seeded once: each `with` continues where the last one ended."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Replaces the process's generators while the body runs."""
        with set_aside():
            if self._states is None:
                seed_host(self._seed)
            else:
                set_host_states(self._states)
            try:
                yield
            finally:
                self._states = host_states()


def seed_all(seed: int) -> None:
    """Seeds Python, torch on all devices, and numpy if it has been imported."""
    seed_host(seed)
    torch.manual_seed(seed)


def use_deterministic_algorithms() -> Callable[[], None]:
    """Makes torch raise if it has no deterministic algorithm. Returns a function that undoes this.

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
