"""How long it takes to bring a model from rank 0, or from meta, into the shards, against others.

    python benchmarks/prepare.py --millions 270 --ranks 2 4 --rounds 5

*From rank 0*: rank 0 holds a Llama in host memory, the other ranks hold it on the meta device; timed from the
call until every rank has its shards. Values are verified on every rank; "wrong buffers" is 1 where the rotary
table is left uninitialized.

- reads: plain `fully_shard`, then a bare loop that reads each shard from rank 0's memory by
  `process_vm_readv`.
- scatter: plain `fully_shard`, then a loop of `dist.scatter`. Both are references and no rivals.
- Composer: its own `parallelize_model`, which finds that the ranks' weights differ in place.
- torch: `fully_shard` on meta, then `set_model_state_dict(broadcast_from_rank0=True)`.
- accelerate: `fully_shard` on meta, then its loader, called directly because it drops its plugin on CPUs.
- Lightning, torchtune: `fully_shard` on meta, then their own loaders.

*Meta init*: all ranks hold the model on meta; "one process" initializes it on rank 0 alone, with as many
threads as there are cores.

The memory is what a rank's peak has beyond what it held and its shards.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from math import prod
from types import SimpleNamespace

import llama
import torch
import torch.distributed as dist
from llama import shard_on_meta
from rounds import Figures, device, play, timed
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.distributed import meta_init, parallelize_model
from composer_dist.distributed.moving import memory

Way = Callable[[nn.Module], object]


def from_rank_0(make: Callable[[], Way], arguments: argparse.Namespace) -> Figures:
    way, model = make(), llama.build(arguments, real=dist.get_rank() == 0)
    figures = timed(lambda: way(model), llama.shard_bytes(model))
    return {**figures, "wrong buffers": llama.verify(model)}


def ours(transport: str) -> Way:
    config = ParallelismConfig(fsdp2=FSDP2Config(), transport=transport)
    return lambda model: parallelize_model(model, config)


def composer() -> Way:
    from composer.distributed.prepare_distributed import parallelize_model
    from composer.utils.parallelism import FSDP2Config

    def way(model: nn.Module) -> None:
        blocks = set(model.model.layers)
        model.fsdp_wrap_fn = lambda module: module in blocks or module is model
        parallelize_model(model, FSDP2Config())

    return way


def torch_dsd() -> Way:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return lambda model: set_model_state_dict(model, shard_on_meta(model), options=options)


def accelerate() -> Way:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    state = SimpleNamespace(fsdp_plugin=None)
    stub = SimpleNamespace(is_main_process=dist.get_rank() == 0, device=device(), state=state)
    return lambda model: fsdp2_load_full_state_dict(stub, model, shard_on_meta(model))


def lightning() -> Way:
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state

    def way(model: nn.Module) -> None:
        state = dict(model.state_dict())  # it looks every name up, on all ranks
        shard_on_meta(model)
        _load_raw_module_state(state, model, dist.get_world_size())

    return way


def torchtune() -> Way:
    from torchtune.training import load_from_full_model_state_dict

    return lambda model: load_from_full_model_state_dict(model, shard_on_meta(model), device(), strict=True)


def scatter() -> Way:
    def way(model: nn.Module) -> None:
        state, world = shard_on_meta(model), dist.get_world_size()
        for name, parameter in model.named_parameters():
            assert parameter.shape[0] % world == 0
            chunks = list(state[name].detach().to(device()).chunk(world)) if dist.get_rank() == 0 else None
            dist.scatter(parameter.detach().to_local(), chunks, src=0)

    return way


def reads() -> Way:
    def way(model: nn.Module) -> None:
        state = shard_on_meta(model)
        own = [[os.getpid(), {name: value.data_ptr() for name, value in state.items()}]]
        dist.broadcast_object_list(own)
        pid, addresses = own[0]
        for name, parameter in model.named_parameters():
            local, start = parameter.detach().to_local(), llama.part(parameter)[0] * prod(parameter.shape[1:])
            theirs = addresses[name] + start * local.itemsize
            host = local if local.is_cpu else torch.empty_like(local, device="cpu", pin_memory=True)
            memory.read(pid, [memory.Range(theirs, host.data_ptr(), host.nbytes)], fresh=local.is_cpu)
            if host is not local:
                local.copy_(host)
        dist.barrier()

    def permitted(model: nn.Module) -> None:
        with memory.readable_by_siblings():
            way(model)

    return permitted


def from_meta(arguments: argparse.Namespace) -> Figures:
    torch.manual_seed(0)
    model = llama.build(arguments, real=False)
    return timed(lambda: parallelize_model(model, FSDP2Config()), llama.shard_bytes(model))


def one_process(arguments: argparse.Namespace) -> Figures:
    model = llama.build(arguments, real=False)
    torch.set_num_threads(os.cpu_count() or 1)
    whole = llama.shard_bytes(model) * dist.get_world_size()
    return timed(lambda: meta_init(model) if dist.get_rank() == 0 else None, whole)


WAYS: dict[str, Callable[[], Way]] = {
    "composer_dist": partial(ours, "auto"),
    "composer_dist, messages": partial(ours, "messages"),
    "reads": reads,
    "scatter": scatter,
    "Composer": composer,
    "torch": torch_dsd,
    "accelerate": accelerate,
    "Lightning": lightning,
    "torchtune": torchtune,
}
CONTENDERS = {name: partial(from_rank_0, way) for name, way in WAYS.items()} | {
    "composer_dist, meta init": from_meta,
    "one process, meta init": one_process,
}

if __name__ == "__main__":
    rivals = ("reads", "scatter", "Composer", "torch", "one process, meta init")
    play(CONTENDERS, rivals, llama.options, ranks=(2, 4))
