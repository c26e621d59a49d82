"""Attention over a sequence of which each rank has a part.

Inside `distributed_attention`, `torch.nn.functional.scaled_dot_product_attention` is replaced, as in torch's
own context: on CUDA devices by torch's ring. On other devices, and for calls that the ring does not support,
every rank gathers all keys and values, which takes more memory and gives the same numbers.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.errors import ParallelismValueError

Attention = Callable[..., Tensor]
"""Like `scaled_dot_product_attention`."""


@dataclass(frozen=True)
class SequenceSplit:
    """Which positions of a sequence each rank has.

    Balanced, the sequence is cut into twice as many blocks as there are ranks, and a rank has one from
    the head and its mirror image from the tail, so that under a causal mask all have equally much to do.
    """

    length: int
    ranks: int
    rank: int
    balanced: bool

    @property
    def local_length(self) -> int:
        """Positions per rank."""
        return self.length // self.ranks

    @property
    def block_length(self) -> int:
        """Positions per block."""
        return self.local_length // len(self.blocks(0))

    def blocks(self, rank: int) -> tuple[int, ...]:
        """The blocks that a rank has, in order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    def positions(self, device: torch.device, rank: int | None = None) -> Tensor:
        """The positions that a rank (None: this one) has: `(local_length,)`, increasing."""
        blocks = torch.tensor(self.blocks(self.rank if rank is None else rank), device=device)
        inside = torch.arange(self.block_length, device=device)
        return (blocks[:, None] * self.block_length + inside).flatten()


@contextmanager
def attention_as(function: Attention) -> Iterator[None]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is `function`, in every thread.

    It must reach every thread because backward recomputes checkpointed blocks in its own threads. Compiled
    blocks see the same function at each step and do not compile it.
    """
    before = F.scaled_dot_product_attention
    _functions.append(function)
    F.scaled_dot_product_attention = _uncompiled() if "torch._dynamo" in sys.modules else _innermost
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        _functions.pop()


_functions: list[Attention] = []


def _innermost(*args: Any, **kwargs: Any) -> Tensor:
    return _functions[-1](*args, **kwargs)


@functools.cache
def _uncompiled() -> Attention:
    attention: Attention = torch.compiler.disable(_innermost)
    return attention


@contextmanager
def distributed_attention(layout: SequenceSplit, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, attention is over the whole sequence, of which each rank of `mesh` (1-D) has its part."""
    gathered = gathered_attention(layout, mesh.get_group())
    with ExitStack() as stack:
        attention = gathered
        if mesh.device_type == "cuda":
            stack.enter_context(_torch.ring_attention(mesh, layout.length, layout.balanced))
            attention = _ring_where_it_can(layout, F.scaled_dot_product_attention, gathered)
        stack.enter_context(attention_as(attention))
        yield


def gathered_attention(layout: SequenceSplit, group: dist.ProcessGroup) -> Attention:
    """Attention of this rank's queries to the keys and values of all ranks."""
    attention_before: Attention = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        check_call(layout, query, key, attn_mask)
        key, value = _gather(key, value, layout, group)
        attend: Attention = functools.partial(attention_before, dropout_p=dropout_p, **options)
        if not is_causal:
            return attend(query, key, value)
        blocks = layout.blocks(layout.rank)
        outputs = []
        for block, part in zip(blocks, query.chunk(len(blocks), dim=-2), strict=True):
            past = block * layout.block_length
            end = past + layout.block_length
            mask = torch.ones(layout.block_length, end, dtype=torch.bool, device=query.device).tril(past)
            outputs.append(attend(part, key[..., :end, :], value[..., :end, :], mask))
        return torch.cat(outputs, dim=-2)

    return attention


def check_call(layout: SequenceSplit, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    """Refuse attention that a rank cannot do with its part of the sequence.

    Raises:
        ParallelismValueError: a mask, or queries and keys of other lengths than this rank's part.
    """
    if mask is not None:
        raise ParallelismValueError(
            f"Attention with a mask {tuple(mask.shape)} cannot be split over the sequence "
            f"(cp={layout.ranks}); use is_causal=True, pad on the right, or use cp=1."
        )
    if query.shape[-2] != layout.local_length or key.shape[-2] != layout.local_length:
        raise ParallelismValueError(
            f"Attention of {query.shape[-2]} queries to {key.shape[-2]} keys, where each rank has "
            f"{layout.local_length} positions (cp={layout.ranks}): cross-attention, caches and prefixes "
            "cannot be split over the sequence."
        )


def _ring_where_it_can(layout: SequenceSplit, ring: Attention, gathered: Attention) -> Attention:
    """Torch's ring where that gives the right result; backward of dropout, for one, it gets wrong."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        check_call(layout, query, key, attn_mask)
        grouped = bool(options.get("enable_gqa"))
        able = (is_causal or not layout.balanced) and query.ndim == 4 and not dropout_p
        chosen = ring if able and _is_fused(query, key, value, is_causal, grouped) else gathered
        return chosen(query, key, value, None, dropout_p, is_causal, **options)

    return attention


def _is_fused(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether there is a kernel for this call that gives what the ring adds up by: the log of the sums."""
    kernels = torch.backends.cuda
    call = kernels.SDPAParams(query, key, value, None, 0.0, is_causal, enable_gqa)
    return (
        kernels.can_use_flash_attention(call)
        or kernels.can_use_efficient_attention(call)
        or kernels.can_use_cudnn_attention(call)
    )


def _gather(
    key: Tensor, value: Tensor, layout: SequenceSplit, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """All ranks' keys and values, `(..., length, width)`, in the order of their positions."""
    both: Tensor = _AllGather.apply(torch.cat([key.flatten(), value.flatten()]), group)  # type: ignore[no-untyped-call]
    order = [block for rank in range(layout.ranks) for block in layout.blocks(rank)]
    whole = []
    for part, like in zip(both.split([key.numel(), value.numel()], dim=1), (key, value), strict=True):
        parts = [row.view(like.shape).chunk(len(order) // layout.ranks, dim=-2) for row in part.unbind()]
        by_block = dict(zip(order, (block for blocks in parts for block in blocks), strict=True))
        whole.append(torch.cat([by_block[index] for index in range(len(order))], dim=-2))
    return whole[0], whole[1]


class _AllGather(torch.autograd.Function):
    """`(n,)` on each rank to `(ranks, n)` on all; gradients are summed over the ranks, in float32."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = flat.new_empty(group.size() * flat.numel())
        _torch.all_gather_single(gathered, flat, group=group)
        return gathered.view(group.size(), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        own = wide.new_empty(wide.shape[1])
        _torch.reduce_scatter_single(own, wide.flatten(), group=ctx.group)
        return own.to(gradient.dtype), None
