"""Check at the first step that a model computes the same when its sequence is split.

Attention takes keys and values from all ranks, so everything else must work position by position. To check
this, attention is replaced by a function that only looks at its own position, and the model runs twice on
the first few positions of a batch: on all of them, and on this rank's. Intermediate results must agree; the
error names the first module where they do not. The mean of the parts' losses must be the loss of the whole.
This costs two small forwards per model.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist.distributed.context_parallelism.attention import SequenceSplit, attention_as, check_call
from composer_dist.distributed.context_parallelism.batch import IGNORED, Splitter
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.families import class_name
from composer_dist.structure.names import canonical_name
from composer_dist.tensors.nested import map_tensors, tensors_in

_PER_BLOCK = 2
"""Positions in each block of the proof."""
_TOLERANCE = 0.05
"""Of a tensor's largest element: above what half precision rounds, below what a wrong position makes."""


def prove(
    splitter: Splitter, batch: Any, layout: SequenceSplit, cp: DeviceMesh, agreement: Agreement
) -> None:
    """Compare a model on a few positions with itself on this rank's part of them. Every rank calls it.

    Args:
        splitter: knows the model.
        batch: the whole one.
        layout: of that batch.
        cp: the ranks that share a sequence.
        agreement: among all ranks of the model.

    Raises:
        ParallelismValueError: on every rank: the ranks of a sequence have different batches; something
            else than attention mixes positions; the loss is no mean over the labels.
    """
    model = splitter.model
    with agreement.together("the batch of context parallelism"):
        blocks = layout.ranks * len(layout.blocks(0))
        short = min(layout.length, blocks * _PER_BLOCK)
        small = SequenceSplit(short, layout.ranks, layout.rank, layout.balanced)
        whole = _labeled(splitter, splitter.shorten(batch, layout.length, short))
        part = splitter.split(whole, small)
        calls = [_call(splitter, one) for one in (whole, part)]
    _check_same_batch(batch, cp, agreement)
    expected, found = _Trace(small), _Trace(small, part=True)
    with _evaluating(model):
        for trace, (args, kwargs) in zip((expected, found), calls, strict=True):
            with trace.watching(model), splitter.tables(small if trace.part else None):
                trace.run(model, args, kwargs)
        means = _mean_scalars(found, cp)
    with agreement.together("the proof of context parallelism"):
        _compare(expected, found, means, model)


@dataclass
class _Trace:
    """What a model computes at this rank's positions."""

    layout: SequenceSplit
    part: bool = False
    """Whether the model runs on this rank's positions only."""
    steps: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """In order: the place, how often it was passed before, and the values at this rank's positions."""
    output: Any = None
    refused: str = ""
    """Why a call of attention, or the model, cannot be split; the first reason."""
    _inside: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's steps are recorded, and its attention is local."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                name = canonical_name(name) or class_name(model)
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(module.register_forward_hook(self._leave(name)).remove)
            stack.enter_context(attention_as(self._attend))
            yield

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the output; what the model raises on so few positions is a refusal."""
        try:
            self.output = model(*args, **kwargs)
        except Exception as error:
            place = self._inside[-1] if self._inside else class_name(model)
            self.refused = self.refused or (
                f"{place} raised on {self.layout.length} positions: {type(error).__name__}: {error}"
            )

    def _enter(self, name: str) -> Any:
        return lambda module, args: self._inside.append(name)

    def _leave(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            for tensor in tensors_in(output):
                if tensor.ndim > 1:
                    self._note(f"the output of {name}", tensor, 1)

        return record

    def _note(self, place: str, tensor: Tensor, dim: int) -> None:
        tensor = _local(tensor)
        if tensor.shape[dim] != (self.layout.local_length if self.part else self.layout.length):
            return
        passed = 0
        while (place, passed) in self.steps:
            passed += 1
        self.steps[place, passed] = tensor.clone() if self.part else at_part(tensor, dim, self.layout)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        for kind, tensor in (("queries", query), ("keys", key), ("values", value)):
            self._note(f"the {kind} of {self._inside[-1]}", tensor, -2)
        try:
            if self.part:
                check_call(self.layout, query, key, attn_mask)
        except ParallelismValueError as error:
            self.refused = self.refused or f"{self._inside[-1]}: {error}"
        local = query.mean(-1, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
        if query.shape[-2] != value.shape[-2]:
            return local.clone()
        groups = query.shape[-3] // value.shape[-3] if query.ndim > 3 else 1
        return local + value.repeat_interleave(groups, dim=-3)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that tensor parallelism has cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def at_part(tensor: Tensor, dim: int, layout: SequenceSplit) -> Tensor:
    """A whole sequence's values at this rank's positions."""
    return tensor.index_select(dim, layout.positions(tensor.device))


def _labeled(splitter: Splitter, batch: Any) -> Any:
    """The batch with few labels, of the first class, so that most parts have none if the model permits.

    Those of a model that shifts them lie on both sides of the end of a part.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return batch
    few = torch.zeros_like(labels)
    if splitter.accepts("num_items_in_batch"):
        few.fill_(IGNORED)[:, slice(1, 1 + _PER_BLOCK) if splitter.shifts else slice(1)] = 0
    rest = {k: v for k, v in batch.items() if k not in {"shift_labels", "num_items_in_batch"}}
    return rest | {"labels": few}


def _call(splitter: Splitter, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model's forward for this batch."""
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
        signature.bind(**arguments)
    except TypeError as error:
        raise ParallelismValueError(
            f"Context parallelism first proves that {class_name(model)} can be split over the sequence, "
            f"for which it calls its forward with the batch, but {error}. Give a mapping of forward's "
            "arguments, or pass check=False if positions meet in scaled_dot_product_attention only."
        ) from None
    return (), arguments


def _check_same_batch(batch: Any, cp: DeviceMesh, agreement: Agreement) -> None:
    """Refuse ranks that share a sequence but have different batches."""
    sums: list[float] = []

    def add(name: str, tensor: Tensor) -> Tensor:
        flat = tensor.detach().flatten().double()
        sums.append(float((flat * (torch.arange(len(flat), device=flat.device) % 1009 + 1)).sum()))
        return tensor

    map_tensors(add, batch)

    def compare(findings: list[list[Any]]) -> None:
        first: dict[str, tuple[int, Any]] = {}
        for rank, (peers, numbers) in zip(agreement.ranks, findings, strict=True):
            other, expected = first.setdefault(str(peers), (rank, numbers))
            if expected != numbers:
                raise ParallelismValueError(
                    f"Ranks {other} and {rank} share a sequence but have different batches; give the sampler "
                    "sampler_kwargs(mesh), and every rank the same seed."
                )

    agreement.reach("the batch", [cp.mesh.tolist(), [repr(one) for one in sums]], compare)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model neither drops out nor learns, and nothing is fused or compiled."""
    modes = {module: module.training for module in model.modules()}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        with torch.no_grad():
            # Without a compiler, asking for it would load one.
            compiling = "torch._dynamo" in sys.modules
            with torch.compiler.set_stance("force_eager") if compiling else nullcontext():
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in modes.items():
            module.training = training


def _scalars(trace: _Trace) -> list[Tensor]:
    outputs = map(_local, tensors_in(trace.output))
    return [tensor.float() for tensor in outputs if tensor.ndim == 0 and tensor.is_floating_point()]


def _mean_scalars(trace: _Trace, cp: DeviceMesh) -> list[Tensor]:
    """The scalars in the output, each the mean over the ranks of a sequence: losses, that is."""
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
    place = next(
        (
            place
            for (place, passed), tensor in expected.steps.items()
            if (other := found.steps.get((place, passed))) is not None and not _close(tensor, other)
        ),
        None,
    )
    if place is None and not all(_same_part(expected, found)):
        place = f"the output of {name}"
    if place is not None:
        raise ParallelismValueError(
            f"{name} cannot be split over the sequence (cp={ranks}): {place} depends on other positions, or "
            "on where a rank's part begins. Positions may meet in "
            "torch.nn.functional.scaled_dot_product_attention only, called by that name; where they are "
            "counted, pass position_ids in the batch or name the table of positions in buffers."
        )
    if not all(map(_close, _scalars(expected), means)):
        raise ParallelismValueError(
            f"The loss that {name} computes from its part of the labels is no share of the whole loss "
            f"(cp={ranks}): it does not use shift_labels and num_items_in_batch, or adds what is no sum over "
            "positions. Keep the labels out of its batch and compute the loss from its outputs."
        )


def _same_part(expected: _Trace, found: _Trace) -> Iterator[bool]:
    """For each tensor of the output whether the part's is that of the whole at its positions."""
    short, local = expected.layout.length, expected.layout.local_length
    outputs = (map(_local, tensors_in(trace.output)) for trace in (expected, found))
    for whole, part in zip(*outputs, strict=True):
        if whole.ndim > 1 and (whole.shape[1], part.shape[1]) == (short, local):
            yield _close(at_part(whole, 1, expected.layout), part)
        elif whole.ndim:
            yield _close(whole, part)


def _close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape:
        return False
    expected, found = expected.float(), found.float()
    finite = expected.nan_to_num(0.0, 0.0, 0.0).abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)
