"""Seeds and states of random generators: Python's, numpy's (if it has been imported) and torch's."""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def derived_seed(*parts: object) -> int:
    """A seed that depends on `parts` alone, and differs for other parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are signed


def seed_host(seed: int) -> None:
    """Seed Python, torch on the CPU, and numpy."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_all(seed: int) -> None:
    """Seed Python, torch on all devices, and numpy."""
    seed_host(seed)
    if torch.accelerator.is_available():  # otherwise torch.manual_seed would only format three stacks
        torch.manual_seed(seed)


def states_outside_torch() -> dict[str, Any]:
    """The states of Python's and numpy's generators."""
    states = {"python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def host_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators on the CPU."""
    return states_outside_torch() | {"torch": torch.get_rng_state()}


def set_host_states(states: Mapping[str, Any]) -> None:
    """The inverse of `host_states` and `states_outside_torch`."""
    random.setstate(states["python"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])


def places(device: torch.device) -> list[Any]:
    """Where Python's and torch's generators are, on the host and on `device`; drawing changes it."""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return [random.getstate(), *(one.tolist() for one in states)]


@contextmanager
def set_aside(device: torch.device | None = None) -> Iterator[None]:
    """Restore the host's generators, and a device's, at the end, whatever the body draws or seeds."""
    states = host_states()
    with ExitStack() as stack:
        stack.callback(set_host_states, states)
        if device is not None and device.type not in ("cpu", "meta"):
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        yield
