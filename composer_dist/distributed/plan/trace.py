"""A step of training on tensors without values: what is allocated and freed, and when.

The model is copied with fake tensors in the place of its own, its activations are recomputed as the plan
says, and one forward and backward run. Nothing is computed; Python runs as it will in training.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from composer_dist import _torch
from composer_dist.distributed.activations import recompute as activations
from composer_dist.distributed.context_parallelism.attention import AttentionCall
from composer_dist.distributed.context_parallelism.traced import traced_part
from composer_dist.distributed.feature_plan import Rank, StepEvent
from composer_dist.distributed.plan.decisions import Decisions, Subject
from composer_dist.distributed.plan.record import HOST, Allocations, StepRecord
from composer_dist.distributed.tensor_parallel import apply as tensor_parallel
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.calling import Loss, call, example_batch, loss_of
from composer_dist.structure.families import values_unknown, vocabulary_of
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.inner import local_part
from composer_dist.tensors.nested import map_tensors
from composer_dist.tensors.parts import chunk

Run = Callable[[nn.Module, Callable[[Any], Any]], tuple[Tensor, Any]]
"""Calls a model with what a function makes of a batch: this rank's part of it.

It returns the loss and the outputs, which live as long as the backward."""


def traced(subject: Subject, plan: Decisions, batch: Any, loss: Loss | None, rank: Rank) -> list[StepEvent]:
    """What `trace_step` says of a batch, traced once: the last few traces are kept with the subject.

    Nothing that a trace needs depends on the sizes of the mesh for data parallelism, on what is resharded, or
    on what parameters are offloaded, so plans of one subject that differ in these alone share their traces.
    """
    shapes = map_tensors(lambda _, one: (tuple(one.shape), one.dtype), batch)  # type: ignore[arg-type, return-value]
    training = [one.training for one in subject.structure.modules.values()]
    key = repr((_decisive(plan), _place(rank), shapes, training))
    kept = subject.traces.pop(key, None)
    if kept is None or kept[0] != loss:
        kept = loss, trace_step(subject.structure, plan, run_of(batch, loss), rank)
    subject.traces[key] = kept
    for oldest in [*subject.traces][:-_MOST_TRACES]:
        del subject.traces[oldest]
    return kept[1]


_MOST_TRACES = 8
"""That are kept; one of a model of 8 billion parameters takes a few MB."""


def _decisive(plan: Decisions) -> Any:
    """What a trace depends on."""
    units = [
        (one.modules, one.parameters, one.mp_policy.param_dtype, one.mp_policy.cast_forward_inputs)
        for one in plan.units
    ]
    features = plan.replication, plan.tensor_parallel, plan.context_parallelism, plan.activations
    return units, *features, plan.device_type


def _place(rank: Rank) -> tuple[int, int]:
    """A rank's place along "tp" and "cp"."""
    return rank.at.tp, rank.at.shard % rank.sizes["cp"]


def trace_step(structure: Structure, plan: Decisions, run: Run, rank: Rank) -> list[StepEvent]:
    """What one forward and backward of a model allocate and free, and when the units' begin and end.

    Args:
        structure: of a model that is not prepared; its tensors may be on the meta device.
        run: is called with a copy of the model.
        rank: whose parts of the matrices and of the sequence the copy computes with.

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
    host = plan.device_type if plan.device_type == "cpu" else HOST.type
    copied = activations.apply(copied, plan.activations, host)
    record, (tp_rank, cp_rank) = StepRecord(rank.sizes), _place(rank)
    tp = _torch.TracedMesh("tp", rank.sizes["tp"], tp_rank, record.send)
    cp = _torch.TracedMesh("cp", rank.sizes["cp"], cp_rank, record.send)
    if plan.tensor_parallel is not None:
        with mode:
            tensor_parallel.divide(copied, plan.tensor_parallel, tp)
        tensor_parallel.give_sizes(copied, plan.tensor_parallel)
    fakes = {name: held.get() for name, held in copied.tensors.items()}
    record.parameters = {unit.name: [fakes[name] for name in unit.parameters] for unit in plan.units}
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
    first, last = chunk(logits or 0, tp.size(), tp_rank)
    known = [local_part(one) for one in fakes.values()]
    allocations = Allocations(record.note, known, {logits, last - first}, record)
    record.note("begin")
    with mode, torch.device("cpu"), values_unknown(), allocations, ExitStack() as stack:
        if plan.device_type == "cuda":
            stack.enter_context(_attention_of_gpus())

        def part_of(batch: Any) -> Any:
            return stack.enter_context(traced_part(copied.modules[""], batch, cp)) if cp.size() > 1 else batch

        try:
            with torch.autocast("cpu", dtype=low) if low else nullcontext():
                loss, outputs = run(copied.modules[""], part_of)
            record.phase = "backward"
            loss.backward()
            record.finish({name: fakes[name] for name in plan.parameter_units})
            del loss, outputs
        except Exception as error:
            if not _torch.needs_values(error):
                raise
            raise ParallelismValueError(
                f"{record.where or 'The root'} cannot be traced, because its {record.phase} depends on the "
                f"values of tensors ({error}). Without batch=, what a rank holds is known all the same."
            ) from error
        finally:
            for module in copied.modules.values():
                _torch.forget_changes(module)
    return [*record.events]  # without the frees of this function's end: gradients live on


@contextmanager
def _attention_of_gpus() -> Iterator[None]:
    """Inside, attention makes all scores where NVIDIA GPUs have no other kernel for the call."""
    before = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH) if _makes_all_scores(call) else nullcontext():
            return call.make(before)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _makes_all_scores(call: AttentionCall) -> bool:
    """Whether torch 2.13 has no fused kernel, by `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`.

    Flash attention takes half precision and no mask; the memory-efficient kernel, widths in units of 16
    bytes and as many heads of keys as of queries. In half precision cuDNN's takes the latter.
    """
    dtype = call.query.dtype
    if dtype is torch.float64:
        return True
    widths = call.query.shape[-1], call.value.shape[-1]
    if torch.is_autocast_enabled("cpu") or dtype.itemsize < 4:
        return call.attn_mask is not None and any(width % 8 for width in widths)
    grouped = call.enable_gqa and call.query.shape[-3] != call.key.shape[-3]
    return grouped or any(width % 4 for width in widths)


def as_trained(rank: Rank, events: Sequence[StepEvent]) -> Rank:
    """The rank, with the parameters that have no gradients after a step as frozen ones."""
    left = {event.name for event in events if event.moment == "no gradient"}
    if not left:
        return rank
    tensors = {
        name: replace(one, requires_grad=False) if name in left else one for name, one in rank.tensors.items()
    }
    return replace(rank, tensors=tensors)


def run_of(batch: Any, loss: Loss | None) -> Run:
    """How the traced model is called."""

    def run(copied: nn.Module, part_of: Callable[[Any], Any]) -> tuple[Tensor, Any]:
        data = example_batch(copied, batch)
        data = part_of(map_tensors(lambda _, one: torch.empty_like(one, device="cpu"), data))
        outputs = call(copied, data)
        return loss_of(copied, outputs, data, loss, torch.mean), outputs

    return run
