"""Prepares, trains, saves, loads and undoes for half an hour in one world of processes: what does it leave?

    python -m benchmarks.soak --minutes 30

Each cycle takes a new small Llama through the next mode (FSDP2, HSDP, DDP, TP): steps by hand, a save in
the background and one in the foreground, a load, `unparallelize_model`; every second round of modes also
through a Trainer with a `CheckpointSaver`. Prints, by minute, what each rank's process holds once garbage
is collected: memory, file descriptors, threads, process groups, and segments in /dev/shm. Fails if a count
at the end is not that of the first notes, or if the memory of the last fifth is over 1.02 times that of the
second fifth.
"""

import argparse
import ctypes
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import DDPConfig, MeshConfig, ParallelismConfig, TPConfig
from composer_dist.checkpoint import full_model_state, load_checkpoint, save_checkpoint
from composer_dist.distributed import launch, parallelize_model, process_group, unparallelize_model
from composer_dist.models import HuggingFaceModel
from composer_dist.trainer import CheckpointSaver, DistributedDataLoader, Trainer

WAYS = {
    "FSDP2": ParallelismConfig(),
    "HSDP": ParallelismConfig(mesh=MeshConfig(dp_replicate=-1, dp_shard=1)),
    "DDP": ParallelismConfig(ddp=DDPConfig()),
    "TP": ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig()),
}
ALLOWED = 1.02
_LIBC = ctypes.CDLL(None)


class Held(NamedTuple):
    """What a process holds."""

    minutes: float
    cycles: int
    mib: float
    """Resident, without files that are mapped."""
    descriptors: int
    threads: int
    groups: int
    segments: int
    """Of all processes, in /dev/shm."""

    @property
    def counts(self) -> tuple[int, ...]:
        """What must not grow at all."""
        return self[3:]


def held(began: float, cycles: int) -> Held:
    """As it is now, once what is free is given back to the system."""
    gc.collect()
    _LIBC.malloc_trim(0)
    process = psutil.Process()
    memory = process.memory_info().rss - process.memory_info().shared
    groups = len(dist.distributed_c10d._world.pg_map)
    counts = process.num_fds(), process.num_threads(), groups, len(os.listdir("/dev/shm"))
    return Held((time.monotonic() - began) / 60, cycles, memory / 2**20, *counts)


def llama() -> Any:
    """Of 0.6 million parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))


def by_hand(config: ParallelismConfig, folder: Path) -> None:
    """Everything that the library does to a model, and back."""
    model, ids = llama(), torch.arange(128).view(2, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    parallelize_model(model, config, optimizer)
    for _ in range(3):
        step()
    state = {"model": model, "optimizer": optimizer}
    pending = save_checkpoint(folder / "background", state, asynchronous=True)
    step()
    pending.wait()
    save_checkpoint(folder / "foreground", state)
    load_checkpoint(folder / "background", state)
    full_model_state(model)
    unparallelize_model(model, optimizer)
    step()


def by_trainer(config: ParallelismConfig, folder: Path) -> None:
    """A run of four batches that saves twice."""
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(16 * 32).remainder(256).view(16, 32)]
    model = HuggingFaceModel(llama())
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        train_dataloader=DistributedDataLoader(rows, global_batch_size=4),
        max_duration="4ba",
        parallelism_config=config,
        device="cpu",
        progress_bar=False,
        callbacks=[CheckpointSaver(folder / "run", "2ba")],
    )
    trainer.fit()
    trainer.close()


def soaked(minutes: float) -> list[list[Held]]:
    """What every rank held after each minute."""
    process_group.init()
    began, cycles, found = time.monotonic(), 0, list[Held]()
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        while True:
            way = [*WAYS.values()][cycles % len(WAYS)]
            by_hand(way, Path(folders[0]) / "hand")
            if cycles // len(WAYS) % 2:
                by_trainer(way, Path(folders[0]) / "trainer")
            cycles += 1
            now = held(began, cycles)
            over = [now.minutes >= minutes]
            dist.broadcast_object_list(over)
            if cycles % (2 * len(WAYS)):
                continue
            if not found or over[0] or now.minutes - found[-1].minutes >= 1:
                found.append(now)
            if over[0]:
                break
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    process_group.destroy()
    return ranks


def verdict(notes: list[Held]) -> list[str]:
    """What grew on a rank."""
    found = []
    if notes[-1].counts != notes[0].counts:
        found.append(f"counts were {notes[0].counts}, and are {notes[-1].counts}")
    fifth = max(len(notes) // 5, 1)
    early, late = (
        statistics.median(one.mib for one in some)
        for some in (notes[fifth : 2 * fifth] or notes, notes[-fifth:])
    )
    if late > ALLOWED * early:
        found.append(f"memory was {early:.1f} MiB, and is {late:.1f} MiB")
    return found


def main() -> None:
    """Run the cycles on two ranks, and print what each held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    minutes = parser.parse_args().minutes
    ranks = launch(soaked, 2, args=(minutes,))
    print(f"| rank | {' | '.join(Held._fields)} |")
    print("|---" * (1 + len(Held._fields)) + "|")
    for rank, notes in enumerate(ranks):
        for one in notes:
            print(f"| {rank} | {one.minutes:.1f} | {one.cycles} | {one.mib:.1f} | ", end="")
            print(f"{' | '.join(map(str, one.counts))} |")
    if grown := {rank: found for rank, notes in enumerate(ranks) if (found := verdict(notes))}:
        raise SystemExit(f"Grown: {grown}")


if __name__ == "__main__":
    main()
