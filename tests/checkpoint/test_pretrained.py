"""`load_pretrained`: files into models that are there already, prepared or not, real or not."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import DDPConfig, FSDP2Config
from composer_dist.checkpoint import LoadResult, export_pretrained, full_model_state, load_pretrained
from composer_dist.distributed import parallelize_model, prepare_fully_shard
from composer_dist.distributed.weights import disk as pretrained
from composer_dist.errors import (
    CheckpointKeyError,
    CheckpointRuntimeError,
    CheckpointValueError,
    ParallelismRuntimeError,
    ParallelismValueError,
)
from composer_dist.files.read import Files
from tests.kit.compare import same, values
from tests.kit.files import saved
from tests.kit.huggingface import llama, lora, random
from tests.kit.meshes import config
from tests.kit.toy import Toy, built, tokens, train
from tests.kit.world import run


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_a_prepared_model_takes_the_files_values_in_place(tmp_path: Path, ranks: int, replicas: int) -> None:
    run(in_place, ranks, saved(built(seed=3), tmp_path), replicas)


def in_place(path: Path, replicas: int) -> None:
    pretrained._SMALL = 64
    model, reference = built(seed=1), built(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, config(replicas=replicas), optimizer)
    train(model, optimizer, 1)
    before = dict(model.named_parameters())
    places = [parameter.data_ptr() for parameter in before.values() if not isinstance(parameter, DTensor)]
    assert load_pretrained(model, path) == LoadResult([], [])
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in before.items())
    assert places == [p.data_ptr() for p in model.parameters() if not isinstance(p, DTensor)]
    same(values(model), values(reference))
    train(model, optimizer)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), whole=True)
    for name, value in values(reference).items():
        torch.testing.assert_close(values(model)[name], value, rtol=1e-5, atol=1e-6)


class Turned(nn.Module):
    """A parameter and a buffer whose elements do not lie in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("table", torch.randn(4, 6)[:, ::2])


def test_models_that_are_not_sharded(tmp_path: Path) -> None:
    (tmp_path / "turned").mkdir()
    paths = [saved(built(seed=3), tmp_path), saved(built(Turned, seed=3), tmp_path / "turned")]
    for ranks in (1, 2):
        run(not_sharded, ranks, *paths)
    model = built(seed=1)  # and without a process group
    load_pretrained(model, paths[0])
    same(values(model), values(built(seed=3)))


def not_sharded(path: Path, turned: Path) -> None:
    pretrained._SMALL = 64
    for device in ("cpu", "meta"):
        model = built(seed=1, device=device)
        load_pretrained(model, path)
        same(values(model), values(built(seed=3)))
    model = built(Turned, seed=1)
    places = [tensor.data_ptr() for tensor in (model.weight, model.table)]
    load_pretrained(model, turned)
    assert places == [tensor.data_ptr() for tensor in (model.weight, model.table)]
    same(values(model), values(built(Turned, seed=3)))
    if dist.get_world_size() > 1:
        model = built(seed=1)
        parallelize_model(model, DDPConfig())
        load_pretrained(model, path)
        same(values(model), values(built(seed=3)))
        with pytest.raises(ParallelismValueError, match="different structure"):
            load_pretrained(nn.Linear(2, 2 + dist.get_rank()), path)


def test_sharded_on_meta_and_what_the_files_lack_is_initialized(tmp_path: Path) -> None:
    lacking: dict[str, Any] = {"layers.1.up.weight": None, "shift": None}
    run(sharded_on_meta, 2, saved(built(seed=3), tmp_path, **lacking, other=torch.ones(2)))


def sharded_on_meta(path: Path) -> None:
    model = built(device="meta")
    prepare_fully_shard(model, FSDP2Config())
    with pytest.raises(CheckpointKeyError, match="missing: shift, layers.1.up.weight. unexpected: other"):
        load_pretrained(model, path)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(4)
    result = load_pretrained(model, path, strict=False)
    assert result == LoadResult(["shift", "layers.1.up.weight"], ["other"])
    found, expected = values(model), values(built(seed=3))
    lacking = {"layers.1.up.weight", "shift"}
    same({n: found[n] for n in found.keys() - lacking}, {n: expected[n] for n in found.keys() - lacking})
    assert all(found[name].std() > 0 for name in lacking)
    load_pretrained(model, path, strict=False)  # now they keep their values
    same(values(model), found)


def test_what_we_export_comes_back(tmp_path: Path) -> None:
    run(comes_back, 2, tmp_path)


def comes_back(directory: Path) -> None:
    warnings.simplefilter("ignore")
    for name, make in {"llama": llama, "lora": lambda: lora(llama(), modules_to_save=["lm_head"])}.items():
        model, other = random(make()), random(make(), 2)
        for one in (model, other):
            parallelize_model(one, config())
        export_pretrained(model, directory / name, max_shard_size="5KB")
        before = full_model_state(other, ranks="all")
        assert load_pretrained(other, directory / name) == LoadResult([], [])
        found, expected = (full_model_state(one, ranks="all") for one in (other, model))
        if name == "lora":
            base = {
                key: value for key, value in before.items() if "lora_" not in key and ".default." not in key
            }
            expected |= base
        same(found, expected)


def test_files_that_fail_leave_the_model_as_it_was_or_marked(tmp_path: Path) -> None:
    run(failing, 2, saved(built(seed=3), tmp_path), tmp_path)


def failing(path: Path, directory: Path) -> None:
    model = built(seed=1)
    parallelize_model(model, config())
    before = values(model)
    broken = directory / f"broken{dist.get_rank()}.safetensors"
    broken.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointValueError, match="broken0.safetensors is corrupt or truncated"):
        load_pretrained(model, broken)
    save_file({"row": torch.zeros(2, 8)}, broken)
    with pytest.raises(
        CheckpointValueError, match=r"row is \(2, 8\) in the checkpoint, \(1, 8\) in the model"
    ):
        load_pretrained(model, directory / "broken0.safetensors", strict=False)
    same(values(model), before)
    model(tokens())
    read = Files.read

    def fail(self: Files, *arguments: Any) -> None:
        if dist.get_rank() == 1:
            raise CheckpointRuntimeError("the disk is gone")
        read(self, *arguments)

    Files.read = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointRuntimeError, match="Rank 1: the disk is gone"):
            load_pretrained(model, path)
    finally:
        Files.read = read  # type: ignore[method-assign]
    with pytest.raises(ParallelismRuntimeError, match="unusable.*the disk is gone"):
        model(tokens())
    assert isinstance(model, Toy)
