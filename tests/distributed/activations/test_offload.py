"""Activation offloading: what is saved goes to the host and comes back, parameters stay."""

import copy
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from composer_dist import ParallelismConfig, Rule, _torch
from composer_dist.distributed.activations import offload as activation_offload
from composer_dist.distributed.activations import recompute as activation_checkpointing
from composer_dist.distributed.activations.options import ac_mode
from composer_dist.distributed.activations.recompute import checkpoint_modules
from composer_dist.errors import ParallelismRuntimeError
from tests.kit import compare, models
from tests.kit.planning import BLOCKS, Dropping, checkpointed, dropping_gradients, ids
from tests.kit.world import on_ranks


def count_packed(value: Any) -> tuple[int, int]:
    """How many activations of two blocks pass through the host, out and back."""
    model, _ = checkpointed(value, BLOCKS[:2])
    packed, unpacked = [], []
    pack, unpack = activation_offload.to_host, activation_offload.unpack

    def packing(tensor: torch.Tensor, kept: set[int], *options: Any) -> Any:
        if _torch.storage_key(tensor) not in kept:
            packed.append(tensor)
        return pack(tensor, kept, *options)

    def unpacking(item: Any) -> torch.Tensor:
        unpacked.append(item)
        return unpack(item)

    with (
        mock.patch.object(activation_offload, "to_host", packing),
        mock.patch.object(activation_offload, "unpack", unpacking),
    ):
        dropping_gradients(model)
    return len(packed), len(unpacked)


@pytest.mark.promise(86)
def test_offload_sees_every_saved_tensor_and_both_only_the_inputs() -> None:
    offloaded, restored = count_packed("offload")
    assert offloaded >= 2 * 6  # input, tanh, two linears, GELU, dropout's mask
    assert restored >= offloaded
    assert count_packed(("composable", {"offload": True}))[0] == 2
    assert count_packed(("wrapped", {"offload": True}))[0] == 2
    assert count_packed("composable") == (0, 0)


@pytest.mark.promise(86)
def test_saved_tensors_are_copied_to_the_host_but_parameters_are_not() -> None:
    source = torch.randn(3, 4).t()
    with mock.patch("torch.Tensor.device", torch.device("cuda")):  # a stand-in for another device
        packed = activation_offload.to_host(source, set(), False)
        kept = activation_offload.to_host(source, {_torch.storage_key(source)}, False)
    copied = packed.tensor
    assert packed.home == torch.device("cuda")
    assert copied.device.type == "cpu"
    assert copied.stride() == source.stride()
    assert copied.data_ptr() != source.data_ptr()
    assert torch.equal(copied, source)
    assert kept.tensor is source


@pytest.mark.promise(86)
def test_a_saved_tensor_changed_in_place_is_noticed() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y.sin()
            y.add_(1)
            return z

    model = nn.Sequential(InPlace())
    checkpoint_modules(model, ["0"], "offload", {})
    output = model(torch.ones(2, requires_grad=True))
    with pytest.raises(ParallelismRuntimeError, match=r"shape \(2,\) .* changed in place"):
        output.sum().backward()


@pytest.mark.promise(86)
@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("value", ["offload", "composable", "wrapped"])
def test_offload_frees_device_memory(value: str, pin_memory: bool) -> None:
    block = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(4)))
    plain, model = copy.deepcopy(block).cuda(), block.cuda()
    options = {} if value == "offload" else {"offload": True}
    names = [str(index) for index in range(4)]
    checkpoint_modules(model, names, value, {**options, "pin_memory": pin_memory})
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    held = {}
    for name, each in (("plain", plain), ("model", model)):
        before = torch.cuda.memory_allocated()
        output = each(x)
        held[name] = torch.cuda.memory_allocated() - before
        output.sum().backward()
        del output
    assert held["model"] <= x.nbytes + (1 << 20)
    assert held["plain"] >= 4 * x.nbytes
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.promise(86)
@pytest.mark.parametrize("mode", ["composable", "wrapped", "offload"])
def test_nothing_else_keeps_what_was_offloaded(mode: Any) -> None:
    """The host is the meta device here: values are lost, and the blocks' inputs are gone after a forward."""
    model = Dropping()
    checkpoint_modules(model, BLOCKS, mode, {} if mode == "offload" else {"offload": True}, host="meta")
    given: list[Any] = []
    for name in BLOCKS:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args: given.append(weakref.ref(args[0].untyped_storage()))
        )
    output = model(ids())
    assert output.requires_grad
    assert [one() for one in given[1:]] == [None] * (len(BLOCKS) - 1)


@pytest.mark.promise(86)
def test_what_selective_checkpointing_keeps_lies_on_the_host_too() -> None:
    model, plain = checkpointed(("selective", {"offload": True}))
    kept: list[torch.Size] = []
    to_host = activation_offload.to_host

    def packing(tensor: torch.Tensor, kept_storages: Any = (), **options: Any) -> Any:
        kept.append(tensor.shape)
        return to_host(tensor, options.get("kept", kept_storages), options["pin_memory"])

    with mock.patch.object(activation_checkpointing, "to_host", packing):
        chosen = ac_mode(("selective", {"offload": True}))
        assert chosen is not None
        checkpoint_modules(plain, BLOCKS, *chosen)
        found = dropping_gradients(plain)
    for name, value in dropping_gradients(model).items():
        assert torch.equal(value, found[name])
    assert Counter(kept) == {torch.Size([20, 8]): 6, torch.Size([20, 16]): 3}  # three products per block


@pytest.mark.promise(29)
@on_ranks(2)
def test_parameters_and_activations_are_offloaded_by_rule() -> None:
    """Parameters and activations of one block each way; the training is the same."""
    rules = [
        Rule("layers.0", offload=True, act_ckpt="offload"),
        Rule("layers.1", act_ckpt=("selective", {"offload": True})),
        Rule("layers.2", offload=True, act_ckpt="composable"),
    ]
    done = compare.assert_same_training(models.B, ParallelismConfig(rules=rules))
    modes = {one.module: one.mode for one in done.plan.checkpointing}
    assert modes == {"layers.0": "offload", "layers.1": "composable", "layers.2": "composable"}
    offloads = [unit.offload for unit in done.plan.units if unit.name in BLOCKS]
    assert offloads == ["pageable", None, "pageable"]
    layers: Any = done.model.layers
    for layer, offload in zip(layers, offloads, strict=True):
        assert all(param.offload_to_cpu == bool(offload) for param in _torch.fsdp_params(layer))
