"""One forward and backward of a prepared model beside those of an unsharded one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.composer_model import ComposerModel
from composer_dist.distributed import prepared
from composer_dist.distributed.context_parallelism.context import context_parallel
from composer_dist.distributed.forwards import is_compiled
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.gather import full_tensors, gather
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.training.average_gradients import groups_of
from composer_dist.distributed.training.clipping import clip_grad_norm, local_gradient
from composer_dist.distributed.verification.around import seeded
from composer_dist.distributed.verification.result import Findings, measure
from composer_dist.structure.structure import read_structure
from composer_dist.tensors.inner import dense
from composer_dist.tensors.nested import tensors_in

Loss = Callable[[Any, Any], Any]
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest relative difference that counts as rounding, by the lowest precision that was used; 0.3 for
those of 8 bits. Each is some tens of its dtype's steps, which the layers of a model add up to."""
_LOWEST = 0.3
_SAMPLES = 1 << 14
"""Elements of a module's output that are kept, evenly spaced."""


@dataclass
class Observed:
    """What a forward and backward gave."""

    loss: Tensor
    outputs: list[Tensor]
    modules: dict[tuple[str, int, int], tuple[tuple[int, ...], Tensor, bool]] = field(default_factory=dict)
    """Module, number of its call and of its output to shape, samples and whether all is finite."""
    dtype: torch.dtype = torch.float64
    """The lowest precision of a module's output."""


def trace(model: nn.Module, batch: Any, loss: Loss | None) -> Observed:
    """Run forward and backward with fixed random numbers; the gradients are in `.grad`."""
    found = Observed(torch.empty(0), [])
    mesh = prepared.prepared_mesh(model)
    with ExitStack() as stack:
        with ExitStack() as hooks:
            stack.enter_context(seeded())
            if mesh is not None and mesh.cp is not None:
                batch = stack.enter_context(context_parallel(model, batch))
            hooks.enter_context(_watched(model, found))
            outputs = call(model, batch)
            total = total_loss(model, outputs, batch, loss)
        total.backward()
    found.loss = _plain(total).double().cpu()
    found.outputs = [_plain(one) for one in tensors_in(outputs) if one.is_floating_point()]
    return found


def call(model: nn.Module, batch: Any) -> Any:
    """The outputs for a batch: forward's arguments as a tuple or mapping, or its only one."""
    if isinstance(model, ComposerModel):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def total_loss(model: nn.Module, outputs: Any, batch: Any, loss: Loss | None) -> Tensor:
    """The loss as one number: the model's own, that of `loss`, or the mean square of the outputs."""
    if loss is not None:
        value = loss(outputs, batch)
    elif isinstance(model, ComposerModel):
        value = model.loss(outputs, batch)
    else:
        value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if value is None:
            floats = (one for one in tensors_in(outputs) if one.is_floating_point())
            value = [_plain(one).float().square().mean() for one in floats]
    parts = [_plain(one).sum() for one in tensors_in(value)]
    return torch.stack([one.to(parts[0].device) for one in parts]).sum()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _watched(model: nn.Module, found: Observed) -> Iterator[None]:
    """Inside, keep samples of what modules return; not inside of compiled ones, which hooks would change."""
    structure, calls = read_structure(model), Counter[str]()
    compiled = [name for name, module in structure.modules.items() if is_compiled(module)]
    inside = [name for name in structure.modules for outer in compiled if name.startswith(f"{outer}.")]

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            number = calls[name]
            calls[name] += 1
            for index, tensor in enumerate(tensors_in(output)):
                if tensor.is_floating_point() and not isinstance(tensor, DTensor) and tensor.numel():
                    found.modules[name, number, index] = _sampled(tensor)
                    found.dtype = min(found.dtype, tensor.dtype, key=lambda one: -torch.finfo(one).eps)

        disabled: Callable[..., None] = torch.compiler.disable(hook)
        return disabled

    first = {name for name in structure.first.values() if name not in set(inside)}
    handles = [structure.modules[name].register_forward_hook(note(name)) for name in first]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _sampled(tensor: Tensor) -> tuple[tuple[int, ...], Tensor, bool]:
    flat = tensor.detach().reshape(-1)
    step = -(-flat.numel() // _SAMPLES)
    return tuple(tensor.shape), flat[::step].to("cpu", copy=True), bool(flat.isfinite().all())


def compare_traces(found: Observed, expected: Observed, mesh: Mesh | None, findings: Findings) -> float:
    """Compare modules, outputs and losses, and return the tolerance.

    Outputs of other shapes are parts where tensor parallelism cuts activations; context parallelism cuts all.
    """
    lowest = max(found.dtype, expected.dtype, key=lambda one: torch.finfo(one).eps)
    tolerance = tolerance_of(lowest)
    if mesh is None or mesh.cp is None:
        _compare_outputs(found, expected, tolerance, mesh is not None and mesh.tp is not None, findings)
    else:
        findings.notes.append("outputs, of which each rank of a sequence has its part")
    findings.compare("loss", "", averaged(found.loss, mesh), averaged(expected.loss, mesh), tolerance)
    return tolerance


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference that counts as rounding; see `TOLERANCE`."""
    return TOLERANCE.get(dtype, _LOWEST)


def _compare_outputs(
    found: Observed, expected: Observed, tolerance: float, cut: bool, findings: Findings
) -> None:
    for number, (key, (shape, sample, finite)) in enumerate(found.modules.items()):
        other = expected.modules.get(key)
        if other is None or (cut and other[0] != shape):
            continue
        findings.count("module output")
        differs = other[0] != shape or not measure(sample, other[1])[1] <= tolerance
        if differs or (other[2] and not finite):
            findings.modules.append((number, key[0]))
            break
    if len(found.outputs) != len(expected.outputs):
        findings.wrong("output", "", f"has {len(found.outputs)} tensors, not {len(expected.outputs)}")
    for index, (one, other_one) in enumerate(zip(found.outputs, expected.outputs, strict=False)):
        if not cut or one.shape == other_one.shape:
            findings.compare("output", str(index), one, other_one, tolerance)


def averaged(tensor: Tensor, mesh: Mesh | None) -> Tensor:
    """The mean over all ranks of the mesh, in a tensor of its own."""
    mean = tensor.detach().clone()
    if mesh is not None:
        mean = mean.to(mesh.device)
        for group in groups_of(mesh.device_mesh):
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
    return mean


def compare_gradients(
    model: nn.Module, reference: nn.Module, mesh: Mesh | None, tolerance: float, findings: Findings
) -> None:
    """Compare every gradient, and the norm of all, with the mean of the reference's over the ranks."""
    plan = getattr(prepared.of(model), "plan", None)
    ignored = set(plan.replication.ignored) if plan and plan.replication else set()
    wanted = {name: p for name, p in read_parameters(reference).items() if p.requires_grad}
    parameters = {name: p for name, p in named_parameters_canonical(model) if p.requires_grad}
    gradients: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        local_gradient(parameter)  # a partial sum becomes whole
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    expected = {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in wanted.items()
        if name in parameters
    }
    expected = {name: one if name in ignored else averaged(one, mesh) for name, one in expected.items()}
    kept = [one for name, one in expected.items() if name not in ignored]
    total = math.sqrt(sum(float(one.double().square().sum()) for one in kept))
    count = max(sum(one.numel() for one in kept), 1)
    rounding = (
        1.0 if tolerance > TOLERANCE[torch.float32] else 0.1
    )  # what is 0 but for rounding is a part of it
    norm = float(clip_grad_norm([parameters[name] for name in parameters if name not in ignored], math.inf))
    found = dict(full_tensors(gradients, everywhere=True))
    for name, one in expected.items():
        here = found.pop(name, None)
        if here is None:
            here = torch.zeros_like(one)
        least = rounding * total * math.sqrt(one.numel() / count)
        findings.compare("gradient", name, here, one.to(here.device), tolerance, least)
    findings.compare("gradient norm", "", torch.tensor(norm), torch.tensor(total), tolerance)


def read_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by first name."""
    return {name: held.get() for name, held in read_structure(model).parameters.items()}


def compare_weights(model: nn.Module, reference: nn.Module, findings: Findings) -> None:
    """Compare every parameter and buffer with the reference's, which must be equal."""
    mine, other = read_structure(model).tensors, read_structure(reference).tensors
    for name in mine.keys() ^ other.keys():
        where = "the reference" if name in other else "the model"
        findings.wrong("weight", name, f"is in {where} only")
    for name in mine.keys() & other.keys():
        findings.compare("weight", name, dense(gather(mine[name].get())), dense(other[name].get()), 0.0)
