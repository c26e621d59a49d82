"""Plans and preparations as tables."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import Preparation, plan_parallelism
from composer_dist.distributed.plan import text
from composer_dist.wording import human_bytes
from tests.kit import models

pytestmark = pytest.mark.promise(109)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (256 << 20, "256.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_a_plan_prints_alike_units_in_one_row() -> None:
    model = models.B(tied=True, blocks=12)
    model.gain = torch.nn.Parameter(torch.tensor(1.0))
    config = ParallelismConfig(mesh=MeshConfig(dp_replicate=2), activation_checkpointing=True)
    text = str(plan_parallelism(model, config, world_size=8))
    assert "Plan for 8 ranks (dp_replicate 2 x dp_shard 4)" in text
    assert "layers.* (11 units)" in text  # the last one is not freed after forward
    assert "layers.11" in text
    assert "tied: embed.weight = head.weight" in text
    assert "replicated: gain (a scalar has no dimension to shard)" in text
    assert "activations of 12 modules: composable" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_preparation_prints_what_it_did() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    plan = plan_parallelism(models.B(), "fsdp")
    done = Preparation(models.B(), plan, init_device_mesh("cpu", (2,)), bytes_moved=2048, peak_memory=3 << 20)
    assert "initialized" not in str(done)
    done.initialized = ("a", "b", "c", "d")
    done.timings.update(agree=0.25, shard=0.5)
    text = str(done)
    for part in (
        "2 (dp_shard 2)",
        "4: a, b, c and 1 more",
        "2.0 KiB",
        "3.0 MiB resident",
        "0.75 (agree 0.25, shard 0.50)",
    ):
        assert part in text


@pytest.mark.parametrize("columns", [40, 80])
def test_a_table_is_as_wide_as_the_terminal_and_keeps_names_apart(columns: int) -> None:
    names = [f"model.language_model.decoder.layers.blocks.attention.{end}" for end in ("query", "queries")]
    with mock.patch.object(os, "get_terminal_size", return_value=os.terminal_size((columns, 24))):
        shown = text.table("Plan", {"unit": "left", "size": "right"}, [[name, "1.0 MiB"] for name in names])
    assert max(map(len, shown.splitlines())) <= columns
    cells = "".join(line.split("│")[1].strip() for line in shown.splitlines() if "│" in line)
    assert cells == "".join(names)


def test_without_a_terminal_there_are_110_columns() -> None:
    with mock.patch.object(os, "get_terminal_size", side_effect=OSError):
        assert text.width() == 110
