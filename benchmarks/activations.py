"""What the ways to keep fewer activations save and cost, in one run.

    python benchmarks/activations.py --layers 4 --rounds 3

A Llama on one process and device; every way trains from the same weights on the same batch, in turns.
Memory is what the process holds between forward and backward beyond what it held before (resident on a CPU,
allocated on a GPU); the time is that of forward and backward, medians, without the first round, which
compiles. Every way's loss is verified against the first one's.
"""

import argparse
import ctypes
import gc
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rounds import add_device, choose_device, now
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import ParallelismConfig
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.ranks import process_group

WAYS: dict[str, dict[str, Any]] = {
    "everything kept": {},
    "every second block": {"activation_checkpointing": ("composable", {"every": 2})},
    "selective": {"activation_checkpointing": "selective"},
    "every block": {"activation_checkpointing": "composable"},
    "offload": {"activation_checkpointing": "offload"},
    "compile": {"compile": True},
    "compile, selective": {"compile": True, "activation_checkpointing": "selective"},
    "compile, budget 0.5": {"compile": True, "activation_checkpointing": ("memory_budget", {"budget": 0.5})},
    "compile, every block": {"compile": True, "activation_checkpointing": "composable"},
}


def build(layers: int, hidden: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **heads, **sizes)).to(device)


def held(device: torch.device) -> int:
    """Bytes that the process holds now, with what is free given back to the system."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def step(model: nn.Module, tokens: torch.Tensor) -> tuple[float, int, float]:
    """Seconds of forward and backward, bytes held in between, the loss."""
    model.zero_grad()
    before, start = held(tokens.device), now()
    loss = model(input_ids=tokens, labels=tokens).loss
    forward = now() - start
    kept, start = held(tokens.device) - before, now()
    loss.backward()
    return forward + now() - start, kept, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in {"layers": 4, "hidden": 512, "rows": 4, "length": 512, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    add_device(parser)
    args = parser.parse_args()
    choose_device(parser, args.device)
    process_group.init(reuse=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(512, (args.rows, args.length), device=device)
    models = {}
    for way, config in WAYS.items():
        models[way] = build(args.layers, args.hidden, device)
        parallelize_model(models[way], ParallelismConfig(**config))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    kept: dict[str, int] = {}
    for round_ in range(args.rounds + 1):
        losses = {}
        for way, model in models.items():
            spent, kept[way], losses[way] = step(model, tokens)
            if round_:
                seconds[way].append(spent)
        first = next(iter(losses.values()))
        assert all(abs(loss - first) < 1e-3 for loss in losses.values()), losses
    table = Table("way", "kept", "x everything", "seconds", "x everything")
    base, memory = statistics.median(seconds["everything kept"]), kept["everything kept"]
    for way in WAYS:
        median = statistics.median(seconds[way])
        table.add_row(
            way,
            f"{kept[way] / 2**20:.0f} MiB",
            f"{kept[way] / memory:.2f}",
            f"{median:.2f}",
            f"{median / base:.2f}",
        )
    Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
