"""Single-file checkpoints of Lightning Fabric, PyTorch Lightning and Composer, in the layouts they write."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer_dist.checkpoint import load_checkpoint
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed.prepare import parallelize_model
from tests.kit.compare import full
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
