"""How long it takes to plan and shard many modules, and the largest models, against torch alone.

    python benchmarks/scaling.py --rounds 5

- many parameters: 10,000 modules with 50,000 small real parameters, the same on two ranks, in 2,500 units;
  torch's is `fully_shard` alone. "KiB a parameter" is the resident memory that it adds.
- Llama 405B: its construction on meta, plan and sharding as one of 1024 ranks, whose process group is torch's
  "fake" one; torch's is the construction on meta and `fully_shard` of the same units.
"""

import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from llama import shard
from rounds import Figures, play, reduced, timed
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import FSDP2Config
from composer_dist.config.parallelism import resolve_config
from composer_dist.distributed import init_context, parallelize_model
from composer_dist.distributed.mesh.build import mesh_for, mesh_sizes
from composer_dist.distributed.plan.build import build_plan
from composer_dist.distributed.steps import collector_paused, divide
from composer_dist.distributed.wishes import Request
from composer_dist.structure.structure import read_structure


class Leaf(nn.Module):
    """Five small parameters."""

    def __init__(self) -> None:
        super().__init__()
        for key in "abcde":
            setattr(self, key, nn.Parameter(torch.zeros(4, 2)))


class Block(Leaf):
    """A unit of four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Leaf(), Leaf(), Leaf()


class Many(nn.Module):
    """2,500 units, where `llama.shard` finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(2500))})
        self.model.layers = self.model["layers"]


def resident() -> int:
    """Bytes that the process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def many(prepare: Callable[[nn.Module], object], arguments: Namespace) -> Figures:
    model = Many()
    count, before = sum(1 for _ in model.parameters()), resident()
    figures = timed(lambda: prepare(model))
    del figures["extra MiB"]
    return figures | reduced({"KiB a parameter": (resident() - before) / 1024 / count})


CONFIG = LlamaConfig(  # Llama 3.1 405B's shape, by Meta's published configuration
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    vocab_size=128256,
)


def ours() -> None:
    with init_context(dtype=torch.bfloat16):
        model = LlamaForCausalLM(CONFIG)
    config = resolve_config(FSDP2Config())
    mesh = mesh_for(config.mesh)
    with collector_paused():  # as `parallelize_model` does
        structure = read_structure(model)
        plan = build_plan(structure, Request(config=config), mesh_sizes(config.mesh, mesh.size))
        divide(structure, plan, mesh)


def torchs() -> None:
    with torch.device("meta"):
        shard(LlamaForCausalLM(CONFIG).to(torch.bfloat16))


def one_of_1024(prepare: Callable[[], None], arguments: Namespace) -> Figures:
    LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=1024)
    return {"seconds": timed(prepare)["seconds"]}


CONTENDERS = {
    "composer_dist, many parameters": partial(many, lambda model: parallelize_model(model, FSDP2Config())),
    "torch, many parameters": partial(many, shard),
    "composer_dist, Llama 405B": partial(one_of_1024, ours),
    "torch, Llama 405B": partial(one_of_1024, torchs),
}

if __name__ == "__main__":
    rivals = ("torch, many parameters", "torch, Llama 405B")
    play(CONTENDERS, rivals, lambda parser: None, ranks=(2,))
