"""A step of training on tensors without values: what is allocated and freed, and when.

The model is copied with fake tensors in the place of its own, its activations are recomputed as the plan
says, and one forward and backward run. Nothing is computed; Python runs as it will in training.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_dist import _torch
from composer_dist.composer_model import ComposerModel
from composer_dist.distributed.activations import recompute as activations
from composer_dist.distributed.feature_plan import Kind, Moment, StepEvent, Work
from composer_dist.distributed.plan.decisions import Decisions, Subject
from composer_dist.distributed.plan.work import work_of
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.families import is_a, values_unknown, vocabulary_of
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.nested import map_tensors, tensors_in

Run = Callable[[nn.Module], tuple[Tensor, Any]]
"""Calls a model, and returns its loss and its outputs, which live as long as its backward."""
Loss = Callable[[Any, Any], Tensor]
"""Takes the outputs and the batch."""


def traced(subject: Subject, plan: Decisions, batch: Any, loss: Loss | None) -> list[StepEvent]:
    """What `trace_step` says of a batch, traced once: the last few traces are kept with the subject.

    Nothing that a trace needs depends on the sizes of the mesh, on what is resharded, or on what is
    offloaded, so plans of one subject that differ in these alone share their traces.
    """
    shapes = map_tensors(lambda _, one: (tuple(one.shape), one.dtype), batch)  # type: ignore[arg-type, return-value]
    training = [one.training for one in subject.structure.modules.values()]
    key = repr((_decisive(plan), shapes, training))
    kept = subject.traces.pop(key, None)
    if kept is None or kept[0] != loss:
        kept = loss, trace_step(subject.structure, plan, run_of(batch, loss))
    subject.traces[key] = kept
    for oldest in [*subject.traces][:-_MOST_TRACES]:
        del subject.traces[oldest]
    return kept[1]


_MOST_TRACES = 4
"""That are kept; one of a model of 8 billion parameters takes a few MB."""


def _decisive(plan: Decisions) -> Any:
    """What a trace depends on."""
    units = [
        (one.modules, one.parameters, one.mp_policy.param_dtype, one.mp_policy.cast_forward_inputs)
        for one in plan.units
    ]
    return units, plan.replication, plan.tensor_parallel, plan.context_parallelism, plan.activations


def trace_step(structure: Structure, plan: Decisions, run: Run) -> list[StepEvent]:
    """What one forward and backward of a model allocate and free, and when the units' begin and end.

    Args:
        structure: of a model that is not prepared; its tensors may be on the meta device.
        run: is called with a copy of the model.

    Raises:
        ParallelismValueError: the model's forward depends on values.
    """
    policies = {name: unit.mp_policy for unit in plan.units for name in unit.parameters}
    fakes: dict[str, Any] = {}
    mode = _torch.fake_mode()
    with mode, torch.device("cpu"):
        for name, held in structure.tensors.items():
            dtype = policies[name].param_dtype if name in policies else None
            fake: Any = torch.empty(held.info.shape, dtype=dtype or held.info.dtype)
            if held.info.kind == "parameter":
                fake = nn.Parameter(fake, requires_grad=held.info.requires_grad)
            fakes[name] = fake
    memo: dict[int, Any] = {id(held.get()): fakes[name] for name, held in structure.tensors.items()}
    copied = read_structure(copy.deepcopy(structure.modules[""], memo))
    copied = activations.apply(copied, plan.activations)
    record = _Record({unit.name: [fakes[name] for name in unit.parameters] for unit in plan.units})
    for unit in plan.units:
        for name in unit.modules:
            record.watch(unit.name, copied.modules[name], unit.mp_policy)
    replica = plan.replication
    low = replica.mp_policy.param_dtype if replica else None
    for name in replica.averaged if replica else ():
        if fakes[name].requires_grad:
            view = replica is not None and replica.arguments["gradient_as_bucket_view"]
            fakes[name].register_post_accumulate_grad_hook(partial(record.take_gradient, name, view))
    logits = vocabulary_of(structure.modules[""])
    allocations = _Allocations(record.note, list(fakes.values()), logits, record.compute)
    record.note("begin")
    with mode, torch.device("cpu"), values_unknown(), allocations:
        try:
            with torch.autocast("cpu", dtype=low) if low else nullcontext():
                loss, outputs = run(copied.modules[""])
            record.phase = "backward"
            loss.backward()
            record.finish()
            del loss, outputs
        except Exception as error:
            if not _torch.needs_values(error):
                raise
            raise ParallelismValueError(
                f"{record.where or 'The root'} cannot be traced, because its {record.phase} depends on the "
                f"values of tensors ({error}). Without batch=, what a rank holds is known all the same."
            ) from error
    return record.events


@dataclass
class _Record:
    """The events so far; the hooks of units run when FSDP2's would."""

    parameters: Mapping[str, Sequence[Tensor]]
    events: list[StepEvent] = field(default_factory=list)
    phase: str = "forward"
    _inside: list[str] = field(default_factory=list)
    """The units whose forwards or backwards run, the innermost last."""
    _open: list[str] = field(default_factory=list)
    """Those whose gradients are still to be reduced, in the order of their forwards."""

    @property
    def where(self) -> str:
        """The unit that runs."""
        return self._inside[-1] if self._inside else ""

    def note(self, moment: Moment, nbytes: int = 0, kind: Kind = "activations") -> None:
        """Add an event of the unit that runs."""
        self.events.append(StepEvent(moment, self.phase, self.where, nbytes, kind))

    def compute(self, work: Work) -> None:
        """Add an operator of the unit that runs; in backward, only what is recomputed has gradients."""
        work = work._replace(recomputed=self.phase == "backward" and torch.is_grad_enabled())
        self.events.append(StepEvent("compute", self.phase, self.where, work=work))

    def watch(self, unit: str, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Add hooks to a module of a unit."""
        module.register_forward_pre_hook(partial(self._enter, unit, policy), with_kwargs=True, prepend=True)
        module.register_forward_hook(partial(self._leave, unit))

    def take_gradient(self, name: str, moves: bool, parameter: Tensor) -> None:
        """A parameter's gradient is complete; if it `moves`, it is copied into a bucket."""
        self.events.append(StepEvent("gradient", self.phase, self.where, name=name))
        if moves:
            parameter.grad = None

    def _enter(
        self, unit: str, policy: MixedPrecisionPolicy, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        self._inside.append(unit)
        self.note("before forward")
        given = (args, kwargs)
        if (dtype := policy.param_dtype) is not None and policy.cast_forward_inputs:
            given = map_tensors(lambda _, one: one.to(dtype) if one.is_floating_point() else one, given)
        if unit not in self._open:
            self._open.append(unit)
        trained = [one for one in tensors_in(given) if one.requires_grad]
        if not trained:
            return given
        passed = _AfterBackward.apply(partial(self._reduce, unit), *trained)  # type: ignore[no-untyped-call]
        others = dict(zip(map(id, trained), passed, strict=True))
        return map_tensors(lambda _, one: others.get(id(one), one), given)

    def _leave(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        self.note("after forward")
        self._inside.pop()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._need, unit))

    def _need(self, unit: str, gradient: Tensor) -> None:
        if unit in self._open and unit not in self._inside:
            self._inside.append(unit)
            self.note("before backward")

    def _reduce(self, unit: str) -> None:
        if unit not in self._open:
            return
        self._open.remove(unit)
        if unit in self._inside:
            self._inside.remove(unit)
        self._inside.append(unit)
        self.note("before reduction")
        for parameter in self.parameters[unit]:
            parameter.grad = None
        self.note("after reduction")
        self._inside.pop()

    def finish(self) -> None:
        """The backward has ended; units whose inputs need no gradients reduce theirs now."""
        for unit in list(self._open):
            self._reduce(unit)
        self.note("after backward")


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on, and calls a function when the backward has come to them."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call()
        return None, *gradients


class _Allocations(_torch.TorchDispatchMode):
    """Notes the storages that operators make, and when they are gone."""

    def __init__(
        self,
        note: Callable[..., None],
        known: Sequence[Tensor] = (),
        logits: int | None = None,
        compute: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._logits, self._compute = note, logits, compute
        self._unvalued = _torch.Unvalued()
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self._unvalued(func, args, kwargs or {})
        if self._compute is not None and (work := work_of(func, args, kwargs or {}, made)) is not None:
            self._compute(work)
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                is_logits = self._logits is not None and tensor.dim() > 1 and tensor.shape[-1] == self._logits
                noted = storage.nbytes(), "logits" if is_logits else "activations"
                self._note("allocate", *noted)
                weakref.finalize(storage, self._note, "free", *noted)
        return made


def run_of(batch: Any, loss: Loss | None) -> Run:
    """How the traced model is called."""
    shape = batch if isinstance(batch, tuple) and all(isinstance(one, int) for one in batch) else None

    def run(copied: nn.Module) -> tuple[Tensor, Any]:
        data = (
            _example(copied, shape)
            if shape
            else map_tensors(lambda _, one: torch.empty_like(one, device="cpu"), batch)
        )
        if isinstance(copied, ComposerModel):
            outputs = copied(data)
            return _total(copied.loss(outputs, data)), outputs
        args, kwargs = (
            ((), data) if isinstance(data, Mapping) else (data if isinstance(data, tuple) else (data,), {})
        )
        outputs = copied(*args, **kwargs)
        return _total(loss(outputs, data) if loss else _loss_of(outputs)), outputs

    return run


def _example(model: nn.Module, shape: tuple[int, ...]) -> Any:
    """Token ids and labels of a shape, for models of transformers."""
    found = [one for one in model.modules() if is_a(one, "PreTrainedModel")]
    if not found or len(shape) != 2:
        raise ParallelismValueError(
            f"batch={shape} is a number of sequences and of tokens for a model of transformers. Give "
            f"{type(model).__name__} example inputs: a tensor, a tuple, or a mapping of them, on any device."
        )
    ids = torch.zeros(shape, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def _loss_of(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    return [one.float().mean() for one in tensors_in(outputs) if one.is_floating_point()]


def _total(loss: Any) -> Tensor:
    return sum(one.sum() for one in tensors_in(loss))  # type: ignore[return-value]


@contextmanager
def storages_made(known: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
    """Inside, storages that operators make are counted, but for `known`; yields what tells the most bytes."""
    now = most = 0

    def note(moment: Moment, nbytes: int, kind: Kind) -> None:
        nonlocal now, most
        now += nbytes if moment == "allocate" else -nbytes
        most = max(most, now)

    with _Allocations(note, known):
        yield lambda: most
