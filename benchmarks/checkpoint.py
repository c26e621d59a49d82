"""How long it takes to save and load a checkpoint, against others doing the same, in one run.

    python benchmarks/checkpoint.py --millions 100 --ranks 2 4 --rounds 3 --json checkpoint.json

launches itself by torchrun; under torchrun it runs as it is.

A Llama under FSDP2 and its AdamW state lie in memory; contenders take turns within each round. Timed from
the call until the slowest rank returns, with everything on the disk: our files are synced, and so are those
of torch.distributed.checkpoint, as by its default. Medians are shown. What ours loads is compared with what
was saved, on every rank, after each round. "blocked" is how long training waits for an asynchronous save;
the first one makes the buffers and is shown apart.

- dcp: `torch.distributed.checkpoint.save` and `load` of the sharded state dicts, without checksums.
- accelerate: its own functions for sharded FSDP2 states, called directly, because it drops its FSDP plugin
  on CPU; where it is installed.
- state_dict: `get_model_state_dict` and `get_optimizer_state_dict` in full on rank 0, then `torch.save`,
  which does not sync.
- adapters: the state of LoRA alone, out of a sharded model of the same size; the traffic is what counts.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from prepare import build, config_bytes, config_for, launch, loopback, ratio, tell
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from composer_dist import FSDP2Config
from composer_dist.checkpoint import export_pretrained, full_model_state, load_checkpoint, save_checkpoint
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.account import peak, reset_peak

CPU = torch.device("cpu")
State = dict[str, Any]


def sharded_states(state: State) -> dict[str, Any]:
    model, optimizer = state["model"], state["optimizer"]
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def ours(state: State, path: Path) -> None:
    save_checkpoint(path, state)


def ours_full(state: State, path: Path) -> None:
    save_checkpoint(path, state, sharded=False)


def plain_dcp(state: State, path: Path) -> None:
    dcp.save(sharded_states(state), checkpoint_id=path)


def one_process(state: State, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = state["model"], state["optimizer"]
    full = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if dist.get_rank() == 0:
        torch.save(full, path)
    dist.barrier()


def accelerate_save(state: State, path: Path) -> None:
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import StateDictType

    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
    )
    process = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    fsdp_utils.save_fsdp_model(plugin, process, state["model"], str(path))
    fsdp_utils.save_fsdp_optimizer(plugin, process, state["optimizer"], state["model"], str(path))


def adapter_traffic(config: Any) -> tuple[int, int]:
    """Bytes of the loopback interface for a LoRA model's adapters, and bytes of its base."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(config, torch.float32, real=False), LoraConfig(target_modules="all-linear"))
    parallelize_model(model, FSDP2Config())
    base = sum(p.numel() * p.itemsize for name, p in model.named_parameters() if "lora_" not in name)
    dist.barrier()
    before = loopback()
    full_model_state(model, select="adapters")
    dist.barrier()
    return loopback() - before, base


def export(state: State, path: Path) -> None:
    export_pretrained(state["model"], path)


SAVES: dict[str, Callable[[State, Path], None]] = {
    "composer_dist": ours,
    "dcp": plain_dcp,
    **({"accelerate": accelerate_save} if importlib.util.find_spec("accelerate") else {}),
    "composer_dist, one file": ours_full,
    "state_dict": one_process,
    "composer_dist, export (no optimizer)": export,
}


def timed(body: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Seconds of the slowest rank, and peak extra memory over all ranks."""
    reset_peak(CPU)
    before = peak(CPU)
    dist.barrier()
    start = time.perf_counter()
    result = body()
    seconds = time.perf_counter() - start
    numbers = torch.tensor([seconds, float(peak(CPU) - before)], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return result, {"seconds": numbers[0].item(), "extra": numbers[1].item()}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def asynchronous(state: State, path: Path, figures: dict[str, list[dict[str, float]]], first: bool) -> None:
    """How long the call takes, and how long until it is all on the disk."""
    name = "composer_dist, async, blocked" + (" (first)" if first else "")
    start = time.perf_counter()
    pending, blocked = timed(lambda: save_checkpoint(path / "async", state, asynchronous=True))
    pending.wait()
    figures.setdefault(name, []).append(blocked)
    tell(name, blocked["seconds"])
    figures.setdefault("composer_dist, async, until written", []).append(
        {"seconds": time.perf_counter() - start, "extra": 0.0}
    )
    dist.barrier()


def loads(state: State, path: Path, figures: dict[str, list[dict[str, float]]]) -> None:
    """Back from what the saves wrote."""
    before = [shard(p).clone() for p in state["model"].parameters()]

    def from_dcp(name: str) -> None:
        dcp.load(sharded_states(state), checkpoint_id=path / name)

    def from_ours(name: str, **options: Any) -> None:
        load_checkpoint(path / name, dict(state), **options)

    contenders = {
        "composer_dist, load": ("composer_dist", from_ours, {}),
        "composer_dist, load, unverified": ("composer_dist", from_ours, {"verify": False}),
        "composer_dist, one file, load": ("composer_dist, one file", from_ours, {}),
        "dcp, load": ("dcp", from_dcp, {}),
    }
    for name, (saved, load, options) in contenders.items():
        if not (path / saved).exists():
            continue
        if name != "dcp, load":
            with torch.no_grad():
                for parameter in state["model"].parameters():
                    shard(parameter).zero_()
        figures.setdefault(name, []).append(timed(partial(load, saved, **options))[1])
        tell(name, figures[name][-1]["seconds"])
        for parameter, value in zip(state["model"].parameters(), before, strict=True):
            assert torch.equal(shard(parameter), value), name


def shard(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().to_local()


def main() -> None:
    """Run all contenders in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=100, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where checkpoints are written; a temporary directory")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these saves alone, and their loads")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="worlds to launch")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launch(arguments.ranks)
        return
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    config = config_for(arguments.millions)
    model = build(config, torch.float32, real=True)
    optimizer = torch.optim.AdamW(model.parameters())
    parallelize_model(model, FSDP2Config(), optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    if "accelerate" in SAVES:
        from accelerate import PartialState

        PartialState(cpu=True)  # its functions log by it
    figures: dict[str, list[dict[str, float]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        path = Path(shared[0])
        for number in range(arguments.rounds):
            for name, save in SAVES.items():
                if arguments.only and name not in arguments.only:
                    continue
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path / name, ignore_errors=True)
                    (path / name).unlink(missing_ok=True)
                    os.sync()
                figures.setdefault(name, []).append(timed(lambda s=save, n=name: s(state, path / n))[1])
                sizes[name] = size_of(path / name)
                tell(name, figures[name][-1]["seconds"])
            asynchronous(state, path, figures, number == 0)
            loads(state, path, figures)
        dist.barrier()
    traffic, base = adapter_traffic(config)
    if dist.get_rank() == 0:
        print(f"adapters: {traffic / 1e6:.1f} MB travel, {traffic / base:.2%} of the base's bytes")
        report(figures, sizes, config_bytes(config, torch.float32), arguments)
    dist.destroy_process_group()


def report(figures, sizes: dict[str, int], nbytes: int, arguments: argparse.Namespace) -> None:
    """A table, and JSON if asked."""
    world = dist.get_world_size()
    title = f"{nbytes / 4e6:.0f} M parameters in float32 and AdamW ({3 * nbytes / 1e9:.2f} GB), {world} ranks"
    table = Table("what", "seconds", "x dcp", "GB", "extra MiB", title=title)
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in figures.items()
    }
    for name, row in median.items():
        rival = "dcp, load" if "load" in name else "dcp"
        size = f"{sizes[name] / 1e9:.2f}" if name in sizes else ""
        extra = f"{row['extra'] / 2**20:.0f}"
        table.add_row(name, f"{row['seconds']:.2f}", ratio(median, name, rival), size, extra)
    Console(width=110).print(table)
    if arguments.json:
        target = arguments.json.with_stem(f"{arguments.json.stem}-{world}")
        target.write_text(json.dumps({"bytes": nbytes, "ranks": world, "median": median}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
