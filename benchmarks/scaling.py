"""How planning and sharding grow with the number of blocks, in one process that plays one rank of many.

    python benchmarks/scaling.py

No memory is allocated for weights: the model is on the meta device and the process group is torch's
"fake" one. The last line is Llama 405B on 1024 ranks.
"""

import resource
import time
import warnings

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import FSDP2Config
from composer_dist.config.parallelism import resolve_config
from composer_dist.distributed import init_context
from composer_dist.distributed.mesh.build import mesh_for, mesh_sizes
from composer_dist.distributed.plan.build import build_plan
from composer_dist.distributed.steps import divide
from composer_dist.distributed.wishes import Request
from composer_dist.structure.structure import read_structure


class Block(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)


def blocks(count: int) -> nn.Module:
    """A list of blocks between an embedding and a head."""
    with init_context():
        return nn.ModuleDict(
            {
                "embed": nn.Embedding(100, 64),
                "layers": nn.ModuleList(Block() for _ in range(count)),
                "head": nn.Linear(64, 100),
            }
        )


class Whole(nn.Module):
    """A root that can be called, around what `blocks` makes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = blocks(count)


def llama_405b() -> nn.Module:
    """Llama 3.1 405B's shape (Meta's published configuration)."""
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with init_context(dtype=torch.bfloat16):
        return LlamaForCausalLM(config)


def seconds_for(model: nn.Module) -> tuple[float, float]:
    """Seconds to plan, and to shard on meta."""
    config = resolve_config(FSDP2Config())
    mesh = mesh_for(config.mesh)
    start = time.perf_counter()
    structure = read_structure(model)
    plan = build_plan(structure, Request(config=config), mesh_sizes(config.mesh, mesh.size))
    planned = time.perf_counter()
    divide(structure, plan, mesh)
    return planned - start, time.perf_counter() - planned


def main() -> None:
    """Time 10 to 4000 blocks on 8 ranks, then Llama 405B on 1024."""
    warnings.simplefilter("ignore")
    table = Table("model", "ranks", "plan s", "shard s", "together", "x tenth as many")
    dist.init_process_group("fake", rank=0, world_size=8)
    seconds_for(Whole(2))
    totals: dict[int, float] = {}
    for count in (10, 40, 100, 400, 1000, 4000):
        plan, sharding = seconds_for(Whole(count))
        totals[count] = plan + sharding
        ratio = f"{totals[count] / totals[count // 10]:.1f}" if count // 10 in totals else ""
        table.add_row(f"{count} blocks", "8", f"{plan:.2f}", f"{sharding:.2f}", f"{totals[count]:.2f}", ratio)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1024)
    plan, sharding = seconds_for(llama_405b())
    table.add_row("Llama 405B", "1024", f"{plan:.2f}", f"{sharding:.2f}", f"{plan + sharding:.2f}", "")
    dist.destroy_process_group()
    Console(width=90).print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"Peak resident memory of this process: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
