"""Checks at the first step that a model computes the same when its sequence is split.

Only attention receives keys and values from all ranks, so everything else must work on each position
separately. To check this, attention is replaced by a function of a single position, and the model runs on the
first few positions of a batch twice: on all of them, and on this rank's. The intermediate results must agree;
the error names the first module where they do not. The mean of the parts' losses must be the loss of the
whole. This costs two small forwards per model, and two more in evaluation mode if it draws random numbers in
training, such as dropout's.

Parameters whose elements are all equal have random values during the check; see `without_constants`.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.distributed.context_parallelism.attention import (
    AttentionCall,
    SequenceSplit,
    attention_as,
    check_call,
)
from composer_dist.distributed.context_parallelism.batch import IGNORED, Splitter
from composer_dist.distributed.context_parallelism.constants import without_constants
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import LostRankError, ParallelismValueError
from composer_dist.random_states import places, set_aside
from composer_dist.structure.families import class_name
from composer_dist.structure.kept import modes_kept, values_kept
from composer_dist.structure.names import canonical_name
from composer_dist.tensors.inner import local_part
from composer_dist.tensors.nested import named_tensors, tensors_in

_PER_BLOCK = 2
"""Positions per block in the proof."""
_TOLERANCE, _COARSE, _COARSEST = 1e-4, 0.02, 0.2
"""Relative to a tensor's largest element; the second with half precision or TF32, the third with float8.

Both forwards compute the same with other numbers of rows, so their rounding differs little; float8's scales
depend on all positions.
"""


def prove(splitter: Splitter, batch: Any, layout: SequenceSplit, mesh: Mesh, cp: DeviceMesh) -> None:
    """Compare a model's results for a few positions with those for this rank's part. All ranks call it."""
    agreement = Agreement(mesh.ranks)
    with agreement.together("the batch of context parallelism"):
        blocks = layout.ranks * len(layout.blocks(0))
        short = min(layout.length, blocks * _PER_BLOCK)
        small = SequenceSplit(short, layout.ranks, layout.rank, layout.balanced)
        whole = _labeled(splitter, batch, splitter.shorten(batch, layout.length, short), small)
        part = splitter.split(whole, small)
        calls = [_call(splitter, one, part) for one in (whole, part)]
    _check_same_batch(batch, cp, agreement)
    model = splitter.model
    try:
        with _eagerly(), without_constants(model), torch.no_grad(), modes_kept(model):
            expected, found = _traces(splitter, calls, small, mesh.device)
            if agreement.reach("random numbers", expected.random or found.random, any):
                for module in model.modules():
                    module.training = False  # `eval` may also merge adapters
                expected, found = _traces(splitter, calls, small, mesh.device)
    except ParallelismValueError as error:  # maybe on this rank alone
        agreement.leave(error, "the check of context parallelism")
        raise
    means = _mean_scalars(found, cp)
    with agreement.together("the proof of context parallelism"):
        _compare(expected, found, means, model)


@dataclass
class _Trace:
    """The results of a model at this rank's positions."""

    layout: SequenceSplit
    part: bool = False
    """Whether the model runs on this rank's positions only."""
    steps: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """In order: the place, the number of earlier passes, and the values at this rank's positions."""
    output: Any = None
    refused: str = ""
    """The first reason why the model cannot be split."""
    random: bool = False
    """Whether the model has drawn random numbers."""
    tolerance: float = field(default_factory=lambda: _COARSE if _takes_tf32() else _TOLERANCE)
    _inside: list[str] = field(default_factory=list)
    _passes: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's steps are recorded, and attention sees one position at a time."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                name = canonical_name(name) or class_name(model)
                stack.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                stack.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            stack.enter_context(attention_as(self._attend))
            yield

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model; an error on so few positions means that it cannot be split."""
        if any(type(module).__name__ == "Float8Linear" for module in model.modules()):
            self.tolerance = _COARSEST
        try:
            self.output = model(*args, **kwargs)
        except LostRankError:
            raise
        except Exception as error:
            place = self._inside[-1] if self._inside else class_name(model)
            raised = f"{place} raised on {self._positions} positions: {type(error).__name__}: {error}"
            raise ParallelismValueError(
                f"{class_name(model)} cannot be split over the sequence. {self.refused or raised}"
            ) from error

    @property
    def _positions(self) -> int:
        return self.layout.local_length if self.part else self.layout.length

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._inside.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()
        for tensor in _values(output):
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                self.tolerance = max(self.tolerance, _COARSE)
            if tensor.ndim > 1:
                self._note(f"the output of {name}", tensor, 1)

    def _note(self, place: str, tensor: Tensor, dim: int) -> None:
        passed = self._passes[place]
        self._passes[place] += 1  # also of what has no positions, or has as many by chance
        if tensor.shape[dim] != self._positions:
            return
        self.steps[place, passed] = tensor.clone() if self.part else self.layout.part_of(tensor, dim)

    def _attend(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        for kind, tensor in (("queries", query), ("keys", key), ("values", value)):
            self._note(f"the {kind} of {self._inside[-1]}", local_part(tensor), -2)
        try:
            if self.part:
                check_call(self.layout, call)
        except ParallelismValueError as error:
            self.refused = self.refused or f"{self._inside[-1]}: {error}"
        local = query.mean(-1, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
        if query.shape[-2] != value.shape[-2]:
            return local.clone()
        groups = query.shape[-3] // value.shape[-3] if query.ndim > 3 else 1
        return local + value.repeat_interleave(groups, dim=-3)


def _traces(
    splitter: Splitter, calls: list[Any], small: SequenceSplit, device: torch.device
) -> tuple[_Trace, _Trace]:
    """Of the whole, and of this rank's part."""
    model, traces = splitter.model, (_Trace(small), _Trace(small, part=True))
    for trace, (args, kwargs) in zip(traces, calls, strict=True):
        with values_kept(model), set_aside(device), splitter.tables(small if trace.part else None):
            before = places(device)
            with trace.watching(model):
                trace.run(model, args, kwargs)
            trace.random = places(device) != before
    return traces


def _labeled(splitter: Splitter, batch: Any, short: Any, layout: SequenceSplit) -> Any:
    """The few positions with labels of the batch, such that the parts average over different ones.

    The first rank has the batch's smallest label, its last, and its most frequent ones; the last rank has the
    rarest. If the loss ignores or weighs some, the parts differ. Most parts have no label if the model allows
    that; if it shifts labels, they are on both sides of the end of a part.
    """
    length = layout.length
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or short["labels"].shape[1:] != (length,):
        return short
    few, known = short["labels"].clone(), labels[labels != IGNORED]
    values, counts = known.unique(return_counts=True)  # in increasing order
    common = values[counts.argsort(descending=True, stable=True)]
    classes = list(dict.fromkeys(torch.cat([values[:1], known[-1:], common]).tolist())) or [0]
    if len(classes) > length:
        classes = classes[: length // 2] + classes[length // 2 - length :]
    order = torch.cat([layout.positions(few.device, rank) for rank in range(layout.ranks)]).tolist()
    for number, position in enumerate(order):
        few[:, position] = classes[min(number, len(classes) - 1)]
    if splitter.accepts("num_items_in_batch"):
        labeled = range(1, 1 + _PER_BLOCK) if splitter.shifts else range(1)
        few[:, [one for one in range(length) if one not in labeled]] = IGNORED
    rest = {k: v for k, v in short.items() if k not in {"shift_labels", "num_items_in_batch"}}
    return rest | {"labels": few}


def _takes_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it is set by torch.backends.<...>.fp32_precision
        return True


def _call(splitter: Splitter, batch: Any, part: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from composer_dist.composer_model import ComposerModel

    model = splitter.model
    if isinstance(batch, Tensor) or isinstance(model, ComposerModel):
        return (batch,), {}
    try:
        if not isinstance(batch, Mapping):
            raise TypeError(f"it is a {type(batch).__name__}")
        signature = inspect.signature(model.forward)
        variadic = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        arguments = {k: v for k, v in batch.items() if variadic or k in signature.parameters}
        positions = signature.parameters.get("position_ids")
        if positions is not None and positions.default is positions.empty and "position_ids" not in batch:
            of_part, length = part["position_ids"], splitter.layout(batch, 1, 0).length
            whole = torch.arange(length, device=of_part.device)
            arguments["position_ids"] = whole.expand(of_part.shape[0], length)
        signature.bind(**arguments)
    except TypeError as error:
        raise ParallelismValueError(
            f"Context parallelism calls the forward of {class_name(model)} with the batch to check that it "
            f"can be split over the sequence, but {error}. Pass a mapping of forward's arguments, or "
            "check=False if only scaled_dot_product_attention mixes positions."
        ) from None
    return (), arguments


def _check_same_batch(batch: Any, cp: DeviceMesh, agreement: Agreement) -> None:
    flat = [tensor.detach().flatten().double() for _, tensor in named_tensors(batch)]
    sums = [float((one * (torch.arange(len(one), device=one.device) % 1009 + 1)).sum()) for one in flat]

    def compare(findings: list[list[Any]]) -> None:
        first: dict[str, tuple[int, Any]] = {}
        for rank, (peers, numbers) in zip(agreement.ranks, findings, strict=True):
            other, expected = first.setdefault(str(peers), (rank, numbers))
            if expected != numbers:
                raise ParallelismValueError(
                    f"Ranks {other} and {rank} share a sequence but have different batches; pass "
                    "sampler_kwargs(mesh) to the sampler, and use the same seed on every rank."
                )

    agreement.reach("the batch", [cp.mesh.tolist(), [repr(one) for one in sums]], compare)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Inside, nothing is compiled."""
    # If the compiler is not loaded, setting the stance would load it.
    compiling = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiling else nullcontext():
        yield


def _values(output: Any) -> list[Tensor]:
    """The tensors in a module's output; not logits that are not computed."""
    return [local_part(tensor) for tensor in tensors_in(output) if _torch.has_memory(tensor)]


def _scalars(trace: _Trace) -> list[Tensor]:
    return [
        tensor.float() for tensor in _values(trace.output) if tensor.ndim == 0 and tensor.is_floating_point()
    ]


def _mean_scalars(trace: _Trace, cp: DeviceMesh) -> list[Tensor]:
    """The scalars in the output (losses), averaged over the ranks of a sequence."""
    scalars = _scalars(trace)
    if scalars:
        together = torch.stack(scalars)
        dist.all_reduce(together, group=cp.get_group())
        scalars = list(together.div_(cp.size()))
    return scalars


def _compare(expected: _Trace, found: _Trace, means: list[Tensor], model: nn.Module) -> None:
    name, ranks = class_name(model), found.layout.ranks
    if refused := expected.refused or found.refused:
        raise ParallelismValueError(f"{name} cannot be split over the sequence. {refused}")
    tolerance = max(expected.tolerance, found.tolerance)
    both = [step for step in expected.steps if step in found.steps]
    wrong = [step[0] for step in both if not _close(expected.steps[step], found.steps[step], tolerance)]
    if not wrong and not all(_same_part(expected, found, tolerance)):
        wrong.append(f"the output of {name}")
    if wrong:
        raise ParallelismValueError(
            f"{name} cannot be split over the sequence (cp={ranks}): {wrong[0]} depends on other positions, "
            "or on where a rank's part begins. Only torch.nn.functional.scaled_dot_product_attention, called "
            "by that name, may mix positions; if the model counts positions, pass position_ids in the batch "
            "or name the table of positions in buffers."
        )
    losses = zip(_scalars(expected), means, strict=False)
    if not all(mean.isfinite() and _close(whole, mean, tolerance) for whole, mean in losses):
        raise ParallelismValueError(
            f"The mean of the losses that {name} computes from parts of the labels is not the whole loss "
            f"(cp={ranks}): it ignores shift_labels and num_items_in_batch, or adds a term that is not a sum "
            "over positions. Leave the labels out of its batch and compute the loss from its outputs."
        )


def _same_part(expected: _Trace, found: _Trace, tolerance: float) -> Iterator[bool]:
    """For each output, whether the part's equals the whole's at the part's positions."""
    short, local = expected.layout.length, expected.layout.local_length
    for whole, part in zip(_values(expected.output), _values(found.output), strict=True):
        sizes = zip(whole.shape, part.shape, strict=False)
        dims = [dim for dim, (long, mine) in enumerate(sizes) if (long, mine) == (short, local)]
        if len(dims) == 1:
            yield _close(expected.layout.part_of(whole, dims[0]), part, tolerance)
        elif whole.ndim:
            yield _close(whole, part, tolerance)


def _close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if expected.shape != found.shape:
        return False
    expected, found = expected.float(), found.float()
    finite = expected.nan_to_num(0.0, 0.0, 0.0).abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True)
