"""Checkpoints of other libraries, in the layouts they write: Fabric, Lightning, Composer, transformers."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composer_dist.checkpoint import full_model_state, load_checkpoint, load_pretrained
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.prepare import parallelize_model
from composer_dist.errors import CheckpointValueError
from composer_dist.files.find import index_weights
from composer_dist.files.other_libraries import model_in
from tests.kit.compare import fails_alike, full
from tests.kit.runs import assert_same, snapshot, start, train
from tests.kit.toy import stateful
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(107)

LIGHTNING = {"epoch", "global_step", "hyper_parameters", "lr_scheduler", "pytorch-lightning_version"}


def lightning(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "epoch": 2,
        "global_step": 1,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model,
        "optimizer_states": [optimizer],
        "lr_schedulers": [{"last_epoch": 4}],
        "hyper_parameters": Namespace(lr=0.1),
    }


def fabric(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "epoch": 2}


def composer(model: Any, optimizer: Any) -> dict[str, Any]:
    state = {"model": model, "optimizers": {"AdamW": optimizer}, "schedulers": {}, "run_name": "r"}
    return {"state": {**state, "timestamp": {"epoch": 2}}, "rng": [{"numpy": ("MT", np.arange(3), 1, 0.5)}]}


@pytest.fixture
def saved(tmp_path: Path, layout: Any) -> Path:
    model, optimizer = trained()
    torch.save(layout(model.state_dict(), optimizer.state_dict()), tmp_path / "other.ckpt")
    return tmp_path / "other.ckpt"


def trained() -> tuple[Any, Any]:
    model, optimizer = start("plain", stateful, 0)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    ("layout", "rest"),
    [(lightning, LIGHTNING), (fabric, {"epoch"}), (composer, {"rng", "run_name", "timestamp"})],
)
@on_ranks(2)
def test_others_files(saved: Path, layout: Any, rest: set[str]) -> None:
    model, optimizer = start("fsdp2", stateful, 1)
    assert set(load_checkpoint(saved, {"model": model, "optimizer": optimizer})) == rest
    assert_same(snapshot(*trained()), snapshot(model, optimizer))


@pytest.mark.parametrize("layout", [lightning])
@on_ranks(2)
def test_as_weights(saved: Path, layout: Any) -> None:
    model = stateful(4)
    parallelize_model(model, FSDP2Config(), weights=saved)
    assert torch.equal(full(model.scale), trained()[0].scale)


def in_two_files(state: dict[str, Any], directory: Path, **places: str) -> Path:
    """As transformers wrote a large model before safetensors; `places` change the index."""
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    home = {name: names[number % 2] for number, name in enumerate(state)}
    for file in names:
        torch.save({name: state[name] for name in state if home[name] == file}, directory / file)
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": home | places}))
    return index


@pytest.mark.parametrize("given", ["directory", "index", "one file"])
@on_ranks(2)
def test_torch_files_of_transformers(tmp_path: Path, given: str) -> None:
    state, directory = trained()[0].state_dict(), tmp_path / str(dist.get_rank())
    directory.mkdir()
    index = in_two_files(state, directory)
    if given == "one file":
        index.unlink()
        torch.save(state, directory / "pytorch_model.bin")
    model = stateful(4)
    parallelize_model(model, FSDP2Config(), weights=index if given == "index" else directory)
    for name, value in full_model_state(model, ranks="all").items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({"c": "pytorch_model-00001-of-00002.bin"}, "puts c in pytorch_model-00001-of-00002.bin, but that f"),
        ({"b": "other.bin"}, "puts b in other.bin, but that file does not exist"),
        ({"b": "../other.bin"}, "puts 'b' outside of its directory"),
    ],
)
def test_wrong_indices_of_torch_files_are_refused(tmp_path: Path, places: Any, text: str) -> None:
    in_two_files({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, **places)
    with pytest.raises(CheckpointValueError, match=text):
        index_weights(tmp_path)


def test_files_without_an_index_are_not_taken_for_the_model(tmp_path: Path) -> None:
    in_two_files({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path).unlink()
    with pytest.raises(CheckpointValueError, match="and save it as safetensors with save_pretrained"):
        index_weights(tmp_path)


@on_ranks(2)
def test_directories_of_torch_have_a_remedy_that_works(tmp_path: Path) -> None:
    state, model = trained()[0].state_dict(), start("fsdp2", stateful, 1)[0]
    directory, file = tmp_path / "dcp", tmp_path / "converted.pt"
    dcp.save({"model": state}, checkpoint_id=directory)
    remedy = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(directory, file), and pass the file"
    with fails_alike(CheckpointValueError, str(directory), remedy):
        load_pretrained(model, directory)
    with fails_alike(CheckpointValueError, str(directory), remedy):
        load_checkpoint(directory, {"model": model})
    if dist.get_rank() == 0:
        dcp_to_torch_save(directory, file)
    dist.barrier()
    load_pretrained(model, file)
    assert torch.equal(full(model.scale), state["scale"])


@on_ranks(2)
def test_pickled_modules_have_a_remedy_that_works(tmp_path: Path) -> None:
    model, file = start("fsdp2", stateful, 1)[0], tmp_path / f"{dist.get_rank()}.pt"
    torch.save(trained()[0], file)
    text = (
        "torch.load(..., weights_only=False), and save a state_dict() alone with torch.save; or pass allow_p"
    )
    with fails_alike(CheckpointValueError, "0.pt holds objects that could run code", text):
        load_pretrained(model, tmp_path / "0.pt")
    with fails_alike(CheckpointValueError, "a Stateful, not a mapping", "and save a state_dict() with torch"):
        load_checkpoint(tmp_path / "0.pt", {"model": model}, allow_pickle=True)
    torch.save(torch.load(file, weights_only=False).state_dict(), file)
    dist.barrier()
    load_pretrained(model, tmp_path / "0.pt")
    assert torch.equal(full(model.scale), trained()[0].scale)


STATE = {"a.weight": torch.ones(2), "a._extra_state": {"amax": torch.ones(1)}}
OTHER = {"mean": torch.zeros(3)}


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (STATE, STATE),
        ({"model": STATE, "best_loss": torch.ones(())}, STATE),
        ({"state_dict": STATE, "best_loss": torch.ones(()), "epoch": 3}, STATE),
        ({"model": STATE, "normalization": OTHER, "best_loss": torch.ones(())}, STATE),
        ({"generator": STATE, "discriminator": OTHER}, None),
        ({"model": torch.ones(2)}, {"model": torch.ones(2)}),
        ({"epoch": 3}, None),
        ([STATE], None),
    ],
)
def test_the_model_in_a_file(contents: Any, found: Any) -> None:
    assert repr(model_in(contents)) == repr(found)
