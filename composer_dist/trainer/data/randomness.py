"""The states of generators in a checkpoint, and deterministic algorithms."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from composer_dist.random_states import host_states, seed_host, set_aside, set_host_states


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
