"""Ranks that were started by themselves: Python orders a set of strings differently in each of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.grids import slow
from tests.kit.ports import reserved_port


@pytest.mark.promise(113)
@pytest.mark.parametrize("pretrained", [False, slow(True)])
def test_no_collective_follows_the_order_of_a_set(tmp_path: Path, pretrained: bool) -> None:
    """The other tests' ranks are forked from one process, whose hash seed they share."""
    with reserved_port() as port:
        world = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.kit.scripts.hashed", str(tmp_path), str(pretrained)],
                cwd=Path(__file__).parents[2],
                env=world | {"PYTHONHASHSEED": str(rank), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        ends = [(*rank.communicate(), rank.returncode) for rank in ranks]
    assert [status for *_, status in ends] == [0, 0], "".join(errors for _, errors, _ in ends)
    assert len({printed for printed, *_ in ends}) == 1
