"""`verify_model`: the prepared model against the unsharded one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composer_dist.config.mesh import per_host
from composer_dist.distributed import prepared
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.plan.build import as_tuple
from composer_dist.distributed.prepared import check_usable, mesh_of_world, reshard
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication.replica import replica_of
from composer_dist.distributed.verification import replicas
from composer_dist.distributed.verification.around import as_before
from composer_dist.distributed.verification.compare import (
    Gradients,
    compare_traces,
    compare_weights,
    read_parameters,
    trace,
)
from composer_dist.distributed.verification.plain import plain_copy
from composer_dist.distributed.verification.result import Findings, Verification, joined, unpacked
from composer_dist.distributed.verification.sequences import Sequences
from composer_dist.distributed.verification.trial import check_groups, check_step
from composer_dist.distributed.verification.units import compare_units, fits
from composer_dist.structure.calling import Loss, example_batch
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.fingerprint import fingerprint
from composer_dist.tensors.inner import dense, local_part
from composer_dist.tensors.nested import map_tensors, named_tensors

Optimizers = Optimizer | Sequence[Optimizer] | None


def verify_model(
    model: nn.Module,
    reference: nn.Module | None = None,
    batch: Any = None,
    *,
    optimizer: Optimizers = None,
    loss: Loss | None = None,
) -> Verification:
    """Compare a prepared model with the unsharded one, and the ranks with each other. All ranks call it.

    Without a batch: no tensor is on the meta device or holds nan or infinity; all ranks hold the same values
    of what they have in common, bit for bit; ties are one tensor; every trainable parameter is in exactly one
    optimizer group, and a step of a copy of the optimizer moves it; the weights are the reference's.

    With a batch, one forward and backward of both models run with the same random numbers: each rank's
    outputs and those of every module, the loss, all gradients and their norm. They are compared by the norm
    of the difference relative to the expected one's, with a tolerance by the lowest dtype that a module
    returns (`TOLERANCE`). Each rank runs the reference on what the prepared model gets there, and the means
    of losses and gradients over the ranks are what the unsharded model computes of the whole batch. With
    tensor or context parallelism both models are in evaluation mode, because the parts of an activation draw
    other random numbers than the whole.

    Afterwards the model, its gradients, buffers, `training` flags and hooks, the optimizers and all random
    states are as before. Call it between steps. Each rank needs memory for the unsharded model with its
    gradients. Where a rank has less, and no reference is given, the prepared model runs first, in evaluation
    mode. Then its units, or its repeated blocks, are copied one after the other: each computes with what the
    prepared one got, and its outputs, the gradients of its inputs and those of its parameters are compared.
    The rest of the model runs with what the prepared units returned; its inputs to them, the loss and its
    gradients are compared too.

    Args:
        model: prepared by `parallelize_model`.
        reference: the unsharded model with the same weights, on every rank; None makes a plain copy of
            `model` from the gathered weights.
        batch: the arguments of forward, as a tensor, a tuple or a mapping; or what a `ComposerModel` takes.
            If all ranks pass the same, tensors whose first dimension is that of all others are cut among the
            ranks that train on different data, if their number divides it; else each rank's is its own
            part. Two integers, (sequences, tokens), stand for tokens for a transformers model.
        optimizer: one or several that hold the model's parameters.
        loss: `(outputs, batch) -> scalar`; None takes the loss that a `ComposerModel` or the outputs have,
            or else the mean square of the outputs.

    Returns:
        What was checked and what differs, the same on every rank.

    Raises:
        ParallelismError: the model is unusable, or `batch` cannot be given to it.
    """
    check_usable(model)
    mesh = mesh_of_world(model)
    agreement = Agreement(mesh.ranks if mesh else None)
    optimizers = as_tuple(optimizer)
    reshard(model)
    structure, found = read_structure(model), Findings()
    _check_values(structure, found)
    _check_ties(structure, reference, found)
    _check_replicas(structure, optimizers, agreement, found)
    if optimizers:
        check_groups(structure, optimizers, found)
        check_step(structure, optimizers, mesh, found)
    else:
        found.notes.append("the optimizer, because none was given")
    on_meta = agreement.reach(
        "the values", any(held.get().is_meta for held in structure.tensors.values()), any
    )
    if reference is not None and not on_meta:
        compare_weights(model, reference, found)
    if batch is None or on_meta:
        why = "tensors are on the meta device" if on_meta else "there is no batch"
        found.notes.append(f"outputs and gradients, because {why}")
    else:
        mine = _share(model, batch, mesh, agreement)
        on_host = int(per_host() or len(agreement.ranks))
        if reference is None and not agreement.reach("the memory", fits(structure, on_host), all):
            compare_units(model, mine, loss, mesh, found)
        else:
            _run_both(model, reference or plain_copy(model), mine, loss, mesh, found)
    ranks = agreement.ranks
    return unpacked(agreement.reach("the verification", found.packed(), lambda each: joined(each, ranks)))


def _run_both(
    model: nn.Module, reference: nn.Module, batch: Any, loss: Any, mesh: Mesh | None, found: Findings
) -> None:
    quiet = mesh is not None and (mesh.tp is not None or mesh.cp is not None)
    with as_before(model), as_before(reference), torch.enable_grad():
        _set_modes(model, reference, quiet)
        expected = trace(reference, batch, loss)
        got = trace(model, batch, loss)
        tolerance = compare_traces(got, expected, mesh, Sequences.of(model, batch, mesh), found)
        gradients = Gradients(model, mesh, tolerance, found)
        gradients.compare({name: p.grad for name, p in read_parameters(reference).items() if p.requires_grad})
        gradients.compare_norm()


def _set_modes(model: nn.Module, reference: nn.Module, quiet: bool) -> None:
    """Have the reference's modules train where the model's do; nothing trains if `quiet`."""
    modes = {name: module.training for name, module in read_structure(model).modules.items()}
    for name, module in read_structure(reference).modules.items():
        module.training = modes.get(name, module.training)
    if quiet:
        model.eval()
        reference.eval()


def _check_values(structure: Structure, found: Findings) -> None:
    for name, held in structure.tensors.items():
        tensor = held.get()
        found.count("value")
        if tensor.is_meta:
            found.wrong("value", name, "is on the meta device, without memory")
        elif tensor.is_floating_point() or tensor.is_complex():
            local = dense(local_part(tensor))
            if not bool(local.isfinite().all()):
                kind = "nan" if bool(local.isnan().any()) else "infinity"
                found.wrong("value", name, f"holds {kind}")


def _check_ties(structure: Structure, reference: nn.Module | None, found: Findings) -> None:
    """Names that were, or are in the reference, one tensor must be one here."""
    known = prepared.of(structure.modules[""])
    plan = known.plan if known else None
    ties = [tuple(names) for names in plan.ties] if plan else []
    if reference is not None:
        there = [held.info.names for held in read_structure(reference).tensors.values()]
        ties = [names for names in there if len(names) > 1]
    here = {name: first for first, held in structure.tensors.items() for name in held.info.names}
    for names in ties:
        found.count("tie")
        if len({here.get(name, name) for name in names}) > 1:
            found.wrong("tie", names[0], f"is no longer one tensor with {', '.join(names[1:])}")


def _check_replicas(
    structure: Structure, optimizers: Sequence[Optimizer], agreement: Agreement, found: Findings
) -> None:
    replica = replica_of(structure.modules[""])
    if replica is not None and replica.local_sgd is not None:
        found.notes.append("replicas, which local SGD lets differ between its averages")
        return
    held = dict(replicas.copies(structure, optimizers))
    for one in held.values():
        found.count(f"replica's {one.what}")
    for what, name, text in replicas.find(held, agreement):
        found.wrong(f"replica's {what}", name, text)


def _share(model: nn.Module, batch: Any, mesh: Mesh | None, agreement: Agreement) -> Any:
    """This rank's part of a batch, on the model's device."""
    batch = example_batch(model, batch)
    device = mesh.device if mesh else next((one.device for one in model.parameters()), torch.device("cpu"))
    mine = map_tensors(lambda name, one: one.to(device), batch)
    facts = [[name, fingerprint(one)] for name, one in named_tensors(mine)]
    same = agreement.reach("the batch", facts, lambda each: all(one == each[0] for one in each))
    data = mesh.sampler_kwargs() if mesh else {"num_replicas": 1, "rank": 0}
    count, number = data["num_replicas"], data["rank"]
    sizes = {one.shape[0] for _, one in named_tensors(mine) if one.ndim}
    if not same or len(sizes) != 1 or (size := sizes.pop()) % count:
        return mine
    return map_tensors(
        lambda name, one: one.narrow(0, size // count * number, size // count) if one.ndim else one, mine
    )
