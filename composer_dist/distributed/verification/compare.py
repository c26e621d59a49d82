"""One forward and backward of a prepared model beside those of an unsharded one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.distributed import prepared
from composer_dist.distributed.context_parallelism.context import context_parallel
from composer_dist.distributed.forwards import is_compiled
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.gather import full_tensors, gather
from composer_dist.distributed.prepared import named_parameters_canonical
from composer_dist.distributed.training.average_gradients import groups_of
from composer_dist.distributed.training.clipping import clip_grad_norm, local_gradient
from composer_dist.distributed.verification.around import seeded
from composer_dist.distributed.verification.result import Findings, measure, wide
from composer_dist.distributed.verification.sequences import Sequences
from composer_dist.structure.calling import Loss, call, loss_of, whole
from composer_dist.structure.structure import read_structure
from composer_dist.tensors.inner import dense
from composer_dist.tensors.nested import tensors_in

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


def trace(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Observed:
    """Run forward and backward with fixed random numbers; the gradients are in `.grad`.

    Args:
        around: entered for the forward.
    """
    found = Observed(torch.empty(0), [])
    mesh = prepared.prepared_mesh(model)
    with ExitStack() as stack:
        with ExitStack() as hooks:
            stack.enter_context(seeded())
            if mesh is not None and mesh.cp is not None:
                batch = stack.enter_context(context_parallel(model, batch))
            hooks.enter_context(_watched(model, found))
            hooks.enter_context(around())
            outputs = call(model, batch)
            total = loss_of(model, outputs, batch, loss, lambda one: one.square().mean())
        total.backward()
    found.loss = whole(total).double().cpu()
    found.outputs = [whole(one).detach() for one in tensors_in(outputs) if _has_fractions(one)]
    return found


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
                if _has_fractions(tensor) and not isinstance(tensor, DTensor) and tensor.numel():
                    found.modules[name, number, index] = _sampled(tensor)
                    dtype = tensor.dtype.to_real()
                    found.dtype = min(found.dtype, dtype, key=lambda one: -torch.finfo(one).eps)

        disabled: Callable[..., None] = torch.compiler.disable(hook)
        return disabled

    first = {name for name in structure.first.values() if name not in set(inside)}
    handles = [structure.modules[name].register_forward_hook(note(name)) for name in first]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def _sampled(tensor: Tensor) -> tuple[tuple[int, ...], Tensor, bool]:
    flat = tensor.detach().reshape(-1)
    step = -(-flat.numel() // _SAMPLES)
    return tuple(tensor.shape), flat[::step].to("cpu", copy=True), bool(flat.isfinite().all())


def compare_traces(
    found: Observed, expected: Observed, mesh: Mesh | None, sequences: Sequences, findings: Findings
) -> float:
    """Compare modules, outputs and losses, and return the tolerance.

    What modules return inside of a model that is cut may be a part, which is not compared.
    """
    lowest = max(found.dtype, expected.dtype, key=lambda one: torch.finfo(one).eps)
    tolerance = tolerance_of(lowest)
    if mesh is None or mesh.cp is None:
        _compare_modules(found, expected, tolerance, mesh is not None and mesh.tp is not None, findings)
    if len(found.outputs) != len(expected.outputs):
        findings.wrong("output", "", f"has {len(found.outputs)} tensors, not {len(expected.outputs)}")
    for index, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=False)):
        complete = sequences.output(one, other.shape)
        findings.compare("output", str(index), one if complete is None else complete, other, tolerance)
    findings.compare("loss", "", averaged(found.loss, mesh), averaged(expected.loss, mesh), tolerance)
    return tolerance


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference that counts as rounding; see `TOLERANCE`."""
    return TOLERANCE.get(dtype, _LOWEST)


def _compare_modules(
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


def averaged(tensor: Tensor, mesh: Mesh | None) -> Tensor:
    """The mean over all ranks of the mesh, in a tensor of its own."""
    mean = tensor.detach().clone()
    if mesh is not None:
        mean = mean.to(mesh.device)
        for group in groups_of(mesh.device_mesh):
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
    return mean


class Gradients:
    """The gradients of a prepared model after its backward, compared part by part; each is a collective."""

    def __init__(self, model: nn.Module, mesh: Mesh | None, tolerance: float, findings: Findings) -> None:
        plan = getattr(prepared.of(model), "plan", None)
        self._ignored = set(plan.replication.ignored) if plan and plan.replication else set()
        self._parameters = {name: p for name, p in named_parameters_canonical(model) if p.requires_grad}
        for parameter in self._parameters.values():
            local_gradient(parameter)  # a partial sum becomes whole
        kept = [one for name, one in self._parameters.items() if name not in self._ignored]
        self._norm, self._count = float(clip_grad_norm(kept, math.inf)), sum(one.numel() for one in kept)
        self._squares = 0.0
        self._mesh, self.tolerance, self.findings = mesh, tolerance, findings

    def compare(self, expected: Mapping[str, Tensor | None]) -> None:
        """Compare with this rank's of an unsharded model, of which the mean over the ranks is right."""
        names = [name for name in expected if name in self._parameters]
        here = {name: p.grad for name in names if (p := self._parameters[name]).grad is not None}
        found = dict(full_tensors(here, everywhere=True))
        rounding = 1.0 if self.tolerance > TOLERANCE[torch.float32] else 0.1  # of what is 0 but for rounding
        norm = self._norm if math.isfinite(self._norm) else 0.0
        for name in names:
            given, parameter = expected[name], self._parameters[name]
            one = torch.zeros(parameter.shape, device=parameter.device) if given is None else given
            if name not in self._ignored:
                one = averaged(one, self._mesh)
                self._squares += float(wide(one).abs().square().sum())
            mine = found.pop(name, None)
            mine = torch.zeros_like(one) if mine is None else mine
            least = rounding * norm * math.sqrt(one.numel() / max(self._count, 1))
            self.findings.compare("gradient", name, mine, one.to(mine.device), self.tolerance, least)

    def compare_norm(self) -> None:
        """Compare the norm of all gradients, after the gradients."""
        norm, expected = torch.tensor(self._norm), torch.tensor(math.sqrt(self._squares))
        self.findings.compare("gradient norm", "", norm, expected, self.tolerance)


def read_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by first name."""
    return {name: held.get() for name, held in read_structure(model).parameters.items()}


def compare_weights(model: nn.Module, reference: nn.Module, findings: Findings) -> None:
    """Compare every parameter and buffer with the reference's, which must be equal."""
    mine, other = read_structure(model).tensors, read_structure(reference).tensors
    for name in sorted(mine.keys() ^ other.keys()):
        where = "the reference" if name in other else "the model"
        findings.wrong("weight", name, f"is in {where} only")
    for name in sorted(mine.keys() & other.keys()):  # `gather` is a collective, and a set has any order
        findings.compare("weight", name, dense(gather(mine[name].get())), dense(other[name].get()), 0.0)
