"""The events of a traced step: hooks of units that run when FSDP2's would, and allocations of operators."""

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed.feature_plan import Kind, Moment, StepEvent, Transfer, Work
from composer_dist.distributed.plan.work import work_of
from composer_dist.tensors.nested import map_tensors, tensors_in

HOST = torch.device("meta")
"""The device of tensors in host memory, where a step of an accelerator is traced on the CPU."""


@dataclass
class StepRecord:
    """The events so far; the hooks of units run when FSDP2's would."""

    sizes: Mapping[str, int]
    """Of the mesh."""
    parameters: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Of each unit."""
    events: list[StepEvent] = field(default_factory=list)
    phase: str = "forward"
    _inside: list[str] = field(default_factory=list)
    """The units whose forwards or backwards run, the innermost last."""
    _open: list[str] = field(default_factory=list)
    """Those whose gradients are still to be reduced, in the order of their forwards."""
    _trained: set[int] = field(default_factory=set)
    """The ids of parameters whose gradients were reduced."""

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

    def send(self, collective: Any, dimension: str, nbytes: int) -> None:
        """Add a collective of the model's own operators."""
        sent = Transfer(collective, dimension, self.sizes[dimension], nbytes)
        self.events.append(StepEvent("send", self.phase, self.where, sent=sent))

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
            if parameter.grad is not None:
                self._trained.add(id(parameter))
            parameter.grad = None
        self.note("after reduction")
        self._inside.pop()

    def finish(self, sharded: Mapping[str, Tensor]) -> None:
        """The backward has ended; units whose inputs need no gradients reduce theirs now.

        Args:
            sharded: the units' parameters, by name.
        """
        for unit in list(self._open):
            self._reduce(unit)
        self.note("after backward")
        for name, one in sharded.items():
            if one.requires_grad and one.grad is None and id(one) not in self._trained:
                self.events.append(StepEvent("no gradient", self.phase, "", name=name))


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


class Allocations(_torch.TorchDispatchMode):
    """Notes the storages that operators make, when they are gone, and what is computed and sent."""

    def __init__(
        self,
        note: Callable[..., None],
        known: Sequence[Tensor] = (),
        logits: Container[int | None] = (),
        record: StepRecord | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note, self._logits, self._record = note, logits, record
        self._unvalued = _torch.Unvalued()
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            # DTensor looks up how to split the result, with tensors of its own, which do not count.
            func(*args, **(kwargs or {}))
            return NotImplemented  # now it calls operators on its part
        made = self._unvalued(func, args, kwargs or {})
        if self._record is not None and (work := work_of(func, args, kwargs or {}, made)) is not None:
            self._record.compute(work)
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                noted = storage.nbytes(), self._kind(tensor)
                self._note("allocate", *noted)
                weakref.finalize(storage, self._note, "free", *noted)
        if self._record is not None and (sent := _torch.functional_collective(func, args, made)):
            self._record.send(*sent)
        return made

    def _kind(self, tensor: Tensor) -> Kind:
        if tensor.device == HOST:
            return "host"
        is_logits = tensor.dim() > 1 and tensor.shape[-1] in self._logits
        return "logits" if is_logits else "activations"


@contextmanager
def storages_made(known: Sequence[Tensor]) -> Iterator[Callable[[], int]]:
    """Inside, storages that operators make are counted, except `known`; yields a function for the peak."""
    now = most = 0

    def note(moment: Moment, nbytes: int, kind: Kind) -> None:
        nonlocal now, most
        now += nbytes if moment == "allocate" else -nbytes
        most = max(most, now)

    with Allocations(note, known):
        yield lambda: most
