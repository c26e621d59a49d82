"""How long preparation takes and what it costs, against others doing the same, in one run.

    python benchmarks/prepare.py --millions 300 --ranks 2 4 --rounds 3 --json prepare.json

launches itself by torchrun, once for each number of ranks; under torchrun it runs as it is.

*From rank 0*: rank 0 holds a Llama in host memory, the other ranks hold it on the meta device; timed
from the call until every rank has its shards, rotary buffers included where the contender cares for
them. *Meta init*: all ranks hold it on meta. Contenders take turns within each round; medians are
shown. Values are verified on every rank after each run, and buffers are reported.

Each contender starts as a fresh process would: what its process had freed is given back to the kernel.
Between contenders as much memory is kept in use, so that no hypervisor takes it from the machine, for which
the next contender would pay.

- floor: every rank copies its shards' bytes once into freshly allocated memory. No rival; the limit.
- broadcast, scatter: plain loops of `dist.broadcast` and `dist.scatter`, parameter by parameter.
  References, not rivals.
- torch: `fully_shard` on meta, then `set_model_state_dict(broadcast_from_rank0=True)`.
- accelerate: `fully_shard` on meta, then accelerate's own loader for a full state on rank 0. (Its FSDP
  plugin is dropped on CPU, so the loader is called directly.)
- Lightning, torchtune: `fully_shard` on meta, then their own loaders; where they are installed.
- one process: `meta_init` of the same model on rank 0 alone, with as many threads as there are cores.
"""

import argparse
import ctypes
import functools
import gc
import importlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.distributed import init_context, meta_init, parallelize_model
from composer_dist.distributed.account import peak, reset_peak

CPU = torch.device("cpu")


def config_for(millions: float) -> LlamaConfig:
    """A Llama of about that many million parameters: width 1024, as many layers as it takes."""
    width, vocab = 1024, 32000
    per_layer = 4 * width * width + 3 * width * 2816
    layers = max(1, round((millions * 1e6 - 2 * vocab * width) / per_layer))
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=vocab,
        tie_word_embeddings=False,  # most rivals untie it
    )


def expected(name: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements from `start` of parameter `name`: a pattern that every rank can compute."""
    offset = sum(name.encode()) % 97
    return (torch.arange(start, start + numel).remainder_(1009).add_(offset)).to(dtype)


expected_shard = functools.cache(expected)


def build(config: LlamaConfig, dtype: torch.dtype, real: bool) -> nn.Module:
    """The model, on meta or with values by `expected`."""
    if not real:
        with init_context(dtype=dtype):
            return LlamaForCausalLM(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    values, buffers = full_values(config.to_json_string(), dtype)
    model.load_state_dict(values, assign=True)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.clone())
    return model


@functools.cache
def full_values(config: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters by `expected`, and the buffers; made once, because no contender writes to them."""
    settings = json.loads(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    values = {name: expected(name, 0, p.numel(), dtype).view(p.shape) for name, p in model.named_parameters()}
    with init_context(empty=False, dtype=dtype):
        small = LlamaForCausalLM(LlamaConfig(**{**settings, "num_hidden_layers": 1}))
    return values, dict(small.named_buffers())


def verify(model: nn.Module, reference: dict[str, torch.Tensor]) -> str:
    """Every shard's values; raises if one is wrong. Says whether the buffers are right too."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local = parameter.to_local()
        row = prod(parameter.shape[1:])
        size = -(-parameter.shape[0] // dist.get_world_size())
        start = min(dist.get_rank() * size, parameter.shape[0]) * row
        if not torch.equal(local.view(-1), expected_shard(name, start, local.numel(), local.dtype)):
            raise AssertionError(f"rank {dist.get_rank()}: {name} has wrong values")
    buffers = dict(model.named_buffers())
    right = all(not buffers[n].is_meta and torch.equal(buffers[n], b) for n, b in reference.items())
    return "right" if right else "wrong"


def shard_on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """Shard with plain FSDP2, blocks then root; returns the full state that was there before."""
    state = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    model.to("meta")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return state


def ours(transport: str) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(), transport=transport))

    return prepare


def torch_dsd(model: nn.Module) -> None:
    state = shard_on_meta(model)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def accelerate_loader(model: nn.Module) -> None:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    state = shard_on_meta(model)
    main = dist.get_rank() == 0
    stub = SimpleNamespace(is_main_process=main, device=CPU, state=SimpleNamespace(fsdp_plugin=None))
    fsdp2_load_full_state_dict(stub, model, state)


def lightning_loader(model: nn.Module) -> None:
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state

    state = dict(model.state_dict())  # it looks every name up, on all ranks
    shard_on_meta(model)
    model.to_empty(device="cpu")
    _load_raw_module_state(state, model, dist.get_world_size())


def torchtune_loader(model: nn.Module) -> None:
    from torchtune.training import load_from_full_model_state_dict

    state = shard_on_meta(model)
    model.to_empty(device="cpu")
    load_from_full_model_state_dict(model, state, CPU, strict=True)


def scatter(model: nn.Module) -> None:
    state = shard_on_meta(model)
    model.to_empty(device="cpu")
    world = dist.get_world_size()
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        chunks = list(state[name].detach().chunk(world)) if dist.get_rank() == 0 else None
        if parameter.shape[0] % world == 0:
            dist.scatter(local, chunks, src=0)
        else:
            for rank in range(1, world):
                if dist.get_rank() == 0 and rank < len(chunks):
                    dist.send(chunks[rank].contiguous(), rank)
                elif dist.get_rank() == rank and local.numel():
                    dist.recv(local, 0)
            if chunks:
                local.copy_(chunks[0])


def broadcast(model: nn.Module) -> None:
    state = shard_on_meta(model)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        shape, dtype = parameter.shape, parameter.dtype
        full = state[name].detach() if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype)
        dist.broadcast(full, src=0)
        local = parameter.detach().to_local()
        start = dist.get_rank() * -(-parameter.shape[0] // dist.get_world_size())
        local.copy_(full[start : start + local.shape[0]])


def floor(model: nn.Module) -> None:
    world = dist.get_world_size()
    sources = [torch.ones(p.numel() * p.itemsize // world, dtype=torch.uint8) for p in model.parameters()]
    dist.barrier()
    begin = time.perf_counter()  # the sources were there before
    copies = [torch.empty_like(source).copy_(source) for source in sources]
    floor.seconds = time.perf_counter() - begin
    del copies


def one_process(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        meta_init(model)
        torch.set_num_threads(1)


def meta(model: nn.Module) -> None:
    torch.manual_seed(0)
    parallelize_model(model, FSDP2Config())


def loopback() -> int:
    """Bytes that the loopback interface has received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


class Reserve:
    """Memory that the machine has at hand, kept from contender to contender.

    A hypervisor takes free memory back within seconds, and the first touch afterwards costs many times the
    copy into it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: mmap.mmap | None = None

    def hold(self) -> None:
        """Give back what this process has freed, and keep as much from the hypervisor."""
        gc.collect()
        if sys.platform == "linux" and self._memory is None:
            ctypes.CDLL(None).malloc_trim(0)
            self._memory = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            torch.frombuffer(self._memory, dtype=torch.uint8)[:: mmap.PAGESIZE].fill_(1)
        dist.barrier()

    def release(self) -> None:
        """Leave it to the contender, who starts as a fresh process would."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        dist.barrier()


def measure(run: Callable[[nn.Module], None], model: nn.Module, reserve: Reserve) -> dict[str, float]:
    """Seconds of the slowest rank, loopback traffic, and peak extra memory over all ranks."""
    shard_bytes = sum(p.numel() * p.itemsize for p in model.parameters()) // dist.get_world_size()
    gc.collect()
    reserve.release()
    reset_peak(CPU)
    before, traffic = peak(CPU), loopback()
    dist.barrier()
    start = time.perf_counter()
    run(model)
    seconds = getattr(run, "seconds", time.perf_counter() - start)
    numbers = torch.tensor([seconds, float(peak(CPU) - before - shard_bytes)], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return {"seconds": numbers[0].item(), "extra": numbers[1].item(), "traffic": loopback() - traffic}


def tell(name: str, seconds: float) -> None:
    """Say on rank 0 what was measured, as it comes: a run takes minutes."""
    if dist.get_rank() == 0:
        print(f"{time.strftime('%X')}  {seconds:6.2f} s  {name}", file=sys.stderr, flush=True)


def main() -> None:
    """Run all contenders in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=300, help="parameters, in millions")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="worlds to launch")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these alone, as the table names them")
    parser.add_argument("--json", type=Path, help="where to write the figures: NAME-RANKS.json")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launch(arguments.ranks)
        return
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    dtype, config = getattr(torch, arguments.dtype), config_for(arguments.millions)
    from_rank_0 = {
        "composer_dist": ours("auto"),
        "composer_dist, messages": ours("messages"),
        "torch": torch_dsd,
        "broadcast": broadcast,
        "scatter": scatter,
        "floor": floor,
    }
    rivals = {"accelerate": accelerate_loader, "lightning": lightning_loader, "torchtune": torchtune_loader}
    for package, rival in rivals.items():
        try:
            importlib.import_module(package)
        except ImportError as error:
            if dist.get_rank() == 0:
                print(f"without {package}: {str(error).strip().splitlines()[0]}")
        else:
            from_rank_0[package] = rival
    from_meta = {"composer_dist, meta init": meta, "one process, meta init": one_process}
    figures: dict[str, list[dict[str, float]]] = {}
    buffers: dict[str, str] = {}
    small = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})  # has the same buffers
    reference = {name: buffer.clone() for name, buffer in build(small, dtype, real=True).named_buffers()}
    nbytes = config_bytes(config, dtype)
    reserve = Reserve(2 * nbytes // dist.get_world_size() + (256 << 20))
    reserve.hold()
    for _ in range(arguments.rounds):
        for name, run in {**from_rank_0, **from_meta}.items():
            if arguments.only and name not in arguments.only:
                continue
            model = build(config, dtype, real=name in from_rank_0 and dist.get_rank() == 0)
            figures.setdefault(name, []).append(measure(run, model, reserve))
            tell(name, figures[name][-1]["seconds"])
            if name in from_rank_0 and name != "floor":
                buffers[name] = verify(model, reference)
            del model
            reserve.hold()
    if dist.get_rank() == 0:
        report(figures, buffers, nbytes, arguments)
    dist.destroy_process_group()


def launch(worlds: list[int]) -> None:
    """Run this file under torchrun, once for each number of ranks."""
    for ranks in worlds:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run([sys.executable, *launcher, *sys.argv], env=environment, check=True)


def config_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Size of the whole model."""
    return sum(p.numel() for p in build(config, dtype, real=False).parameters()) * dtype.itemsize


def ratio(median, name: str, other: str) -> str:
    """How many times as long as another it took; empty if the other was left out."""
    return f"{median[name]['seconds'] / median[other]['seconds']:.2f}" if other in median else ""


def report(figures, buffers, nbytes: int, arguments: argparse.Namespace) -> None:
    """A table, and JSON if asked."""
    world = dist.get_world_size()
    millions = nbytes / 1e6 / getattr(torch, arguments.dtype).itemsize
    title = f"{millions:.0f} M parameters in {arguments.dtype} ({nbytes / 1e9:.2f} GB), {world} ranks"
    table = Table(
        "contender", "seconds", "x torch", "x floor", "traffic / model", "extra MiB", "buffers", title=title
    )
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in figures.items()
    }
    for name, row in median.items():
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            ratio(median, name, "torch"),
            ratio(median, name, "floor"),
            f"{row['traffic'] / nbytes:.2f}",
            f"{row['extra'] / 2**20:.0f}",
            buffers.get(name, ""),
        )
    Console(width=110).print(table)
    if arguments.json:
        path = arguments.json.with_stem(f"{arguments.json.stem}-{world}")
        path.write_text(json.dumps({"bytes": nbytes, "ranks": world, "median": median}, indent=1))


if __name__ == "__main__":
    main()
