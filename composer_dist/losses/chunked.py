"""Cross-entropy of a language model's head, without all of its logits.

At long context the logits are a model's largest tensor: a position takes six bytes or more for each token of
the vocabulary. Here some positions at a time get their logits, loss and gradients, and the logits are dropped
(as in Liger Kernel; Hsu et al., 2024, arXiv:2410.10989). The gradients are computed in forward, of the sum of
the losses, and scaled in backward: nothing is computed twice, and small gradients keep their digits. Rows
that fit into one piece are left to autograd, except in float16.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from composer_dist.errors import Faults, ParallelismRuntimeError

_FEW = 2**25
"""So many logits may always be made at once: 128 MiB of float32."""
LossOf = Callable[..., Tensor]
"""Takes hidden states `(rows, width)`, labels `(rows)` and the parameters; returns losses `(rows)` or their
sum."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items: Tensor | float | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of `hidden @ weight.T`, whose logits are made a few rows at a time.

    Gradients are added up in float32, whatever the dtype of the weight. They have no gradients themselves,
    unless all rows are computed at once: a backward with `create_graph=True` is refused.

    Args:
        hidden: `(..., width)`, which the head would get.
        weight: the head's, `(classes, width)`, whole.
        labels: class indices `(...)`, one for each row; a language model's are shifted before.
        bias: the head's, `(classes)`.
        ignore_index: the label of rows to ignore.
        reduction: "mean" over the rows that are not ignored, "sum", or "none" `(...)`, which computes the
            logits again in backward.
        num_items: what a "mean" divides the sum by, instead of this number of rows.
        softcap: the logits are `softcap * tanh(logits / softcap)`, as in Gemma 2.
        z_loss: times the square of the logarithm of the softmax's denominator, it is added to each row's loss
            (PaLM; Chowdhery et al., 2022, arXiv:2204.02311).
        label_smoothing: as in torch's.
        chunk_size: rows at a time; if None, as many as the weight is wide, but at least 1024, and more for
            few classes, up to 2**25 logits.

    Returns:
        A scalar, or losses `(...)`; float32 for inputs of lower precision.

    Raises:
        ParallelismValueError: shapes that do not match, an unknown reduction, or a weight that is sharded.
    """
    with Faults("chunked_cross_entropy: ") as faults:
        if reduction not in ("mean", "sum", "none"):
            faults.append(f'reduction must be "mean", "sum" or "none", not {reduction!r}.')
        elif num_items is not None and reduction != "mean":
            faults.append(f'num_items divides a mean; leave it out with reduction="{reduction}".')
        if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != labels.shape:
            shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
            faults.append(f"hidden, weight and labels must be (..., d), (v, d) and (...), not {shapes}.")
        if isinstance(weight, DTensor):
            faults.append("weight is sharded; call it in the forward of the module that holds the weight.")
        if bias is not None and bias.shape != weight.shape[:1]:
            faults.append(f"bias must be (v), as weight is (v, d), not {tuple(bias.shape)}.")
        for name, value in {"chunk_size": chunk_size, "softcap": softcap, "num_items": num_items}.items():
            if value is not None and not value > 0:
                faults.append(f"{name} must be positive, not {value}.")
        if chunk_size is not None and not isinstance(chunk_size, int):
            faults.append(f"chunk_size must be an integer, not {chunk_size}.")
        if z_loss < 0:
            faults.append(f"z_loss must not be negative, not {z_loss}.")

    def losses(rows: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = functional.linear(rows, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        each = functional.cross_entropy(
            logits, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        if not z_loss:
            return each
        return each + z_loss * logits.logsumexp(-1).square().masked_fill(labels == ignore_index, 0)

    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    parameters = [weight] if bias is None else [weight, bias]
    size = chunk_size or rows_at_a_time(weight)
    if reduction == "none":
        return _Each.apply(losses, size, rows, flat, *parameters).view(labels.shape)  # type: ignore[no-untyped-call, no-any-return]
    total = summed(losses, rows, flat, parameters, size)
    if reduction == "sum":
        return total
    return total / num_items if num_items is not None else mean(total, flat != ignore_index)


def mean(total: Tensor, counted: Tensor) -> Tensor:
    """The mean over the rows that are `counted`; over none, nan with gradients of 0, as in torch."""
    count = counted.sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def rows_at_a_time(weight: Tensor) -> int:
    """So many that their logits take as much as the weight, and enough to keep a device busy."""
    return max(1024, weight.shape[-1], _FEW // max(weight.shape[0], 1))


def is_one_piece(hidden: Tensor, size: int) -> bool:
    """Whether all rows are computed at once, and left to autograd."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return len(hidden) <= size and dtype is not torch.float16


def summed(
    loss_of: LossOf, hidden: Tensor, labels: Tensor, parameters: Sequence[Tensor], size: int
) -> Tensor:
    """The sum of the losses of rows `(rows, width)`, `size` of them at a time.

    Where these are all rows, autograd does it in less time; not in float16, whose gradients it would lose.

    Args:
        loss_of: is called with copies of the parameters that share their memory.
        hidden: rows `(rows, width)`.
        labels: `(rows)`.
        parameters: all that need a gradient, apart from `hidden`.
        size: rows at a time.
    """
    if is_one_piece(hidden, size):
        losses = loss_of(hidden, labels, *parameters)
        return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    total: Tensor = _Summed.apply(loss_of, size, torch.is_grad_enabled(), hidden, labels, *parameters)  # type: ignore[no-untyped-call]
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss_of: LossOf,
        size: int,
        training: bool,
        hidden: Tensor,
        labels: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        wanted = [needed and training for needed in ctx.needs_input_grad[3:]]
        losses, gradients = _by_chunks(loss_of, size, hidden, labels, parameters, wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [one.dtype for one in (hidden, labels, *parameters)]
        dtype = torch.promote_types(losses[0].dtype, torch.float32)
        return torch.stack([one.sum(dtype=dtype) for one in losses]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_order()
        scaled = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (
            None,
            None,
            None,
            *(None if one is None else (one * gradient).to(dtype) for one, dtype in scaled),
        )


class _Each(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_of: LossOf, size: int, *tensors: Tensor) -> Tensor:
        ctx.loss_of, ctx.size = loss_of, size
        ctx.save_for_backward(*tensors)
        kind = tensors[0].device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        hidden, labels, *parameters = tensors
        losses, _ = _by_chunks(loss_of, size, hidden, labels, parameters, [False] * len(tensors))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_order()
        hidden, labels, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        with torch.autocast(hidden.device.type, cache_enabled=False, **ctx.autocast):  # as in forward
            _, found = _by_chunks(ctx.loss_of, ctx.size, hidden, labels, parameters, wanted, gradient)
        pairs = zip(found, ctx.saved_tensors, strict=True)
        return None, None, *(None if one is None else one.to(tensor.dtype) for one, tensor in pairs)


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise ParallelismRuntimeError(
            "A backward with create_graph=True has reached a loss that was computed in chunks, whose "
            "gradients have none. Compute all logits: HuggingFaceModel(chunked_loss=False), or torch's "
            "cross_entropy in place of chunked_cross_entropy."
        )


def _by_chunks(
    loss_of: LossOf,
    size: int,
    hidden: Tensor,
    labels: Tensor,
    parameters: Sequence[Tensor],
    wanted: Sequence[bool],
    gradient: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The losses of each chunk, and the gradients of hidden states, labels (None) and parameters."""
    needed = [wanted[0], *wanted[2:]]
    copies = [one.detach().requires_grad_(needs) for one, needs in zip(parameters, needed[1:], strict=True)]
    of_hidden = torch.empty_like(hidden) if needed[0] else None
    totals: list[Tensor | None] = [None] * len(copies)
    losses: list[Tensor] = []
    for start in range(0, max(len(hidden), 1), size):
        chunk = slice(start, start + size)
        rows = hidden[chunk].detach().requires_grad_(needed[0])
        with torch.set_grad_enabled(any(needed)):
            loss = loss_of(rows, labels[chunk], *copies)
        losses.append(loss.detach())
        sources = [one for one in (rows, *copies) if one.requires_grad]
        if not sources:
            continue
        weights = torch.ones_like(loss) if gradient is None else gradient[chunk]
        found = iter(torch.autograd.grad(loss, sources, weights))
        if of_hidden is not None:
            of_hidden[chunk] = next(found)
        for index, copy in enumerate(copies):
            if copy.requires_grad:
                totals[index] = _added(totals[index], next(found))
    return losses, [of_hidden, None, *totals]


def _added(total: Tensor | None, gradient: Tensor) -> Tensor:
    """The sum, in place and in float32 at least."""
    if total is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)
