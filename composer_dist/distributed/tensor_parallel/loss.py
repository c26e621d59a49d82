"""Cross-entropy of logits that are cut over the vocabulary.

The logits of a language model are its largest activation. If they are cut, they need not be gathered: each
rank computes the maximum and the sum of exponentials over its part, and two all-reduces of one number per
position give the loss (Megatron's vocab-parallel cross-entropy; Shoeybi et al., 2019, arXiv:1909.08053).
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.calling import whole
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure
from composer_dist.tensors.parts import chunk

Reduction = Literal["mean", "sum", "none"]


def parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    """`torch.nn.functional.cross_entropy` for class indices, with logits that may be cut over the classes.

    Args:
        logits: `(..., classes)`: a plain tensor, or a DTensor cut along its last dimension over the
            tensor-parallel ranks, which models return with `TPConfig(loss_parallel=True)`.
        labels: `(...)`, equal on those ranks.
        ignore_index: the label of positions to ignore.
        reduction: "mean" over the positions that are not ignored, "sum", or "none" `(...)`.

    Returns:
        A plain tensor, equal on all tensor-parallel ranks; float32 for logits of lower precision.

    Raises:
        ParallelismValueError: `reduction` is none of these.
        RuntimeError: a label is not a class; on a GPU as torch reports it, when its results are read.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ParallelismValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}.')
    flat = labels.reshape(-1)
    rows = logits.to_local() if isinstance(logits, DTensor) else logits
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    if not isinstance(logits, DTensor):
        found = nn.functional.cross_entropy(rows, flat, ignore_index=ignore_index, reduction=reduction)
        return found.view(labels.shape) if reduction == "none" else found
    classes, mesh = logits.shape[-1], logits.device_mesh
    losses: Tensor = _CrossEntropy.apply(rows, flat, classes, ignore_index, mesh)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total / (flat != ignore_index).sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row of logits `(rows, part of the classes)`; 0 for ignored rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, classes: int, ignore_index: int, mesh: DeviceMesh
    ) -> Tensor:
        group = mesh.get_group()
        first, last = chunk(classes, mesh.size(), mesh.get_local_rank())
        counts = labels != ignore_index
        known = (labels >= 0) & (labels < classes) | ~counts
        _torch.assert_all(known, f"A label is neither one of the {classes} classes nor {ignore_index}.")
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest.unsqueeze(-1)).exp()
        mine = (labels >= first) & (labels < last)
        places = (labels - first).masked_fill(~mine, 0).unsqueeze(-1)
        chosen = logits.gather(-1, places).squeeze(-1) - largest
        sums = torch.stack([exponentials.sum(-1), chosen.masked_fill(~mine, 0)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), places, mine, counts)
        return (sums[0].log() - sums[1]).masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        softmax, places, mine, counts = ctx.saved_tensors
        result = softmax.scatter_add(-1, places, -mine.to(softmax.dtype).unsqueeze(-1))
        scale = gradients[0].masked_fill(~counts, 0)
        return result * scale.unsqueeze(-1), None, None, None, None


def give_loss(structure: Structure, head: str) -> None:
    """Make the loss of the Hugging Face causal language model that contains `head` accept cut logits."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    for name in ancestors(head):
        model: Any = structure.modules[name]
        if losses is not None and getattr(model, "loss_function", None) is losses.ForCausalLMLoss:
            model.loss_function = causal_lm_loss
            return


def gather_to_generate(structure: Structure, head: str) -> None:
    """Make `generate` of the Hugging Face model that contains `head` take whole logits."""
    for name in ancestors(head):
        model: Any = structure.modules[name]
        if callable(getattr(model, "generate", None)):
            model.generate = partial(_generate, model, model.generate)
            return


def _generate(model: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    handle = model.register_forward_hook(_gather_logits)
    try:
        return method(*args, **kwargs)
    finally:
        handle.remove()


def _gather_logits(model: nn.Module, args: Any, output: Any) -> None:
    output.logits = whole(output.logits)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Transformers' `ForCausalLMLoss`, for logits `(batch, positions, vocabulary)` that may be cut.

    The label of each position is the next token, unless `shift_labels` are given.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    if num_items_in_batch is None:
        return parallel_cross_entropy(logits, shift_labels, ignore_index=ignore_index)
    total = parallel_cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum")
    return total / num_items_in_batch
