"""Compares one unit after the other with its plain copy, where the whole model does not fit into memory.

The prepared model runs forward and backward once, and its units' inputs, outputs and gradients are kept.
Then a plain copy of the rest of the model runs. In place of each unit, a plain copy of that unit computes
with the unit's inputs; it is compared and freed, and the rest continues with the unit's outputs. So no rank
holds more of the unsharded model than the rest and one unit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from composer_dist.distributed import prepared
from composer_dist.distributed.forwards import is_compiled
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.verification.around import as_before
from composer_dist.distributed.verification.compare import Gradients, compare_traces, tolerance_of, trace
from composer_dist.distributed.verification.plain import plain_copy
from composer_dist.distributed.verification.record import CallRecorder, UnitCall, arguments
from composer_dist.distributed.verification.result import Findings
from composer_dist.distributed.verification.sequences import Sequences
from composer_dist.structure.blocks import structural_units
from composer_dist.structure.calling import Loss
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.nested import map_tensors, named_tensors, replace_tensors, tensors_in


def fits(structure: Structure, ranks: int) -> bool:
    """Whether this rank has memory for all parameters and gradients; `ranks` share the memory of its host."""
    parameters = [held.info for held in structure.parameters.values()]
    wanted = sum(one.nbytes * (2 if one.requires_grad else 1) for one in parameters)
    device = next((held.get().device for held in structure.tensors.values()), torch.device("cpu"))
    if device.type not in ("cpu", "meta"):
        free: int = torch.get_device_module(device).mem_get_info(device)[0]
        return wanted < free
    return bool(wanted * ranks < psutil.virtual_memory().available)


def compare_units(
    model: nn.Module, batch: Any, loss: Loss | None, mesh: Mesh | None, found: Findings
) -> None:
    """Compare outputs, the loss and gradients of each unit, and of what is in none; a collective.

    Both run in evaluation mode: a unit's copy would draw other random numbers than the unit.
    """
    names = _units(read_structure(model))
    found.notes.append(
        "the whole model at once, which does not fit into memory: each unit is compared for what it gets"
        if names
        else "what the unsharded model needs in memory, which this rank may not have: it has no units"
    )
    with as_before(model), torch.enable_grad():
        model.eval()
        recorder = CallRecorder(model, names)
        got = trace(model, batch, loss, recorder.recording)
        gradients = Gradients(model, mesh, tolerance_of(got.dtype), found)
        places = {key[0]: number for number, key in reversed([*enumerate(got.modules)])}
        sequences, shared = Sequences.of(model, batch, mesh), dict[str, Tensor | None]()
        rest = plain_copy(model, without=names).eval()
        inside, units = read_structure(rest).modules, []
        for name in names:
            place = places.get(name, len(places))
            units.append(_OneUnit(model, name, recorder.calls[name], sequences, gradients, shared, place))
            vars(inside[name])["forward"] = units[-1]
        expected = trace(rest, batch, loss)
        compare_traces(got, expected, mesh, sequences, found)
        for unit in units:
            unit.finish()
        for name, held in read_structure(rest).parameters.items():
            if not held.get().is_meta:
                _add(shared, name, held.get().grad)
        gradients.compare(shared)
        gradients.compare_norm()


def _add(gradients: dict[str, Tensor | None], name: str, one: Tensor | None) -> None:
    before = gradients.get(name)
    gradients[name] = one if before is None else before if one is None else before + one


def _units(structure: Structure) -> list[str]:
    """The innermost units, or else the model's repeated blocks; none of them is inside of compiled code."""
    plan = getattr(prepared.of(structure.modules[""]), "plan", None)
    units = [name for unit in (plan.units if plan else ()) for name in unit.modules if name]
    names = units or [name for name, _ in structural_units(structure)]
    outer = {above for name in names for above in ancestors(name) if above != name}
    compiled = {name for name, module in structure.modules.items() if is_compiled(module)}
    return [
        name
        for name in dict.fromkeys(names)
        if name not in outer and not any(one in compiled for one in ancestors(name) if one != name)
    ]


@dataclass
class _OneUnit:
    """The forward of a unit in the plain copy of the rest."""

    model: nn.Module
    name: str
    calls: list[UnitCall]
    sequences: Sequences
    gradients: Gradients
    shared: dict[str, Tensor | None]
    """The gradients of parameters that several units, or a unit and the rest, have."""
    place: int
    """Where the unit comes among the modules of the model."""
    plain: nn.Module | None = None
    finished: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compare the unit, and return what it has returned."""
        if not self.calls:
            self.gradients.findings.wrong("unit output", self.name, "is called more often by the plain model")
            return plain_copy(self.model, self.name).eval()(*args, **kwargs)
        call, names = self.calls.pop(0), dict(named_tensors(arguments(args, kwargs)))
        inputs = {key: self._input(key, one, call) for key, one in names.items()}
        if self.plain is None:
            self.plain = plain_copy(self.model, self.name).eval()
        with torch.enable_grad():
            named = map_tensors(lambda key, _: inputs[key], arguments(args, kwargs))
            numbered = [named.pop(index) for index in range(len(args))]
            output = self.plain(*numbered, **named)
            wanted = [*tensors_in(output)]
        outputs = [self._output(index, one, call) for index, one in enumerate(wanted)]
        gradients = self._backward(call, inputs, wanted)
        if not self.calls:
            self.finish()
        spliced = iter(self._spliced(call, names, gradients, outputs))
        return replace_tensors(lambda _: next(spliced), output)

    def finish(self) -> None:
        """Compare the gradients of the parameters that no other module has, and add those of others."""
        if self.finished:
            return
        self.finished = True
        if self.calls:
            self.gradients.findings.wrong("unit output", self.name, "is called less often by the plain model")
        here = {} if self.plain is None else {key: p.grad for key, p in self.plain.named_parameters()}
        own: dict[str, Tensor | None] = {}
        for first, held in read_structure(self.model).parameters.items():
            names = [one.removeprefix(f"{self.name}.") for one in held.info.names]
            mine = [short for short, one in zip(names, held.info.names, strict=True) if short != one]
            if mine:
                _add(own if len(mine) == len(names) else self.shared, first, here.get(mine[0]))
        self.gradients.compare(own)
        self.plain = None

    def _compare(self, what: str, name: str, found: Tensor, expected: Tensor) -> bool:
        findings, tolerance = self.gradients.findings, self.gradients.tolerance
        return findings.compare(what, f"{self.name} {name}", found, expected, tolerance)

    def _input(self, key: str, given: Tensor, call: UnitCall) -> Tensor:
        mine = call.inputs.get(key)
        whole = None if mine is None else self.sequences.value(mine, given.shape)
        if whole is None:  # such as a table of positions, which is computed for a part and for the whole
            if given.requires_grad:
                self.gradients.findings.notes.append(f"input {key} of {self.name}, which has another shape")
            return given.detach()
        self._compare("unit input", key, whole, given)
        whole = whole.to(given.dtype)
        return whole.requires_grad_() if key in call.input_gradients else whole

    def _output(self, index: int, wanted: Tensor, call: UnitCall) -> Tensor:
        whole = self.sequences.value(call.outputs[index], wanted.shape)
        if whole is None:
            whole = call.outputs[index]
        if not self._compare("unit output", str(index), whole, wanted):
            self.gradients.findings.modules.append((self.place, self.name))
        return whole.to(wanted.dtype)

    def _backward(
        self, call: UnitCall, inputs: Mapping[str, Tensor], outputs: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The gradients that the unit has given to its inputs."""
        ends: list[Tensor] = []
        given: list[Tensor] = []
        for index, mine in call.output_gradients.items():
            if mine is not None and outputs[index].requires_grad:
                whole = self.sequences.gradient(mine, outputs[index].shape)
                if whole is not None:
                    ends.append(outputs[index])
                    given.append(whole.to(outputs[index].dtype))
        torch.autograd.backward(ends, given)
        found = {}
        for key, mine in call.input_gradients.items():
            if (one := inputs.get(key)) is None or not one.requires_grad:
                continue
            expected = torch.zeros_like(one) if one.grad is None else one.grad
            whole = None if mine is None else self.sequences.gradient(mine, one.shape)
            found[key] = torch.zeros_like(one) if whole is None else whole.to(one.dtype)
            self._compare("unit gradient", f"input {key}", found[key], expected)
        return found

    def _spliced(
        self,
        call: UnitCall,
        given: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        outputs: list[Tensor],
    ) -> list[Tensor]:
        """The outputs, whose backward gives the unit's gradients to what it was given."""
        numbers = [*call.output_gradients]
        names = [key for key in gradients if given[key].requires_grad]

        def backward(*arrived: Tensor) -> list[Tensor]:
            for number, one in zip(numbers, arrived, strict=True):
                mine = call.output_gradients[number]
                whole = None if mine is None else self.sequences.gradient(mine, one.shape)
                here = torch.zeros_like(one) if whole is None else whole
                self._compare("unit gradient", f"output {number}", here, one)
            return [gradients[key] for key in names]

        if numbers:
            ends, link = [outputs[number] for number in numbers], torch.ones((), requires_grad=True)
            joined = _Spliced.apply(backward, ends, link, *(given[key] for key in names))  # type: ignore[no-untyped-call]
            for number, one in zip(numbers, joined, strict=True):
                outputs[number] = one
        return outputs


class _Spliced(torch.autograd.Function):
    """Given outputs, and a function for the gradients of inputs."""

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., list[Tensor]], outputs: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = backward
        return tuple(one.detach() for one in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.call(*gradients)
