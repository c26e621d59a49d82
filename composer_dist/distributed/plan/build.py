"""Making the plan, before the model is changed: the features' plans are made in order and put together.

A `ParallelPlan` is pure data, built without a process group, for any world size. `plan_parallelism` and
`parallelize_model` build the same object, so what the plan says is what happens.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.distributed.activations import plan as activations
from composer_dist.distributed.compiling import plan as compiling
from composer_dist.distributed.context_parallelism import plan as context_parallelism
from composer_dist.distributed.feature_plan import refuse_compiled
from composer_dist.distributed.optimizers.check import check_optimizers
from composer_dist.distributed.plan.decisions import Delivery, ModulePlan, Subject
from composer_dist.distributed.plan.plan import ParallelPlan
from composer_dist.distributed.replication import plan as replication
from composer_dist.distributed.sharding import plan as sharding
from composer_dist.distributed.tensor_parallel import plan as tensor_parallel
from composer_dist.distributed.wishes import Request, Wishes
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.structure.blocks import structural_units
from composer_dist.structure.families import architecture_of, is_a
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure
from composer_dist.wording import kind_in_words, listed, near_miss


def build_plan(structure: Structure, request: Request, sizes: Mapping[str, int]) -> ParallelPlan:
    """Plan a model on a mesh of these sizes.

    Raises:
        ParallelismError: everything that can be known beforehand; see the plans of the features.
    """
    config = request.config
    replication.check_unprepared(structure, replicating=config.ddp is not None)
    context = context_parallelism.plan(structure, request, sizes)
    wishes = Wishes.read(request, structure)
    replica = replication.plan(structure, wishes, sizes)
    tensors = tensor_parallel.plan(structure, wishes, sizes)
    cut = {name: sizes["tp"] if name in tensors.cuts else 1 for name in tensors.parameters} if tensors else {}
    shards = sharding.plan(structure, wishes, sizes, cut)
    idle = tensor_parallel.idle_styles(wishes, sizes)
    idle += tensor_parallel.little_cut(structure, wishes, tensors)
    blocks = shards.blocks if shards else tuple(name for name, _ in structural_units(structure))
    saved = activations.plan(structure, wishes, sizes, blocks)
    surroundings = compiling.Surroundings(
        units=[name for unit in shards.units for name in unit.modules] if shards else (),
        recomputed={one.module: one.options for one in saved.modules if one.recomputes} if saved else {},
        budgets=saved.budgets if saved else {},
        divided=list(tensors.modules) if tensors else (),
        cp=sizes["cp"],
    )
    compiled = compiling.plan(structure, wishes, sizes, blocks, surroundings)
    whole = shards or replica
    assert whole is not None
    _check_modules(structure, whole.plain, sizes)
    _check_layouts(structure, sizes)
    sharded = [held.info for name, held in structure.parameters.items() if name not in whole.plain]
    refuse_compiled(structure, (owner for info in sharded for owner in info.owners))
    check_optimizers(request.optimizers, structure, whole.plain, sizes)
    own = request.mesh if isinstance(request.mesh, DeviceMesh) else None
    warnings = [*wishes.warnings, *whole.warnings, *idle, *(compiled.warnings if compiled else ())]
    return ParallelPlan(
        mesh=sizes,
        device_type=request.device_type,
        own_mesh=own,
        structure=structure.digest,
        modules=dict(_module_plans(structure, whole)),
        plain=whole.plain,
        ties=tuple(h.info.names for h in structure.parameters.values() if len(h.info.names) > 1),
        others=dict(_others(structure)),
        delivery=Delivery(config.sync, config.transport, config.bucket_bytes, config.strict),
        verbose=config.fsdp2 is not None and config.fsdp2.verbose,
        warnings=tuple(dict.fromkeys(warnings)),
        sharding=shards,
        replication=replica,
        tensor_parallel=tensors,
        context_parallelism=context,
        activations=saved,
        compiling=compiled,
        subject=Subject(structure, request.optimizers),
    )


def _check_modules(structure: Structure, plain: Container[str], sizes: Mapping[str, int]) -> None:
    """Refuse embeddings that depend on the whole batch, and modules that cannot be sharded.

    Raises:
        ParallelismValueError: names them.
    """
    ranks = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"]
    tables = {n: m for n, m in structure.modules.items() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    cut = [held.info for name, held in structure.parameters.items() if name not in plain]
    sharded = {owner: info.requires_grad for info in cut for owner in info.owners if owner in tables}
    with Faults() as faults:
        if found := [n for n, m in tables.items() if m.max_norm is not None and (ranks > 1 or n in sharded)]:
            faults.append(
                f"{listed(found)}: an embedding with max_norm changes its weight in forward, in the rows "
                "that this rank's batch uses. Sharding would drop the change, and replicas would diverge. "
                "Leave max_norm out and renormalize after the optimizer's step, or in the loss."
            )
        if found := [n for n, m in tables.items() if m.scale_grad_by_freq and ranks > 1]:
            faults.append(
                f"{listed(found)}: scale_grad_by_freq divides gradients by how often a row is in the batch, "
                "and each rank would count in its own part. Leave it out, or divide in the loss."
            )
        if found := [n for n, trainable in sharded.items() if trainable and tables[n].sparse]:
            faults.append(
                f"{listed(found)}: FSDP2 cannot reduce the sparse gradients of an embedding with sparse=True"
                ". Leave sparse out, keep the embedding whole with Rule(name, shard=False), or use DDP."
            )
        adalora = any(is_a(module, "AdaLoraModel") for module in structure.modules.values())
        if found := [info.name for info in cut if adalora and ".lora_" in info.name]:
            faults.append(
                f"{listed(found, 4)}: AdaLora reads its matrices outside of the calls in which FSDP2 gathers "
                "them. Keep them whole with Rule('re:.*[.]lora_[ABE]', shard=False), or use DDP."
            )


def _check_layouts(structure: Structure, sizes: Mapping[str, int]) -> None:
    """Refuse sparse parameters and buffers, which ranks can neither compare nor send.

    Raises:
        ParallelismValueError: names them.
    """
    held = ((name, one.get()) for name, one in structure.tensors.items() if one.info.kind != "attribute")
    found = [name for name, tensor in held if tensor.layout not in (torch.strided, torch.jagged)]
    if found and any(size > 1 for size in sizes.values()):
        raise ParallelismValueError(
            f"{listed(found)}: sparse parameters and buffers cannot be compared among several ranks or sent "
            "to them. Register the indices and the values as two buffers, and build the sparse tensor from "
            "them in forward (torch.sparse_coo_tensor(self.indices, self.values, shape))."
        )


def as_tuple(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """None, one or several optimizers as a tuple.

    Raises:
        ParallelismTypeError: none of these, such as the class of one.
    """
    if optimizer is None:
        return ()
    if isinstance(optimizer, (str, type)) or not isinstance(optimizer, Iterable):
        if isinstance(optimizer, Optimizer):
            return (optimizer,)
        raise ParallelismTypeError(
            f"optimizer must be an Optimizer, several of them, or None, not {kind_in_words(optimizer)}."
        )
    return tuple(optimizer)


def optimizer_named(name: str, model: nn.Module) -> Optimizer:
    """An optimizer of all trainable parameters, of the class in torch.optim with this name in any case.

    Raises:
        ParallelismValueError: there is no such class, or it does not take these parameters.
    """
    kinds = [one for one in vars(torch.optim).values() if isinstance(one, type) and one is not Optimizer]
    known = {kind.__name__.lower(): kind for kind in kinds if issubclass(kind, Optimizer)}
    if name.lower() not in known:
        raise ParallelismValueError(
            f"There is no optimizer {name!r} in torch.optim.{near_miss(name.lower(), known)} Valid names: "
            f"{', '.join(sorted(kind.__name__ for kind in known.values()))}; or give the optimizer itself."
        )
    kind: Any = known[name.lower()]
    try:
        made: Optimizer = kind([one for one in model.parameters() if one.requires_grad])
    except ValueError as error:
        raise ParallelismValueError(
            f"{kind.__name__} does not take all trainable parameters: {error}. Give the optimizer itself."
        ) from error
    return made


def _module_plans(
    structure: Structure, plan: sharding.ShardingPlan | replication.ReplicaPlan
) -> Iterator[tuple[str, ModulePlan]]:
    units = {name: unit for unit in plan.units for name in unit.modules}
    for name in structure.modules:
        first = structure.first[name]
        above = (structure.first[outer] for outer in ancestors(name))
        home = next((outer for outer in above if outer in units or outer in plan.replicated), None)
        if first != name:
            yield name, ModulePlan("duplicate", _why_duplicate(first, structure))
        elif name in units:
            others = [other or "the root" for other in units[name].modules if other != name]
            joined = f" in one group with {', '.join(others)}" if others else ""
            yield name, ModulePlan(f"unit{joined}", plan.reasons[name])
        elif name in plan.skipped:
            yield name, ModulePlan("no unit", plan.skipped[name])
        elif home is None:
            yield name, ModulePlan("left alone", "no unit contains it")
        elif home in units:
            yield name, ModulePlan(f"part of unit {home or 'root'}", "it lies inside it")
        else:
            yield name, ModulePlan("replicated", plan.replicated[home])


def _why_duplicate(first: str, structure: Structure) -> str:
    architecture = architecture_of(structure, first)
    shared = f", which {architecture} shares; handled as a tie" if architecture else ""
    return f"it is the same module as {first}{shared}"


def _others(structure: Structure) -> Iterator[tuple[str, str]]:
    for held in structure.tensors.values():
        if isinstance(held.get(), DTensor):
            yield from ((alias, "already sharded, and left unchanged") for alias in held.info.names)
        elif held.info.kind != "parameter":
            yield from ((alias, f"a {held.info.kind}, whole on every rank") for alias in held.info.names)
