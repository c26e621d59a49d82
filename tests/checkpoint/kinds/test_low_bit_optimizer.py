"""torchao's optimizers hold their state in 8 or 4 bits, quantized by each rank for its own part."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint import (
    full_model_state,
    full_optimizer_state,
    load_checkpoint,
    load_full_optimizer_state,
    save_checkpoint,
)
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_model
from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.inner import inner_tensors, local_part
from composer_dist.tensors.torchao import quantize
from tests.kit.compare import equal
from tests.kit.measure import messages
from tests.kit.runs import train_by_name
from tests.kit.world import World

pytest.importorskip("torchao.optim", reason="low-bit optimizers are torchao's; it is an extra")
CONFIG = ParallelismConfig(fsdp2=FSDP2Config())


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, their steps run as written: compiling each of them for a test takes a minute."""
    with mock.patch.object(torch, "compile", lambda step, **options: step):
        yield


def model_of(seed: int = 0) -> nn.Sequential:
    """Of the 31 rows, the first of two ranks quantizes its 16, and the other leaves its 15 as they are."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 31))


def optimizer_of(name: str, model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, name)(model.parameters(), lr=lr)
    return made


def classes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {
        name: type(local.to_local() if isinstance(local, DTensor) else local).__name__
        for name, p in model.named_parameters()
        for local in [optimizer.state[p]["exp_avg"]]
    }


def goes_on(name: str) -> dict[str, Any]:
    with uncompiled(), messages(20_000):
        model = model_of()
        parallelize_model(model, CONFIG)
        optimizer = optimizer_of(name, model)
        train_by_name(model, optimizer, 0, 2)
        state = full_optimizer_state(model, optimizer)
        before = classes(model, optimizer)
        fresh = optimizer_of(name, model, lr=0.5)
        load_full_optimizer_state(model, fresh, state)
        assert classes(model, fresh) == before
        again = full_optimizer_state(model, fresh)
        start = [p.detach().clone() for p in model.parameters()]
        ends = []
        for one in (optimizer, fresh):
            with torch.no_grad():
                for p, value in zip(model.parameters(), start, strict=True):
                    p.copy_(value)
            train_by_name(model, one, 2, 1)
            ends.append(full_model_state(model))
        return {"state": state, "again": again, "classes": before, "ends": ends}


@pytest.mark.promise(46)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_state_is_gathered_as_floats_and_quantized_again_alike(world2: World, name: str) -> None:
    first, second = world2(goes_on, name)
    kind = {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}[name]
    assert first["classes"]["0.weight"] == second["classes"]["0.weight"] == kind
    assert (first["classes"]["1.weight"], second["classes"]["1.weight"]) == (kind, "Tensor")
    assert second["state"] == {}
    moments = first["state"]["state"]["0.weight"]
    assert (type(moments["exp_avg"]), moments["exp_avg"].dtype) == (Tensor, torch.float32)
    assert moments["exp_avg"].abs().sum() > 0
    equal(first["again"], first["state"])
    equal(first["ends"][1], first["ends"][0])


def from_one_device(given: dict[str, Any]) -> dict[str, Any]:
    model = model_of()
    parallelize_model(model, CONFIG)
    optimizer = optimizer_of("AdamW8bit", model)
    load_full_optimizer_state(model, optimizer, given)
    return full_optimizer_state(model, optimizer)


@pytest.mark.promise(46)
def test_the_state_dict_of_one_device_is_understood(world2: World) -> None:
    model = model_of()
    optimizer = optimizer_of("AdamW8bit", model)
    with uncompiled():
        train_by_name(model, optimizer, 0, 2)
    expected = optimizer.state[model[0].weight]["exp_avg"]
    assert type(expected).__name__ == "OptimState8bit"
    found = world2(from_one_device, full_optimizer_state(model, optimizer))[0]
    assert torch.equal(found["state"]["0.weight"]["exp_avg"], expected.dequantize()), "blocks are of rows"
    other = optimizer_of("AdamW8bit", model, lr=0.5)
    load_full_optimizer_state(model, other, optimizer.state_dict())
    equal(full_optimizer_state(model, other), full_optimizer_state(model, optimizer))


def prepared_too_late() -> str:
    model = model_of()
    optimizer = optimizer_of("AdamW8bit", model)
    with uncompiled():
        train_by_name(model, optimizer, 0, 1)
    with pytest.raises(ParallelismValueError) as caught:
        parallelize_model(model, CONFIG, optimizer)
    return str(caught.value)


def test_preparation_after_a_step_is_refused_by_name(world2: World) -> None:
    for text in world2(prepared_too_late):
        assert "state 'exp_avg' of 0.weight: a OptimState8bit is quantized as a whole; prepare" in text


@pytest.mark.promise(46)
@pytest.mark.parametrize("signed", [True, False])
def test_what_was_quantized_once_keeps_its_bits(signed: bool) -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((64, 256), signed)
    values = torch.randn(64, 256) * torch.rand(64, 1) * 1e-3
    values[0] = 0
    state.copy_(values if signed else values.square())
    codes, scale = quantize(state.dequantize().view(64, 256), state.qmap)
    assert torch.equal(codes, state.codes)
    assert torch.equal((state.qmap[codes.int()] * scale[:, None]), state.dequantize())


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank's state is made of."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            local = local_part(value)
            inner = {n: v.view(torch.uint8).clone() for n, v in inner_tensors(local).items()}
            found[f"{name} {key}"] = inner or local.clone()
    return found


def begin(model: nn.Module, optimizer: Any) -> None:
    """State as after some steps, which torchao's optimizers take of bfloat16 only when compiled."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        held = {key: optimizer._new_buffer(parameter, key == "exp_avg") for key in ("exp_avg", "exp_avg_sq")}
        for buffer in held.values():
            local_part(buffer).copy_(torch.rand(local_part(buffer).shape, generator=generator))
        optimizer.state[parameter] = {"step": torch.tensor(2.0), **held}


def save(path: str, name: str, dtype: torch.dtype, sharded: bool) -> dict[str, Any]:
    with uncompiled():
        model = model_of().to(dtype)
        parallelize_model(model, CONFIG)
        optimizer = optimizer_of(name, model)
        if dtype == torch.float32:
            train_by_name(model, optimizer, 0, 2)
        else:
            begin(model, optimizer)
        save_checkpoint(path, {"model": model, "optimizer": optimizer}, sharded=sharded)
        found = {"bits": bits(model, optimizer), "state": full_optimizer_state(model, optimizer)}
        if dtype == torch.float32:
            train_by_name(model, optimizer, 2, 1)
        return found | {"end": full_model_state(model)}


def load(path: str, name: str, dtype: torch.dtype, parallel: bool = True) -> dict[str, Any]:
    with uncompiled():
        model = model_of(seed=1).to(dtype)
        if parallel:
            parallelize_model(model, CONFIG)
        optimizer = optimizer_of(name, model, lr=0.5)
        load_checkpoint(path, {"model": model, "optimizer": optimizer})
        found = {"bits": bits(model, optimizer), "state": full_optimizer_state(model, optimizer)}
        if dtype == torch.float32:
            train_by_name(model, optimizer, 2, 1)
        return found | {"end": full_model_state(model)}


@pytest.mark.promise(46)
@pytest.mark.parametrize(
    ("name", "dtype", "sharded"),
    [
        ("AdamW8bit", torch.bfloat16, True),
        ("AdamW4bit", torch.float32, False),
        pytest.param("AdamW8bit", torch.float32, True, marks=pytest.mark.slow),
        pytest.param("AdamW8bit", torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param("AdamW4bit", torch.float32, True, marks=pytest.mark.slow),
        pytest.param("AdamWFp8", torch.float32, True, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_bring_back_the_bits(
    world2: World, tmp_path: Path, name: str, dtype: torch.dtype, sharded: bool
) -> None:
    path = str(tmp_path / "c")
    saved, loaded = world2(save, path, name, dtype, sharded), world2(load, path, name, dtype)
    for before, after in zip(saved, loaded, strict=True):
        equal(after["bits"], before["bits"])
        equal(after["end"], before["end"])
    assert float(loaded[0]["state"]["param_groups"][0]["lr"]) == pytest.approx(0.01), "lr is a tensor"


@pytest.mark.promise(46)
def test_checkpoints_of_low_bit_states_go_onto_other_numbers_of_ranks(
    world2: World, world4: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    saved = world2(save, path, "AdamW8bit", torch.float32, True)[0]["state"]["state"]
    four = world4(load, path, "AdamW8bit", torch.float32)[0]["state"]["state"]
    equal(four, saved)  # blocks lie within rows; what is quantized no more keeps its values
    one = load(path, "AdamW8bit", torch.float32, parallel=False)["state"]["state"]
    for key in ("exp_avg", "exp_avg_sq"):
        equal(one["0.weight"][key], saved["0.weight"][key])
        equal(one["1.weight"][key][:16], saved["1.weight"][key][:16])
        found, expected = one["1.weight"][key][16:], saved["1.weight"][key][16:]
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()  # 8 bits
