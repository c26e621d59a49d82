"""Whatever happens to a checkpoint's bytes is noticed, and the one before it loads."""

import multiprocessing
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import (
    full_model_state,
    latest_checkpoint,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.errors import CheckpointError, CheckpointRuntimeError
from composer_dist.files import checked as checked_file
from composer_dist.files.find import index_weights
from tests.kit.compare import equal, fails_alike
from tests.kit.runs import save_run
from tests.kit.toy import stateful
from tests.kit.world import PRELOAD, World, on_ranks

pytestmark = pytest.mark.promise(107)


def is_refused(path: Path) -> str | None:
    """Why a plain process does not load it, None if it does."""
    try:
        load_checkpoint(path, {"model": stateful(1)})
    except CheckpointError as error:
        return str(error)
    return None


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def flip(file: Path, bit: int) -> None:
    file.write_bytes(flipped(file.read_bytes(), bit))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("flips", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_every_truncation_and_every_flipped_bit_is_noticed(
    world2: World, tmp_path: Path, sharded: bool, flips: int
) -> None:
    path = tmp_path / "c"
    world2(save_run, str(path), "fsdp2", sharded=sharded)
    files = sorted(path.iterdir()) if sharded else [path]
    draw = random.Random(0)
    assert is_refused(path) is None
    for file in files:
        whole = file.read_bytes()
        cuts = [0, 1, len(whole) - 1, len(whole) - 2, len(whole) // 2]
        cuts += [draw.randrange(len(whole)) for _ in range(5 if flips > 20 else 0)]
        damages = [whole[:cut] for cut in cuts]
        for _ in range(flips if flips > 20 else -(-flips // len(files))):
            damages.append(flipped(whole, draw.randrange(8 * len(whole))))
        for number, damaged_bytes in enumerate(damages):
            file.write_bytes(damaged_bytes)
            why = is_refused(path)
            assert why is not None, f"{file.name}, damage {number}"
            assert path.name in why
        file.write_bytes(whole)
        file.rename(tmp_path / "away")
        assert is_refused(path) is not None, f"{file.name} is gone"
        (tmp_path / "away").rename(file)
    assert is_refused(path) is None


@pytest.mark.parametrize("sharded", [True, False])
@on_ranks(2)
def test_a_flipped_bit_is_noticed_by_who_reads_weights(tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "c"
    save_run(str(path), "fsdp2", sharded=sharded)
    index, _ = index_weights(path)
    entry = next(one for name, one in index.entries.items() if name.startswith("layers.0.up.weight"))
    file = path / index.files[entry.file][0] if sharded else path
    dist.barrier()
    if dist.get_rank() == 0:
        flip(file, 8 * (entry.offset + 5) + 3)
    dist.barrier()
    model = stateful(1)
    with fails_alike(CheckpointError, str(file), "is corrupt"):
        parallelize_model(model, FSDP2Config(), weights=path)
    assert all(not isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing changed"
    parallelize_model(model, FSDP2Config())
    before = full_model_state(model, ranks="all")
    with fails_alike(CheckpointError, str(file), "is corrupt"):
        load_pretrained(model, path)
    equal(full_model_state(model, ranks="all"), before)
    load_pretrained(model, path, verify=False)


@on_ranks(2)
def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for number in range(3):
        save_run(f"{tmp_path}/{number}", "fsdp2")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "2")
    data = next((tmp_path / "2").glob("__1_*"))
    dist.barrier()
    if dist.get_rank() == 0:
        flip(data, 4 * data.stat().st_size + 2)
        (tmp_path / "1" / "checkpoint.json").unlink()
        (tmp_path / "latest").symlink_to(tmp_path / "2")
    dist.barrier()
    with pytest.warns(UserWarning, match=data.name) as caught:
        assert latest_checkpoint(tmp_path) == str(tmp_path / "0")
    assert len(caught) == 1


def save_for_ever(directory: str, number: int) -> None:
    """Every value is the checkpoint's number; every other one replaces the one before."""
    while True:
        number += 1
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        path = f"{directory}/same" if number % 2 else f"{directory}/{number}"
        state = {"model": model, "number": number}
        pending = save_checkpoint(path, state, keep=3, asynchronous=number % 3 == 0)
        if pending is not None:
            pending.wait()


@pytest.mark.promise(59)
@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    draw = random.Random(1)
    number = 0
    for _ in range(kills):
        context = multiprocessing.get_context("forkserver")  # the workers' server, which has torch
        context.set_forkserver_preload(PRELOAD)
        victim = context.Process(target=save_for_ever, args=(str(tmp_path), number))
        victim.start()
        while latest_checkpoint(tmp_path, verify=False) is None:
            assert victim.is_alive()
        victim.join(0.1 + draw.random() * 0.5)  # the moment is what is drawn
        assert victim.is_alive()
        victim.kill()
        victim.join()
        victim.close()
        path = latest_checkpoint(tmp_path)
        assert path is not None
        contents = load_checkpoint(path)
        assert contents["number"] >= number
        number = contents["number"]
        assert all(torch.all(value == number) for value in contents["model"].values())
    save_checkpoint(tmp_path / "same", {"model": stateful(), "number": 0})
    assert not list(tmp_path.glob(".same.*")), "what the killed ones left under this name is gone"


def test_a_directory_that_somebody_else_removes_meanwhile_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRuntimeError, match="another process saves to the same place"):
        checked_file.LocalSink(tmp_path / "removed" / "__0_0.distcp")
