"""The Llama that the benchmarks prepare, whose values every rank can check."""

import argparse
from math import prod

import torch
import torch.distributed as dist
from rounds import device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist.distributed import init_context


def options(parser: argparse.ArgumentParser, millions: float = 270) -> None:
    """Which one."""
    parser.add_argument("--millions", type=float, default=millions, help="parameters, in millions")
    parser.add_argument("--width", type=int, default=1024, help="of a block; TinyLlama's 1.1 B have 2048")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])


def build(arguments: argparse.Namespace, real: bool) -> nn.Module:
    """About that many million parameters; real with values by `expected`, or on meta."""
    width, vocab = arguments.width, 32000
    inner = width * 11 // 4
    per_layer = 4 * width * width + 3 * width * inner
    layers = max(1, round((arguments.millions * 1e6 - 2 * vocab * width) / per_layer))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=vocab,
        tie_word_embeddings=False,  # most rivals untie it
    )
    dtype = getattr(torch, arguments.dtype)
    with init_context(dtype=dtype):
        model = LlamaForCausalLM(config)
    if real:
        values = {name: expected(name, 0, p.numel(), dtype) for name, p in model.named_parameters()}
        shaped = {name: values[name].view(p.shape) for name, p in model.named_parameters()}
        model.load_state_dict(shaped, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def expected(name: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements from `start` of parameter `name`."""
    return torch.arange(start, start + numel).remainder_(1009).add_(sum(name.encode()) % 97).to(dtype)


def shard_bytes(model: nn.Module) -> int:
    """Size of a rank's part of a model's parameters."""
    return sum(p.numel() * p.itemsize for p in model.parameters()) // dist.get_world_size()


def part(parameter: nn.Parameter) -> tuple[int, int]:
    """This rank's rows of a parameter: first and last."""
    step = -(-parameter.shape[0] // dist.get_world_size())
    return min(dist.get_rank() * step, parameter.shape[0]), min(
        (dist.get_rank() + 1) * step, parameter.shape[0]
    )


def verify(model: nn.Module) -> float:
    """Raise if a value of a shard is wrong; 1.0 if a buffer is wrong as well, which most rivals leave so."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local, start = parameter.detach().to_local().cpu(), part(parameter)[0] * prod(parameter.shape[1:])
        if not torch.equal(local.reshape(-1), expected(name, start, local.numel(), local.dtype)):
            raise AssertionError(f"rank {dist.get_rank()}: {name} has wrong values")
    rotary = model.model.rotary_emb
    right = type(rotary)(model.config).inv_freq
    return float(rotary.inv_freq.is_meta or not torch.equal(rotary.inv_freq.cpu(), right))


def shard(model: nn.Module) -> nn.Module:
    """Plain FSDP2: blocks, then root."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Plain FSDP2, with memory; returns the full state that was there before."""
    state = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    shard(model.to("meta")).to_empty(device=device())
    return state
