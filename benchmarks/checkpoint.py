"""How long it takes to save and load a checkpoint, against others doing the same.

    python benchmarks/checkpoint.py --millions 100 --ranks 2 4 --rounds 5

A Llama under FSDP2 and its AdamW state lie in memory; all contenders of a round save the same, one after the
other in the same processes. Timed from the call until the slowest rank returns, with everything on the disk:
our files are synced, and so are those of torch.distributed.checkpoint, as by its default. A load follows a
save, so that the files are in the page cache; every rank's values are zero before it and compared with what
was saved after it.

- dcp: `torch.distributed.checkpoint.save` and `load` of the sharded state dicts, without checksums.
- accelerate: its own functions for sharded FSDP2 states, called directly, because it drops its FSDP plugin
  on CPU.
- asynchronous: how long training waits for the call, and when all is written; the first one makes its
  buffers and stands in a column of its own.
- state_dict: `get_model_state_dict` and `get_optimizer_state_dict` in full on rank 0, then `torch.save`,
  which does not sync.
- export: the weights as transformers reads them. dcp, export: by torch's `HuggingFaceStorageWriter`, which
  writes shards, syncs them, and then puts them together; save_pretrained: of the full state on rank 0,
  not synced.
- adapters: the state of LoRA alone, out of a sharded model; the traffic is what counts.
- full_model_state, weight_source: all weights on every rank, at once or in buckets of 32 MiB.
"""

import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rounds import Figures, device, now, play, reduced, timed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from composer_dist import FSDP2Config
from composer_dist.checkpoint import (
    export_pretrained,
    full_model_state,
    load_checkpoint,
    save_checkpoint,
    weight_source,
)
from composer_dist.distributed import parallelize_model

State = dict[str, Any]
Way = Callable[[State, Path], object]


def trained(arguments: Namespace) -> State:
    """A sharded model after one step, the same for all contenders."""
    if "state" not in arguments:
        model = llama.build(arguments, real=False)
        parallelize_model(model, FSDP2Config())
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        arguments.state = {"model": model, "optimizer": optimizer}
    state: State = arguments.state
    return state


def path_in(arguments: Namespace) -> Path:
    """A place without anything; what was written before is on the disk."""
    path: Path = arguments.folder / "checkpoint"
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        os.sync()
    dist.barrier()
    return path


def save(way: Way, arguments: Namespace) -> Figures:
    state, path = trained(arguments), path_in(arguments)
    return timed(lambda: way(state, path))


def load(saving: Way, loading: Way, arguments: Namespace) -> Figures:
    state, path = trained(arguments), path_in(arguments)
    saving(state, path)
    locals_ = [parameter.detach().to_local() for parameter in state["model"].parameters()]
    saved = [local.clone() for local in locals_]
    for local in locals_:
        local.zero_()
    figures = timed(lambda: loading(state, path))
    now = [parameter.detach().to_local() for parameter in state["model"].parameters()]
    assert all(map(torch.equal, now, saved)), "what was loaded differs"
    return figures


def sharded_states(state: State) -> State:
    model, optimizer = state["model"], state["optimizer"]
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def ours(state: State, path: Path, **options: Any) -> None:
    save_checkpoint(path, state, **options)


def ours_back(state: State, path: Path, **options: Any) -> None:
    load_checkpoint(path, dict(state), **options)


def asynchronous(arguments: Namespace) -> Figures:
    state, path = trained(arguments), path_in(arguments)
    pending: list[Any] = []

    def call() -> Figures:
        return timed(lambda: pending.append(save_checkpoint(path, state, asynchronous=True)))

    first = call()["seconds"]
    pending.pop().wait()
    start, figures = now(), call()
    pending.pop().wait()
    return figures | reduced({"written after": now() - start, "the first": first})


def plain_dcp(state: State, path: Path) -> None:
    dcp.save(sharded_states(state), checkpoint_id=path)


def dcp_back(state: State, path: Path) -> None:
    dcp.load(sharded_states(state), checkpoint_id=path)


def state_dict(state: State, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = state["model"], state["optimizer"]
    full = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if dist.get_rank() == 0:
        torch.save(full, path)
    dist.barrier()


def ours_exported(state: State, path: Path) -> None:
    export_pretrained(state["model"], path)


def dcp_exported(state: State, path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
    dcp.save(get_model_state_dict(state["model"]), storage_writer=writer)


def save_pretrained(state: State, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(state["model"], options=options)
    if dist.get_rank() == 0:
        state["model"].save_pretrained(path, state_dict=full)
    dist.barrier()


def accelerate(arguments: Namespace) -> Figures:
    from accelerate import PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import StateDictType

    PartialState(cpu=device().type == "cpu")  # its functions log by it
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
    )
    process = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())

    def way(state: State, path: Path) -> None:
        fsdp_utils.save_fsdp_model(plugin, process, state["model"], str(path))
        fsdp_utils.save_fsdp_optimizer(plugin, process, state["optimizer"], state["model"], str(path))

    return save(way, arguments)


def loopback() -> int:
    """Bytes that the loopback interface has received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def adapters(arguments: Namespace) -> Figures:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama.build(arguments, real=False), LoraConfig(target_modules="all-linear"))
    parallelize_model(model, FSDP2Config())
    return counted(lambda: full_model_state(model, select="adapters"))


def counted(way: Callable[[], object]) -> Figures:
    """The figures of a call, with what it sends."""
    dist.barrier()
    before = loopback()
    figures = timed(way)
    dist.barrier()
    return figures | {"MB sent": (loopback() - before) / 1e6}


def in_full(arguments: Namespace) -> Figures:
    model = trained(arguments)["model"]
    return counted(lambda: full_model_state(model, ranks="all"))


def handed_over(arguments: Namespace) -> Figures:
    source = weight_source(trained(arguments)["model"], bucket_bytes=32 << 20)
    return counted(lambda: [None for _ in source])


CONTENDERS = {
    "composer_dist": partial(save, ours),
    "dcp": partial(save, plain_dcp),
    "accelerate": accelerate,
    "composer_dist, asynchronous": asynchronous,
    "composer_dist, one file": partial(save, partial(ours, sharded=False)),
    "state_dict": partial(save, state_dict),
    "composer_dist, export": partial(save, ours_exported),
    "dcp, export": partial(save, dcp_exported),
    "save_pretrained": partial(save, save_pretrained),
    "composer_dist, adapters": adapters,
    "composer_dist, full_model_state": in_full,
    "composer_dist, weight_source": handed_over,
    "composer_dist, load": partial(load, ours, ours_back),
    "composer_dist, load, unverified": partial(load, ours, partial(ours_back, verify=False)),
    "dcp, load": partial(load, plain_dcp, dcp_back),
}

if __name__ == "__main__":
    options = partial(llama.options, millions=100)
    play(CONTENDERS, ("dcp", "dcp, load", "dcp, export"), options, ranks=(4,), together=True)
