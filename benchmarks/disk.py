"""How long it takes to bring weights from disk into the shards, against others doing the same, in one run.

    python benchmarks/disk.py --millions 300 --ranks 4 --rounds 3 --json disk.json

launches itself by torchrun; under torchrun it runs as it is.

A Llama lies in a safetensors file that is in the page cache; every rank holds the model on the meta
device; timed from the call until every rank has its shards and has looked at every page of them once.
Contenders take turns within each round, and each starts as a fresh process would, with memory that the
machine has at hand (see prepare.py). Medians are shown. Values are verified on every rank after each run,
and buffers are reported.

- slices: a bare loop over the parameters, `safetensors.get_slice` of this rank's rows, copied into the
  shard. A reference, not a rival.
- broadcast: rank 0 loads the file, then torch's `set_model_state_dict(broadcast_from_rank0=True)`.
- every rank loads: each loads the file and keeps its rows (`set_model_state_dict(full_state_dict=True)`).
- torch reader: `torch.distributed.checkpoint.load` with its `HuggingFaceStorageReader`.
- transformers: `from_pretrained` on a device mesh, which shards while it loads.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from prepare import Reserve, build, config_bytes, config_for, launch, ratio, shard_on_meta, tell, verify
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import LlamaConfig

from composer_dist import FSDP2Config
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.account import peak, reset_peak

CPU = torch.device("cpu")
FILE = "model.safetensors"


def ours(model: nn.Module, directory: Path) -> nn.Module:
    parallelize_model(model, FSDP2Config(), weights=directory)
    return model


def slices(model: nn.Module, directory: Path) -> nn.Module:
    shard_on_meta(model)
    model.to_empty(device="cpu")
    world, rank = dist.get_world_size(), dist.get_rank()
    with safe_open(directory / FILE, "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = -(-parameter.shape[0] // world)
            parameter.to_local().copy_(file.get_slice(name)[rank * rows : (rank + 1) * rows])
    return model


def broadcast(model: nn.Module, directory: Path) -> nn.Module:
    shard_on_meta(model)
    state = load_file(directory / FILE) if dist.get_rank() == 0 else {}
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


def every_rank(model: nn.Module, directory: Path) -> nn.Module:
    shard_on_meta(model)
    state = load_file(directory / FILE)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    return model


def torch_reader(model: nn.Module, directory: Path) -> nn.Module:
    shard_on_meta(model)
    model.to_empty(device="cpu")
    dcp.load(dict(model.named_parameters()), storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    return model


def transformers_loader(model: nn.Module, directory: Path) -> nn.Module:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(
        directory, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
    )


def touch(model: nn.Module) -> None:
    """Look at every page of the shards: transformers leaves them mapped from the file, unread."""
    for parameter in model.parameters():
        parameter.detach().to_local().view(-1)[:: 4096 // parameter.itemsize].sum()


def measure(
    run: Callable[[nn.Module, Path], nn.Module], model: nn.Module, directory: Path, reserve: Reserve
) -> tuple[nn.Module, dict[str, float]]:
    """The loaded model; seconds of the slowest rank, and peak extra memory over all ranks."""
    shard_bytes = sum(p.numel() * p.itemsize for p in model.parameters()) // dist.get_world_size()
    reserve.release()
    reset_peak(CPU)
    before = peak(CPU)
    dist.barrier()
    start = time.perf_counter()
    model = run(model, directory)
    touch(model)
    seconds = time.perf_counter() - start
    numbers = torch.tensor([seconds, float(peak(CPU) - before - shard_bytes)], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return model, {"seconds": numbers[0].item(), "extra": numbers[1].item()}


def main() -> None:
    """Run all contenders in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=300, help="parameters, in millions")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the file is written; a temporary directory")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these alone, as the table names them")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="worlds to launch")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launch(arguments.ranks)
        return
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    dtype, config = getattr(torch, arguments.dtype), config_for(arguments.millions)
    contenders = {
        "composer_dist": ours,
        "slices": slices,
        "broadcast": broadcast,
        "every rank loads": every_rank,
        "torch reader": torch_reader,
        "transformers": transformers_loader,
    }
    figures: dict[str, list[dict[str, float]]] = {}
    buffers: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        directory = Path(shared[0])
        if dist.get_rank() == 0:
            build(config, dtype, real=True).save_pretrained(directory, max_shard_size="100GB")
        small = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})
        expected = {name: buffer.clone() for name, buffer in build(small, dtype, real=True).named_buffers()}
        dist.barrier()
        reserve = Reserve(2 * config_bytes(config, dtype) // dist.get_world_size() + (256 << 20))
        reserve.hold()
        for _ in range(arguments.rounds):
            for name, run in contenders.items():
                if arguments.only and name not in arguments.only:
                    continue
                model = build(config, dtype, real=False)
                try:
                    model, figure = measure(run, model, directory, reserve)
                except Exception as error:
                    if name in figures or run is not transformers_loader:
                        raise
                    buffers[name] = f"{type(error).__name__}: {error}"
                    continue
                figures.setdefault(name, []).append(figure)
                tell(name, figure["seconds"])
                buffers[name] = verify(model, expected)
                del model
                reserve.hold()
        dist.barrier()
    if dist.get_rank() == 0:
        report(figures, buffers, config_bytes(config, dtype), arguments)
    dist.destroy_process_group()


def report(figures, buffers, nbytes: int, arguments: argparse.Namespace) -> None:
    """A table, and JSON if asked."""
    world = dist.get_world_size()
    millions = nbytes / 1e6 / getattr(torch, arguments.dtype).itemsize
    title = f"{millions:.0f} M parameters in {arguments.dtype} ({nbytes / 1e9:.2f} GB), {world} ranks"
    others = "broadcast", "torch reader", "slices"
    columns = [f"x {other}" for other in others]
    table = Table("contender", "seconds", *columns, "extra MiB", "buffers", title=title)
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in figures.items()
    }
    for name, row in median.items():
        table.add_row(
            name,
            f"{row['seconds']:.2f}",
            *(ratio(median, name, other) for other in others),
            f"{row['extra'] / 2**20:.0f}",
            buffers.get(name, ""),
        )
    Console(width=110).print(table)
    for name in buffers.keys() - median.keys():
        print(f"{name} does not run here: {buffers[name]}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"bytes": nbytes, "ranks": world, "median": median}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
