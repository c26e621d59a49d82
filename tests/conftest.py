"""Fixtures and markers that the whole suite shares."""

import importlib.util
import logging
import os
import shutil
import sys

# Before torch is imported, here and in the workers, which inherit the environment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import tests.kit.garbage  # noqa: F401, for what it does

# isort: split

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.kit import world
from tests.kit.worker import forget_accelerate, seed_torch
from tests.kit.world import World


def _world(size: int) -> Any:
    @pytest.fixture(name=f"world{size}")
    def made(workers: None) -> World:
        """`world2(fn, *args, timeout=60, setup="group", **kwargs)`: `fn` on two ranks."""

        def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
            __tracebackhide__ = True
            return world.run(fn, size, *args, **kwargs)

        return call

    return made


world1, world2, world4 = map(_world, (1, 2, 4))


@pytest.fixture(scope="session")
def workers() -> Iterator[None]:
    """Ends the workers with the session."""
    yield
    world.stop()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts from one seed; in this process it leaves no process group and no variable behind.

    Nor the levels of the loggers that the command line hushes.
    """
    seed_torch()
    hushed = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in hushed]
    with mock.patch.dict(os.environ):
        yield
    for logger, level in zip(hushed, levels, strict=True):
        logger.setLevel(level)
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_accelerate()


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs, also from child processes, unless the tests that need one are asked for."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Has the workers of `tests.kit.world` share what the collection has imported, where it is much."""
    if "PYTEST_XDIST_WORKER" in os.environ and sys.platform == "linux":
        world.fork_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promise", type=int, help="run the tests of this promise of docs/promises.md only")


def promises(item: pytest.Item) -> set[int]:
    """The numbers of the promises that a test holds."""
    return {number for mark in item.iter_markers("promise") for number in mark.args}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of one promise where asked; skips what needs a GPU or a browser where there is none."""
    if number := config.getoption("--promise"):
        others = [item for item in items if number not in promises(item)]
        items[:] = [item for item in items if number in promises(item)]
        config.hook.pytest_deselected(items=others)
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device, and -m gpu"
    if not (shutil.which("chromedriver") and importlib.util.find_spec("selenium")):
        missing["browser"] = "needs selenium, chromedriver and a browser: apt-get install chromium-driver"
    for item in items:
        for mark in missing:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=missing[mark]))
