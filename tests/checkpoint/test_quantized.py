"""Quantized base weights (QLoRA) in checkpoints: their bits, onto any number of ranks; and exported."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from composer_dist.checkpoint import (
    export_pretrained,
    full_model_state,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_model, prepare_fully_shard
from composer_dist.distributed.moving.gather import gather
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from composer_dist.tensors.inner import dense, inner_tensors
from tests.kit.compare import same
from tests.kit.grids import slow
from tests.kit.quantized import NF4, Stack, adam, nf4_llama, quantize
from tests.kit.toy import built
from tests.kit.world import World

BASES = [f"layers.{number}.base.weight" for number in range(2)]


def stack(kind: str, seed: int, width: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(kind, width)


def bits(model: nn.Module) -> dict[str, Tensor]:
    """All that the quantized weights are made of, in full."""
    return {
        f"{name}.{part}": gather(inner)
        for name in BASES
        for part, inner in inner_tensors(model.get_parameter(name)).items()
    }


def save(path: str, kind: str) -> dict[str, Tensor]:
    model = stack(kind, 0)
    optimizer = adam(model)
    parallelize_model(model, FSDP2Config(), optimizer)
    model(torch.arange(6)).logsumexp(-1).mean().backward()
    optimizer.step()
    save_checkpoint(path, {"model": model, "optimizer": optimizer})
    return bits(model) | full_model_state(model, ranks="all")


def load(path: str, kind: str, start: str) -> dict[str, Tensor]:
    model = built(lambda: Stack(kind), 1, "meta" if start == "meta" else "cpu")
    if start == "meta":
        prepare_fully_shard(model, FSDP2Config())
        load_checkpoint(path, {"model": model})
    else:
        optimizer = adam(model)
        if start == "fsdp":
            parallelize_model(model, FSDP2Config(), optimizer)
        load_checkpoint(path, {"model": model, "optimizer": optimizer})
        moments = optimizer.state[model.get_parameter("layers.0.down.weight")]
        assert moments["step"] == 1
    with torch.no_grad():
        model(torch.arange(6))
    return bits(model) | full_model_state(model, ranks="all")


@pytest.mark.promise(46)
@pytest.mark.parametrize("kind", [slow("int8"), pytest.param("nf4", marks=NF4)])
def test_a_checkpoint_holds_the_quantized_bits(
    world1: World, world2: World, world4: World, tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "c")
    expected = world2(save, path, kind)[0]
    loads = [(world, start) for world in (world1, world2, world4) for start in ("fsdp", "meta")]
    found = [one for world, start in loads for one in world(load, path, kind, start)]
    for state in [*found, load(path, kind, "plain")]:
        same(state, expected)


@pytest.mark.promise(46)
def test_what_is_made_of_other_parts_is_refused_by_name(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("c", "torn", "dense")}
    model, plain = stack("int8", 1), stack("int8", 0)
    save_checkpoint(paths["c"], {"model": plain})
    save_checkpoint(paths["torn"], {"model": plain}, filter=lambda name, _: "scales" not in name)
    wide = r"weight\.data8 is \(8, 8\) in the checkpoint, \(16, 16\) in the model"
    with pytest.raises(CheckpointValueError, match=wide):
        load_checkpoint(paths["c"], {"model": stack("int8", 0, width=16)})
    with pytest.raises(CheckpointValueError, match=r"parts of layers\.0.*Read it with load_checkpoint"):
        load_pretrained(model, paths["c"])
    for strict in (True, False):
        with pytest.raises(CheckpointValueError, match=r"base\.weight\.scales is not in the .*, but other"):
            load_checkpoint(paths["torn"], {"model": model}, strict=strict)
    for name in BASES:
        layer = plain.get_submodule(name.removesuffix(".weight"))
        layer.weight = nn.Parameter(dense(layer.weight).clone(), requires_grad=False)
    with pytest.raises(CheckpointKeyError, match=r"missing: .*weight.*unexpected: .*weight\.data8"):
        load_checkpoint(paths["c"], {"model": plain})
    save_checkpoint(paths["dense"], {"model": plain})
    load_checkpoint(paths["dense"], {"model": model})
    for name in BASES:
        expected = dense(quantize(plain.get_parameter(name).detach(), "int8"))
        assert torch.equal(dense(model.get_parameter(name)), expected)


def export(path: Path) -> None:
    warnings.simplefilter("ignore")
    model = nf4_llama()
    parallelize_model(model, FSDP2Config())
    export_pretrained(model, path)


@pytest.mark.promise(96)
@NF4
def test_nf4_is_exported_dense(world2: World, tmp_path: Path) -> None:
    world2(export, tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    model = nf4_llama()
    same(loaded.state_dict(), {n: dense(v) for n, v in model.state_dict(keep_vars=True).items()})
    ids = torch.arange(8)[None]
    with torch.no_grad():
        found, expected = (one(input_ids=ids).logits for one in (loaded.eval(), model))
    torch.testing.assert_close(found, expected)
