"""Strategies by name: ours, Lightning's, the user's own."""

from typing import Any

import pytest
import torch
import yaml

from composer_dist import Trainer
from composer_dist.config import parallelism as strategies
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import plan_parallelism, register_strategy
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from tests.kit import models
from tests.kit.training import tagger

pytestmark = pytest.mark.promise(102)
LIGHTNING = [
    name + suffix
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
    for suffix in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
]


@pytest.fixture(autouse=True)
def same_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what a test registers."""
    monkeypatch.setattr(strategies, "_strategies", dict(strategies._strategies))


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_s_names_mean_ddp(name: str) -> None:
    ddp = DDPConfig(find_unused_parameters=name.endswith("_true"))
    assert resolve_config(name) == ParallelismConfig(mesh=MeshConfig(dp_replicate=-1, dp_shard=1), ddp=ddp)


def test_each_name_is_the_right_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    sizes = {name: resolve_config(name).mesh.resolve(8) for name in ("fsdp", "hsdp", "tp", "ddp")}  # type: ignore[union-attr]
    assert all(list(size) == ["dp_replicate", "dp_shard", "cp", "tp"] for size in sizes.values())
    found = {name: tuple(size.values()) for name, size in sizes.items()}
    assert found == {"fsdp": (1, 8, 1, 1), "hsdp": (2, 4, 1, 1), "tp": (1, 2, 1, 4), "ddp": (8, 1, 1, 1)}
    assert resolve_config("fsdp").fsdp2 == resolve_config("hsdp").fsdp2 == FSDP2Config()
    assert resolve_config("tp").tp == TPConfig()


def test_a_strategy_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(ParallelismValueError) as caught:
        resolve_config("hdsp")
    assert str(caught.value) == (
        f"There is no strategy 'hdsp'; valid names: {', '.join(sorted([*LIGHTNING, 'fsdp', 'hsdp', 'tp']))}."
        " Did you mean 'hsdp'?"
    )


def test_users_register_their_own() -> None:
    mine = ParallelismConfig(mesh=MeshConfig(), fsdp2=FSDP2Config(reshard_after_forward=False), sync="rank0")
    register_strategy("mine", mine)
    register_strategy("also", lambda: "mine")
    register_strategy("dict", {"fsdp2": {"reshard_after_forward": False}, "sync": "rank0"})
    for name in ("mine", "also", "dict"):
        assert resolve_config(name) == mine
    assert plan_parallelism(models.B(), "mine", world_size=2).delivery.sync == "rank0"
    with pytest.raises(ParallelismValueError, match="strategy 'mine' already; pass replace=True"):
        register_strategy("mine", "fsdp")
    register_strategy("mine", "fsdp", replace=True)
    assert resolve_config("also") == resolve_config("fsdp")


def test_what_is_no_configuration_is_not_registered() -> None:
    with pytest.raises(ParallelismTypeError, match="not int"):
        register_strategy("mine", 3)
    with pytest.raises(ParallelismValueError, match="no strategy 'mine'"):
        resolve_config("mine")
    register_strategy("itself", lambda: "itself")
    with pytest.raises(ParallelismValueError, match="strategy 'itself' refers to itself"):
        resolve_config("itself")


@pytest.mark.parametrize("text", ["mine", "{strategy: mine}", "{strategy: fsdp, sync: rank0}"])
def test_in_yaml_and_through_the_trainer(text: str) -> None:
    register_strategy("mine", ParallelismConfig(fsdp2=FSDP2Config(), sync="rank0"))
    given: Any = yaml.safe_load(text)
    model = tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(
        model=model, max_duration="1ba", parallelism_config=given, optimizers=optimizer, progress_bar=False
    )
    assert trainer.preparation is not None
    assert trainer.preparation.plan.delivery.sync == "rank0"


def test_yaml_changes_a_named_strategy() -> None:
    found = ParallelismConfig.from_dict({"strategy": "fsdp", "mesh": {"dp_replicate": 2}})
    assert found == ParallelismConfig(mesh=MeshConfig(dp_replicate=2), fsdp2=FSDP2Config())
    with pytest.raises(ParallelismValueError, match="no strategy 'fdsp'"):
        ParallelismConfig.from_dict({"strategy": "fdsp"})
