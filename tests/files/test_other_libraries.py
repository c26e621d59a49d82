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
from tests.kit.runs import Snapshot, assert_same, snapshot, start, train
from tests.kit.toy import stateful
from tests.kit.world import World


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


def load_into(path: str) -> tuple[Snapshot, list[str]]:
    model, optimizer = start("fsdp2", stateful, 1)
    rest = load_checkpoint(path, {"model": model, "optimizer": optimizer})
    return snapshot(model, optimizer), sorted(rest)


REST = {
    lightning: ["epoch", "global_step", "hyper_parameters", "lr_scheduler", "pytorch-lightning_version"],
    fabric: ["epoch"],
    composer: ["rng", "run_name", "timestamp"],
}


@pytest.mark.parametrize("layout", [lightning, fabric, composer])
def test_others_files(world2: World, tmp_path: Path, layout: Any) -> None:
    model, optimizer = start("plain", stateful, 0)
    train(model, optimizer)
    torch.save(layout(model.state_dict(), optimizer.state_dict()), tmp_path / "other.ckpt")
    for after, rest in world2(load_into, str(tmp_path / "other.ckpt")):
        assert rest == REST[layout]
        assert_same(snapshot(model, optimizer), after)


def as_weights(path: str) -> torch.Tensor:
    model = stateful(4)
    parallelize_model(model, FSDP2Config(), weights=path)
    return model.scale.full_tensor()  # type: ignore[attr-defined,no-any-return]


def test_as_weights(world2: World, tmp_path: Path) -> None:
    model, optimizer = start("plain", stateful, 0)
    torch.save(lightning(model.state_dict(), optimizer.state_dict()), tmp_path / "other.ckpt")
    for scale in world2(as_weights, str(tmp_path / "other.ckpt")):
        assert torch.equal(scale, model.scale)
