"""The fastest way to train a model that fits on given devices.

Modes are tried in the order in which they cost: sharding on any mesh, then tensor or context parallelism
within a host, then offloading, each only if nothing fits before it; tensor parallelism also if the fastest
step waits for collectives. In a mode every mesh, reshard setting and kind of checkpointing is estimated. A
batch is split in microbatches only as far as it has to be. Nothing is traced that cannot fit: plans that hold
too much, and those whose activations, in proportion to ones that were traced, are too many.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import Config, ParallelismConfig, resolve_config
from composer_dist.distributed.plan.build import as_tuple, optimizer_named
from composer_dist.distributed.plan.decisions import Subject
from composer_dist.distributed.plan.search import Search, is_shape
from composer_dist.distributed.plan.suggestion import Advice, Proposal, Suggestion, frontier_of
from composer_dist.distributed.plan.topology import TOPOLOGIES, Topology, by_name
from composer_dist.distributed.plan.work import DEVICES, Device
from composer_dist.distributed.prepared import check_module
from composer_dist.distributed.sharding.choose_units import composer_children
from composer_dist.distributed.wishes import Request
from composer_dist.errors import ParallelismTypeError
from composer_dist.precision import Precision
from composer_dist.structure.calling import Loss
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.wording import human_bytes

_AS_FAST = 1.01
"""Times that differ by less count as equal: they are modeled."""
_MOST_RANKS = 1 << 14
"""That advice looks at."""


def suggest(
    model: nn.Module,
    *,
    world_size: int,
    device_memory: int,
    batch: Any,
    topology: Topology | str = "h100",
    device: Device | str = "h100",
    optimizer: Optimizer | Sequence[Optimizer] | str | None = None,
    precision: str | Precision | None = None,
    loss: Loss | None = None,
    config: Config = "fsdp",
    composer: bool = False,
) -> Suggestion:
    """The fastest way to train a model on given devices that fits into their memory.

    It searches the sizes of the mesh, `reshard_after_forward`, activation checkpointing, offloading of the
    parameters, and microbatches. It needs no device and no process group.

    Args:
        model: real or on the meta device; it is not changed.
        world_size: ranks.
        device_memory: bytes of each device. Leave out what is not for the model, and the allocator's slack.
        batch: what each rank computes with in a step, as for `plan.memory`. It may be split in microbatches.
            Where tensor or context parallelism is added, its ranks share as many batches as they are.
        topology, device, loss: as for `plan.compute`.
        optimizer: as for `plan_parallelism`.
        precision: None casts parameters of float32 to bfloat16 for the computation, by `mixed_precision` in
            the config that is suggested, unless `config` says otherwise.
        config: what is decided already: rules, tensor-parallel styles, context parallelism, the device type.
            Fields that are searched keep what it sets, unless that is the default.
        composer: as for `plan_parallelism`.

    Returns:
        `.best` is the fastest that fits, with `.config`, `.plan`, `.memory`, `.compute` and `.microbatches`,
        and `.config` is its configuration, which `parallelize_model` takes. `.frontier` shows the
        trade-off between memory and time. `.advice` lists what to change if nothing fits without offloading.
        It prints as a table.

    Raises:
        ParallelismError: the model cannot be prepared or traced in any of these ways.
    """
    check_module(model)
    optimizers = as_tuple(optimizer_named(optimizer, model) if isinstance(optimizer, str) else optimizer)
    structure = read_structure(model)
    base = resolve_config(config)
    if not isinstance(base.mesh, MeshConfig):
        raise ParallelismTypeError("suggest chooses the sizes of the mesh, so it takes no DeviceMesh.")
    here = torch.accelerator.current_accelerator()
    kind = base.mesh.device_type or (here.type if here else "cuda")
    base = replace(base, mesh=replace(base.mesh, device_type=kind))
    search = Search(
        request=Request(
            config=base if precision else _in_bfloat16(base, structure),
            precision=precision,
            children=composer_children(model) if composer else (),
            optimizers=optimizers,
        ),
        subject=Subject(
            structure, tuple(map(type, optimizers)) if isinstance(optimizer, str) else optimizers
        ),
        world=world_size,
        limit=device_memory,
        topology=by_name(topology, TOPOLOGIES),
        device=by_name(device, DEVICES),
        batch=batch,
        loss=loss,
    )
    found = search.run()
    fitting, best = search.fitting(found), None
    if fitting:
        least = _AS_FAST * min(one.seconds for one in fitting)
        best = min((one for one in fitting if one.seconds <= least), key=_needed)
    settled = best is not None and bool(search.fsdp2.cpu_offload or not best.offloads)
    return Suggestion(
        device_memory=device_memory,
        best=best,
        frontier=frontier_of(found),
        advice=() if settled else tuple(_advice(search)),
    )


def _needed(found: Proposal) -> tuple[int, int]:
    """Memory of the host, where replicas would each hold the whole model, and then of the device."""
    return (found.memory.host if found.offloads else 0), found.memory.peak


def _in_bfloat16(base: ParallelismConfig, structure: Structure) -> ParallelismConfig:
    """With parameters of float32 cast for the computation, unless it says otherwise."""
    fsdp2 = base.fsdp2 or FSDP2Config()
    wide = any(held.info.dtype == torch.float32 for held in structure.parameters.values())
    if base.ddp is not None or fsdp2.mixed_precision != "DEFAULT" or not wide:
        return base
    mixed = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    return replace(base, fsdp2=replace(fsdp2, mixed_precision=mixed))


def _advice(search: Search) -> Iterator[Advice]:
    """What to change, so that it fits without offloading; in each case the least memory that there is."""
    if found := _on_more_ranks(search):
        yield Advice(f"{found.plan.world_size} ranks or more: {_needs(found)}", found)
    if found := _with_fewer_tokens(search):
        yield Advice(f"sequences of {found.batch[1]} tokens: {_needs(found)}", found)
    if found := search.smallest(search.world, subject=_in_low_precision(search.subject)):
        text = "parameters, gradients and optimizer state in bfloat16 (model.to(torch.bfloat16))"
        yield Advice(f"{text}: {_needs(found)}", found)


def _needs(found: Proposal) -> str:
    return f"{human_bytes(found.memory.peak)} of each device, one sequence at a time, all recomputed"


def _on_more_ranks(search: Search) -> Proposal | None:
    """The least number of ranks, in whole hosts, on which it fits."""
    host = search.topology.ranks_per_host
    step = lcm(host if search.world >= host else 1, search.mesh.cp * search.mesh.tp)
    low, high = search.world // step, search.world // step + 1
    while search.smallest(high * step) is None:
        low, high = high, 2 * high
        if high * step > _MOST_RANKS:
            return None
    between = range(low + 1, high + 1)
    index = bisect_left(between, True, key=lambda hosts: search.smallest(hosts * step) is not None)
    return search.smallest(between[index] * step)


def _with_fewer_tokens(search: Search) -> Proposal | None:
    """Half as many tokens, a quarter, ...; until it fits."""
    if not is_shape(search.batch) or len(search.batch) != 2:
        return None
    fewer = [search.batch[1] >> power for power in range(1, search.batch[1].bit_length())]

    def fits(tokens: int) -> Proposal | None:
        return search.smallest(search.world, batch=(1, tokens))

    index = bisect_left(fewer, True, key=lambda tokens: fits(tokens) is not None)
    return fits(fewer[index]) if index < len(fewer) else None


def _in_low_precision(subject: Subject) -> Subject:
    """The model after `model.to(torch.bfloat16)`."""
    tensors = {
        name: replace(held, info=replace(held.info, dtype=torch.bfloat16))
        if held.info.kind != "attribute" and held.info.dtype == torch.float32
        else held
        for name, held in subject.structure.tensors.items()
    }
    return Subject(replace(subject.structure, tensors=tensors), subject.optimizers)
