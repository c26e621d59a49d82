"""torchao's optimizers hold their state in 8 or 4 bits, quantized by each rank for its own part."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from tests.kit.world import World, on_ranks

pytest.importorskip("torchao.optim", reason="low-bit optimizers are torchao's; it is an extra")
pytestmark = pytest.mark.promise(46)
CONFIG = ParallelismConfig(fsdp2=FSDP2Config())


def uncompiled() -> Any:
    """Inside, their steps run as written: compiling each of them for a test takes a minute."""
    return mock.patch.object(torch, "compile", lambda step, **options: step)


def model_of(seed: int = 0) -> nn.Sequential:
    """Of the 31 rows, the first of two ranks quantizes its 16, and the other leaves its 15 as they are."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 31))


def optimizer_of(name: str, model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, name)(model.parameters(), lr=lr)
    return made


def classes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    held = {name: local_part(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    return {name: type(local).__name__ for name, local in held.items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AdamW8bit", "OptimState8bit"), ("AdamW4bit", "OptimState4bit"), ("AdamWFp8", "OptimStateFp8")],
)
@on_ranks(2)
def test_low_bit_state_is_gathered_as_floats_and_quantized_again_alike(name: str, kind: str) -> None:
    with uncompiled(), messages(20_000):
        model = model_of()
        parallelize_model(model, CONFIG)
        optimizer = optimizer_of(name, model)
        train_by_name(model, optimizer, 0, 2)
        found = classes(model, optimizer)
        assert (found["0.weight"], found["1.weight"]) == (kind, "Tensor" if dist.get_rank() else kind)
        state = full_optimizer_state(model, optimizer)
        if dist.get_rank():
            assert state == {}
        else:
            moment = state["state"]["0.weight"]["exp_avg"]
            assert (type(moment), moment.dtype) == (Tensor, torch.float32)
            assert moment.abs().sum() > 0
        fresh = optimizer_of(name, model, lr=0.5)
        load_full_optimizer_state(model, fresh, state)
        assert classes(model, fresh) == found
        equal(full_optimizer_state(model, fresh), state)
        start, ends = [p.detach().clone() for p in model.parameters()], []
        for one in (optimizer, fresh):
            with torch.no_grad():
                for p, value in zip(model.parameters(), start, strict=True):
                    p.copy_(value)
            train_by_name(model, one, 2, 1)
            ends.append(full_model_state(model))
        equal(*ends)


@on_ranks(2)
def test_the_state_dict_of_one_device_is_understood() -> None:
    model, prepared = model_of(), model_of()
    optimizer, other = (optimizer_of("AdamW8bit", model, lr=lr) for lr in (0.01, 0.5))
    with uncompiled():
        train_by_name(model, optimizer, 0, 2)
    expected = optimizer.state[model[0].weight]["exp_avg"]
    assert type(expected).__name__ == "OptimState8bit"
    parallelize_model(prepared, CONFIG)
    fresh = optimizer_of("AdamW8bit", prepared)
    load_full_optimizer_state(prepared, fresh, full_optimizer_state(model, optimizer))
    found = full_optimizer_state(prepared, fresh)
    if found:
        assert torch.equal(found["state"]["0.weight"]["exp_avg"], expected.dequantize()), "blocks are of rows"
    load_full_optimizer_state(model, other, optimizer.state_dict())
    equal(full_optimizer_state(model, other), full_optimizer_state(model, optimizer))


@on_ranks(2)
def test_preparation_after_a_step_is_refused_by_name() -> None:
    model = model_of()
    optimizer = optimizer_of("AdamW8bit", model)
    with uncompiled():
        train_by_name(model, optimizer, 0, 1)
    text = "state 'exp_avg' of 0.weight: a OptimState8bit is quantized as a whole; prepare"
    with pytest.raises(ParallelismValueError, match=text):
        parallelize_model(model, CONFIG, optimizer)


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


def saved_or_loaded(
    path: Path, name: str, dtype: torch.dtype, save: str = "", parallel: bool = True
) -> dict[str, Any]:
    """What a run holds that saves, `sharded` or in one file, or that loads; and where its next step ends."""
    with uncompiled():
        model = model_of(seed=0 if save else 1).to(dtype)
        if parallel:
            parallelize_model(model, CONFIG)
        optimizer = optimizer_of(name, model, lr=0.01 if save else 0.5)
        state = {"model": model, "optimizer": optimizer}
        if not save:
            load_checkpoint(path, state)
        else:
            if dtype == torch.float32:
                train_by_name(model, optimizer, 0, 2)
            else:
                begin(model, optimizer)
            save_checkpoint(path, state, sharded=save == "sharded")
        found = {"bits": bits(model, optimizer), "state": full_optimizer_state(model, optimizer)}
        if dtype == torch.float32:
            train_by_name(model, optimizer, 2, 1)
        return found | {"end": full_model_state(model)}


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [
        ("AdamW8bit", torch.bfloat16, "sharded"),
        ("AdamW4bit", torch.float32, "one file"),
        pytest.param("AdamW8bit", torch.float32, "sharded", marks=pytest.mark.slow),
        pytest.param("AdamW8bit", torch.bfloat16, "one file", marks=pytest.mark.slow),
        pytest.param("AdamW4bit", torch.float32, "sharded", marks=pytest.mark.slow),
        pytest.param("AdamWFp8", torch.float32, "sharded", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_checkpoints_bring_back_the_bits(tmp_path: Path, name: str, dtype: torch.dtype, form: str) -> None:
    saved = saved_or_loaded(tmp_path / "c", name, dtype, form)
    loaded = saved_or_loaded(tmp_path / "c", name, dtype)
    equal(loaded["bits"], saved["bits"])
    equal(loaded["end"], saved["end"])
    if loaded["state"]:
        assert float(loaded["state"]["param_groups"][0]["lr"]) == pytest.approx(0.01), "lr is a tensor"


def test_checkpoints_of_low_bit_states_go_onto_other_numbers_of_ranks(
    world2: World, world4: World, tmp_path: Path
) -> None:
    run = (tmp_path / "c", "AdamW8bit", torch.float32)
    saved = world2(saved_or_loaded, *run, "sharded")[0]["state"]["state"]
    four = world4(saved_or_loaded, *run)[0]["state"]["state"]
    equal(four, saved)  # blocks lie within rows; what is quantized no more keeps its values
    one = saved_or_loaded(*run, parallel=False)["state"]["state"]
    for key in ("exp_avg", "exp_avg_sq"):
        equal(one["0.weight"][key], saved["0.weight"][key])
        equal(one["1.weight"][key][:16], saved["1.weight"][key][:16])
        found, expected = one["1.weight"][key][16:], saved["1.weight"][key][16:]
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()  # 8 bits
