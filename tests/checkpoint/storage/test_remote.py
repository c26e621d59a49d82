"""Checkpoints at URLs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_dist.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from composer_dist.errors import CheckpointError
from tests.kit.runs import assert_same, load_run, save_run
from tests.kit.toy import stateful


def test_in_memory() -> None:
    import fsspec

    before = save_run("memory://runs/a", "plain")
    assert_same(load_run("memory://runs/a", "plain"), before)
    model = stateful(2)
    for name in ("b", "c", "c"):
        save_checkpoint(f"memory://runs/{name}", {"model": model, "name": name}, keep=2)
    assert latest_checkpoint("memory://runs") == "memory:///runs/c"
    system = fsspec.filesystem("memory")
    assert sorted(one["name"] for one in system.ls("/runs")) == ["/runs/b", "/runs/c"]
    files = [name for name in system.ls("/runs/c", detail=False) if name.endswith(".distcp")]
    assert len(files) == 1, "the first save's file is gone"
    data = bytearray(system.cat_file(files[0]))
    data[1000] ^= 1
    system.pipe_file(files[0], bytes(data))
    with pytest.raises(CheckpointError, match="distcp is corrupt"):
        load_checkpoint("memory://runs/c", {"model": model})
    with pytest.warns(UserWarning, match="Skipping memory:///runs/c: "):
        assert latest_checkpoint("memory://runs") == "memory:///runs/b"
    system.rm("/runs", recursive=True)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_file_url_is_a_path(tmp_path: Path, sharded: bool) -> None:
    state: dict[str, Any] = {"model": stateful(), "x": torch.ones(2)}
    save_checkpoint(f"file://{tmp_path}/c", state, sharded=sharded)
    assert (tmp_path / "c").is_dir() == sharded
    assert list(load_checkpoint(f"file://{tmp_path}/c")) == ["model", "x"]


def test_a_single_file_at_a_url_is_refused() -> None:
    with pytest.raises(CheckpointError, match="memory://one/file is a URL, from which a single file cannot"):
        save_checkpoint("memory://one/file", {"model": stateful()}, sharded=False)


def test_an_unknown_protocol() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        save_checkpoint("nowhere://x", {"model": stateful()})
