"""How long it takes to bring weights from disk into the shards, against others doing the same.

    python benchmarks/disk.py --millions 270 --ranks 4 --rounds 5

A Llama lies in a safetensors file that was just written, and so is in the page cache; every rank holds the
model on the meta device; timed from the call until every rank has its shards and has looked at every page of
them. Values are verified on every rank; "wrong buffers" is 1 where the rotary table is left uninitialized.

- slices: a bare loop over the parameters, `safetensors.get_slice` of this rank's rows, copied into the shard.
  A reference, not a rival.
- broadcast: rank 0 loads the file, then torch's `set_model_state_dict(broadcast_from_rank0=True)`.
- every rank loads: each loads the file and keeps its rows (`set_model_state_dict(full_state_dict=True)`).
- torch reader: `torch.distributed.checkpoint.load` with its `HuggingFaceStorageReader`.
- transformers: `from_pretrained` on a device mesh, which shards while it loads.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import llama
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import shard_on_meta
from rounds import Figures, play, timed
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from composer_dist import FSDP2Config
from composer_dist.distributed import parallelize_model

FILE = "model.safetensors"


def load(way: Callable[[nn.Module, Path], nn.Module | None], arguments: argparse.Namespace) -> Figures:
    model = llama.build(arguments, real=False)

    def body() -> None:
        nonlocal model
        model = way(model, arguments.folder) or model
        for parameter in model.parameters():  # transformers leaves pages mapped from the file, unread
            parameter.detach().to_local().view(-1)[:: 4096 // parameter.itemsize].sum()

    figures = timed(body, llama.shard_bytes(model))
    return {**figures, "wrong buffers": llama.verify(model)}


def ours(model: nn.Module, folder: Path) -> None:
    parallelize_model(model, FSDP2Config(), weights=folder / FILE)


@torch.no_grad()
def slices(model: nn.Module, folder: Path) -> None:
    shard_on_meta(model)
    with safe_open(folder / FILE, "pt") as file:
        for name, parameter in model.named_parameters():
            first, last = llama.part(parameter)
            parameter.to_local().copy_(file.get_slice(name)[first:last])


def broadcast(model: nn.Module, folder: Path) -> None:
    shard_on_meta(model)
    state = load_file(folder / FILE) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def every_rank(model: nn.Module, folder: Path) -> None:
    shard_on_meta(model)
    set_model_state_dict(model, load_file(folder / FILE), options=StateDictOptions(full_state_dict=True))


def torch_reader(model: nn.Module, folder: Path) -> None:
    shard_on_meta(model)
    dcp.load(dict(model.named_parameters()), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def transformers(model: nn.Module, folder: Path) -> nn.Module:
    sharded = DistributedConfig(fsdp_size=dist.get_world_size())
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=sharded)


def write(arguments: argparse.Namespace, folder: Path) -> None:
    llama.build(arguments, real=True).save_pretrained(folder, max_shard_size="100GB")


WAYS = {
    "composer_dist": ours,
    "slices": slices,
    "torch reader": torch_reader,
    "broadcast": broadcast,
    "every rank loads": every_rank,
    "transformers": transformers,
}

if __name__ == "__main__":
    contenders = {name: partial(load, way) for name, way in WAYS.items()}
    play(contenders, ("slices", "torch reader", "broadcast"), llama.options, ranks=(4,), stage=write)
