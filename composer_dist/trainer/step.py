"""One training batch: forward and backward of its microbatches, clipping, the optimizers' step.

Gradients are those of the mean loss over the batches of all ranks together, whatever their sizes.
FSDP2 and DDP average gradients over ranks; so a microbatch whose loss is a mean over `w` terms
has the weight `w / W`, where `W` is the mean over ranks of a rank's terms in this batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer_dist.distributed.context_parallelism.context import context_parallel
from composer_dist.distributed.prepared import prepared_mesh
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.training.clipping import clip_grad_norm, clip_grad_value
from composer_dist.distributed.training.gradients import Accumulate, accumulate
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import autocast
from composer_dist.tensors.nested import tensors_in
from composer_dist.trainer.data.batch import num_samples, num_tokens, split, to_device
from composer_dist.trainer.data.feed import Fed, Size
from composer_dist.trainer.events import Event
from composer_dist.trainer.microbatch import Microbatches
from composer_dist.trainer.state import State


def measure(state: State, batch: Any) -> Size:
    """A batch's samples, tokens and terms in the loss."""
    return Size(samples=num_samples(batch), tokens=num_tokens(batch), weight=weight_of(state, batch))


def weight_of(state: State, batch: Any) -> float:
    """The number of terms that the model's loss averages over in this batch."""
    weight = state.model.loss_weight(batch)
    return float(num_samples(batch) if weight is None else weight)


def train_batch(
    state: State,
    fed: Fed,
    run_event: Callable[[Event], None],
    microbatches: Microbatches,
    clipping: GradientClipping | None,
    how: Accumulate,
) -> dict[str, float | Tensor]:
    """Trains on one batch; `state.loss` is then the mean loss over the batches of all ranks.

    Returns the loss, and the gradients' norm before clipping if it is clipped. With a loss scaler, no rank
    steps on a batch whose gradients are not finite on some rank.
    """
    run_event(Event.BEFORE_TRAIN_BATCH)
    if state.batch is not fed.batch:  # callbacks have put another one there
        fed = replace(fed, batch=state.batch)
    if fed.may_change:
        fed = _measured_again(state, fed)
    if not fed.mean_weight > 0:
        raise ParallelismValueError(
            f"The loss of batch {state.timestamp.batch + 1} has no terms on any rank (are all labels "
            "-100?), so it has no gradient; leave out such batches."
        )
    total = microbatches.run(fed.most, lambda parts: _gradients(state, fed, parts, run_event, how))
    state.batch = fed.batch
    state.loss = process_group.all_reduce(total, "mean")
    metrics: dict[str, float | Tensor] = {"loss/train/total": state.loss}
    finite = True
    if (scaler := state.loss_scaler) is not None:
        metrics["loss_scale"] = scaler.scale
        finite = scaler.unscale(state.optimized_parameters())
        scaler.update(finite)
    run_event(Event.AFTER_TRAIN_BATCH)
    if clipping is not None and finite:
        metrics |= _clip(state, clipping)
    if finite:  # the same on all ranks
        for optimizer in state.optimizers:
            optimizer.step()
    return metrics


def _measured_again(state: State, fed: Fed) -> Fed:
    samples, weight = (0, 0.0) if fed.filler else (num_samples(fed.batch), weight_of(state, fed.batch))
    table = process_group.rows_of_ranks([samples, weight])
    return replace(fed, weight=weight, mean_weight=table[:, 1].mean().item(), most=int(table[:, 0].max()))


def _gradients(
    state: State, fed: Fed, parts: int, run_event: Callable[[Event], None], how: Accumulate
) -> Tensor:
    """Computes the gradients of one batch in `parts` microbatches; returns this rank's share of its loss."""
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    for metric in state.train_metrics.values():
        metric.reset()
    total = torch.zeros((), device=state.device)
    for batch, weight, last, counts in _microbatches(state, fed, parts):
        with _part(state, batch, weight) as weight, accumulate(state.model, last, how):
            loss = _forward_backward(state, run_event, weight / fed.mean_weight, counts, fed.may_change)
        if weight:  # the mean over no terms is nan
            total += loss * (weight / fed.mean_weight)
    return total


def total_loss(loss: Any) -> Tensor:
    """The sum of the losses that a model's `loss` returned, as one scalar."""
    several = loss.values() if isinstance(loss, Mapping) else loss
    parts = list(several) if isinstance(loss, Mapping | Sequence) else [loss]
    if not parts or not all(isinstance(part, Tensor) and part.numel() == 1 for part in parts):
        kind = type(loss).__name__
        raise ParallelismTypeError(f"A model's loss must be a scalar tensor or several of them, not {kind}.")
    scalars = [part.reshape(()) for part in parts]
    return scalars[0] if len(scalars) == 1 else torch.stack(scalars).sum()


def _microbatches(state: State, fed: Fed, count: int) -> Iterator[tuple[Any, float, bool, bool]]:
    """Each microbatch, its weight, whether it is the last, and whether its samples count in metrics.

    Every rank has the same number of them.

    A rank with fewer samples than microbatches, or without data, repeats its first microbatch at weight 0.
    """
    parts = split(fed.batch, count)
    weights = (
        [fed.weight] if count == 1 else [0.0 if fed.filler else weight_of(state, part) for part in parts]
    )
    own, missing = len(parts), count - len(parts)
    parts, weights = parts + parts[:1] * missing, weights + [0.0] * missing
    for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        yield part, weight, index == count - 1, index < own and not fed.filler


@contextmanager
def _part(state: State, batch: Any, weight: float) -> Iterator[float]:
    """Set `state.batch` (with context parallelism, this rank's part of it) and yield its weight."""
    state.batch = to_device(batch, state.device)
    mesh = prepared_mesh(state.model)
    cp = mesh.cp if mesh is not None else None
    if cp is None:
        yield weight
        return
    weighted = state.model.loss_weight(state.batch) is not None
    with context_parallel(state.model, state.batch, weighted=weighted) as state.batch:
        if weight and weighted and "num_items_in_batch" not in state.batch:
            weight = cp.size() * weight_of(state, state.batch)
        yield weight


def _forward_backward(
    state: State, run_event: Callable[[Event], None], scale: float, counts: bool, may_change: bool
) -> Tensor:
    """Adds the scaled gradients of a microbatch; returns its loss, detached and unscaled.

    Args:
        counts: whether its samples count in metrics.
        may_change: whether callbacks may change it.
    """
    terms = weight_of(state, state.batch) if may_change else 0.0
    with autocast(state.precision, state.device):
        run_event(Event.BEFORE_FORWARD)
        if may_change and weight_of(state, state.batch) != terms:
            raise ParallelismValueError(
                "A callback has changed the number of terms in the loss of a microbatch at before_forward, "
                "where others have been weighed already. Change batches at before_train_batch."
            )
        state.outputs = state.model(state.batch)
        run_event(Event.AFTER_FORWARD)
        if not scale:
            _without_gradients(state.outputs)
        run_event(Event.BEFORE_LOSS)
        state.loss = total_loss(state.model.loss(state.outputs, state.batch))
        run_event(Event.AFTER_LOSS)
    loss = state.loss.detach()
    if counts and state.train_metrics:
        _update_metrics(state)
    run_event(Event.BEFORE_BACKWARD)
    state.outputs = None  # logits may be large, and backward does not need them
    factor = scale * state.loss_scaler.scale if state.loss_scaler else scale
    (state.loss if factor == 1 else state.loss * factor).backward()
    run_event(Event.AFTER_BACKWARD)
    state.loss = loss  # frees the graph before the next forward
    return loss


def _without_gradients(outputs: Any) -> None:
    """Replace the outputs' gradients by zeros: a mean over no terms may have nan, and 0 times nan is nan.

    Backward still visits every parameter that the loss depends on, so all ranks reduce the same gradients.
    """
    for output in tensors_in(outputs):
        if output.grad_fn is not None:  # a hook of a leaf would outlive this backward
            output.register_hook(torch.zeros_like)


@torch.no_grad()
def _update_metrics(state: State) -> None:
    outputs = state.model.eval_forward(state.batch, state.outputs)
    for metric in state.train_metrics.values():
        state.model.update_metric(state.batch, outputs, metric)


def _clip(state: State, clipping: GradientClipping) -> dict[str, Tensor]:
    parameters = list(state.optimized_parameters())
    if clipping.value is not None:
        clip_grad_value(parameters, clipping.value)
    if clipping.norm is None:
        return {}
    norm = clip_grad_norm(parameters, clipping.norm, clipping.norm_type)
    return {"l2_norm/grad/global" if clipping.norm_type == 2 else "norm/grad/global": norm}


@dataclass(frozen=True, kw_only=True)
class GradientClipping:
    """How gradients are clipped before each step; `norm` and `value` may be combined."""

    norm: float | None = None
    """Scale all gradients together, so that their global norm is at most this."""
    norm_type: float = 2.0
    """The p of that norm; `inf` is allowed."""
    value: float | None = None
    """Clamp every element to [-value, value], before the norm is taken."""

    def __post_init__(self) -> None:
        if self.norm is None and self.value is None:
            raise ParallelismValueError("GradientClipping needs a norm or a value.")
        for name in ("norm", "value", "norm_type"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ParallelismValueError(f"GradientClipping's {name} must be positive, not {number}.")

    @classmethod
    def of(cls, clipping: GradientClipping | Mapping[str, Any] | float | None) -> GradientClipping | None:
        """`clipping` itself; a mapping has its fields, and a number is a norm, as in Composer."""
        if isinstance(clipping, Mapping):
            return cls(**clipping)
        return cls(norm=clipping) if isinstance(clipping, int | float) else clipping
