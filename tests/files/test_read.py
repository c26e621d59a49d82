"""Reads: every part of every layout arrives, cast and rearranged, with as few bytes as can be."""

import itertools
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files import read as reading
from composer_dist.files import slabs as slab_work
from composer_dist.files.index import Index
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.safetensors import read_index
from composer_dist.files.same import fingerprints, identities
from composer_dist.files.slabs import Slab, plan_reads
from composer_dist.progress import Stage
from composer_dist.tensors.blueprint import Blueprint
from tests.kit.meshes import expected_part, layouts

NUMBERS = torch.arange(4 * 6 * 12).remainder(113)


def write(path: Path, **tensors: torch.Tensor) -> Index:
    save_file({name: value.clone() for name, value in tensors.items()}, path)
    return read_index(path)


def read(index: Index, slabs: list[Slab], **options: Any) -> int:
    with Files(Path(index.root), index.files) as files:
        return read_slabs(slabs, files, **options)


def target(layout: Layout, at: Coordinate, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(layout.local_shape(at), -1, dtype=dtype)


@pytest.fixture(params=itertools.product([16, 1 << 20], [1, 512]), ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large stages, and reads of their own for few or many bytes."""
    stage, worth = request.param
    for module in (reading, slab_work):
        monkeypatch.setattr(module, "STAGE_BYTES", stage)
        monkeypatch.setattr(module, "BATCH_BYTES", 64)
    monkeypatch.setattr(reading, "_WORTH", worth)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_any_layout(tmp_path: Path, sizes: None, stored: torch.dtype) -> None:
    values = {str(one.shape): NUMBERS[: torch.Size(one.shape).numel()].view(one.shape) for one in layouts()}
    index = write(tmp_path / "all.safetensors", **{name: value.to(stored) for name, value in values.items()})
    slabs, targets = [], []
    for layout in layouts():
        entry = index.entries[str(layout.shape)]
        blueprint = Blueprint.stored(str(layout.shape), entry.shape, entry.dtype)
        for shard, tp in ((0, 0), (1, 0), (0, 1), (2, 1)):
            at = Coordinate(shard, 3, tp, 2)
            local = target(layout, at, torch.float32)
            part = layout.part(at)
            slabs += plan_reads(blueprint, index.entries, part, local.view(-1), 0, part.numel // 2)
            slabs += plan_reads(blueprint, index.entries, part, local.view(-1), part.numel // 2)
            targets.append((layout, at, local))
    counted = Stage("reading")
    read(index, slabs, stage=counted)
    for layout, at, local in targets:
        assert torch.equal(local, expected_part(values[str(layout.shape)].float(), layout, at)), (layout, at)
    assert counted.done == counted.total == sum(local.numel() for *_, local in targets) * stored.itemsize


def test_rearranged_tensors(tmp_path: Path, sizes: None) -> None:
    values = {name: torch.randn(6, 8, dtype=torch.float64) for name in "abcd"}
    index = write(tmp_path / "all.safetensors", **values)
    made = {name: Blueprint.stored(name, (6, 8), torch.float64) for name in "abcd"}

    def rearranged(given: dict[str, Any]) -> dict[str, Any]:
        a, b, c, d = given.values()
        stacked = torch.stack([torch.cat([a, b]), torch.cat([c, d])])
        return {
            "experts": stacked,
            "turned": stacked.transpose(1, 2).contiguous(),
            "rope": a.reshape(3, 2, 8).transpose(0, 1).reshape(6, 8),
            "piece": torch.chunk(b, 3, dim=1)[1].contiguous(),
        }

    slabs, targets = [], []
    for (name, blueprint), value in zip(rearranged(made).items(), rearranged(values).values(), strict=True):
        for layout in (Layout(tuple(value.shape), True), Layout(tuple(value.shape), True, value.ndim - 1)):
            for shard in range(3):
                at = Coordinate(shard, 3, 1, 2)
                local = target(layout, at, torch.float32)
                slabs += plan_reads(blueprint, index.entries, layout.part(at), local.view(-1))
                targets.append((name, local, expected_part(value.float(), layout, at)))
    read(index, slabs, threads=3)
    for name, local, wanted in targets:
        assert torch.equal(local, wanted), name


def test_a_part_costs_its_bytes_and_what_is_adjacent_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write(tmp_path / "all.safetensors", **{str(i): torch.randn(64, 256) for i in range(8)})
    calls = []
    before = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: calls.append(arguments) or before(*arguments))
    whole = {name: torch.empty(64, 256) for name in index.entries}
    for layout, count in ((Layout((64, 256)), 1), (Layout((64, 256), rows=True), 8)):
        calls.clear()
        slabs, nbytes = [], 0
        for name, entry in index.entries.items():
            blueprint, part = Blueprint.stored(name, entry.shape, entry.dtype), layout.part(Coordinate(1, 4))
            slabs += plan_reads(blueprint, index.entries, part, whole[name].view(-1)[: part.numel])
            nbytes += part.numel * 4
        assert read(index, slabs) == nbytes
        assert len(calls) == count
    columns = Layout((64, 256), tp_dim=1)
    part = columns.part(Coordinate(tp=1, tps=2))
    local = torch.empty(64, 128)
    blueprint = Blueprint.stored("0", (64, 256), torch.float32)
    assert read(index, list(plan_reads(blueprint, index.entries, part, local.view(-1)))) == local.nbytes


def test_files_that_are_not_what_they_were_are_refused(tmp_path: Path) -> None:
    index = write(tmp_path / "all.safetensors", a=torch.randn(64))
    local = torch.zeros(64)
    blueprint, part = Blueprint.stored("a", (64,), torch.float32), Layout((64,)).part(Coordinate())
    slabs = list(plan_reads(blueprint, index.entries, part, local))
    with Files(tmp_path, index.files) as files:
        os.truncate(tmp_path / "all.safetensors", index.entries["a"].offset + 100)
        with pytest.raises(CheckpointRuntimeError, match=r"all.safetensors was truncated while it was read"):
            read_slabs(slabs, files)
    with pytest.raises(CheckpointValueError, match="has .* bytes, but .* are expected"):
        Files(tmp_path, index.files)
    os.unlink(tmp_path / "all.safetensors")
    with pytest.raises(CheckpointRuntimeError, match=r"Cannot read .*all.safetensors: No such file"):
        Files(tmp_path, index.files)


def test_a_cast_of_a_file_that_ends_too_early_is_an_error_in_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write(tmp_path / "all.safetensors", a=torch.randn(64))
    buffers = SimpleQueue[torch.Tensor]()
    monkeypatch.setattr(slab_work, "SimpleQueue", lambda: buffers)
    blueprint, part = Blueprint.stored("a", (64,), torch.float32), Layout((64,)).part(Coordinate())
    slabs = list(plan_reads(blueprint, index.entries, part, torch.zeros(64, dtype=torch.bfloat16)))
    with Files(tmp_path, index.files) as files:
        os.truncate(tmp_path / "all.safetensors", index.entries["a"].offset + 100)
        with pytest.raises(CheckpointRuntimeError, match=r"all.safetensors was truncated while it was read"):
            read_slabs(slabs, files)
    assert buffers.qsize() == slab_work.THREADS  # others wait for them before they fail


@contextmanager
def most_files(more: int) -> Iterator[None]:
    """This process may open so many files beside those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    places = {f"{number:03}": f"{number:03}.safetensors" for number in range(300)}
    for name, file in places.items():
        save_file({name: torch.full((9,), float(name))}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    index, whole, slabs = read_index(tmp_path), Layout((9,)), []
    targets = {name: torch.zeros(9) for name in places}
    for name, local in targets.items():
        blueprint = Blueprint.stored(name, (9,), torch.float32)
        slabs += plan_reads(blueprint, index.entries, whole.part(Coordinate()), local)
    before = len(os.listdir("/proc/self/fd"))
    with most_files(140), Files(tmp_path, index.files) as files:
        assert read_slabs(slabs, files) == 300 * 36
        assert read_slabs(slabs[:5] + slabs[-5:], files) == 10 * 36
        assert len(set(identities(files))) == len(set(fingerprints(files))) == 300
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(torch.equal(local, torch.full((9,), float(name))) for name, local in targets.items())
