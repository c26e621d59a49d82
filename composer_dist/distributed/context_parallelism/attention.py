"""Attention over a sequence that is split among the ranks.

`distributed_attention` replaces `torch.nn.functional.scaled_dot_product_attention`, as torch's own context
does: on CUDA devices by torch's ring. On other devices, and for calls that the ring does not support, every
rank gathers all keys and values, which gives the same numbers but takes more memory.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from composer_dist import _torch
from composer_dist.errors import ParallelismValueError


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def make(self, function: Callable[..., Tensor]) -> Tensor:
        """Call `function` with these arguments."""
        tensors = (self.query, self.key, self.value, self.attn_mask)
        options = {"scale": self.scale, "enable_gqa": self.enable_gqa}
        return function(*tensors, self.dropout_p, self.is_causal, **options)


Attention = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class SequenceSplit:
    """Which positions of a sequence each rank has.

    If it is balanced, the sequence is cut into twice as many blocks as there are ranks, and each rank has one
    from the head and its mirror image from the tail, so that a causal mask gives all ranks equal work.
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
        """The positions of a rank (by default this one): `(local_length,)`, increasing."""
        blocks = torch.tensor(self.blocks(self.rank if rank is None else rank), device=device)
        inside = torch.arange(self.block_length, device=device)
        return (blocks[:, None] * self.block_length + inside).flatten()

    def part_of(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor with the whole sequence in dimension `dim`."""
        return tensor.index_select(dim, self.positions(tensor.device))


@contextmanager
def attention_as(function: Attention) -> Iterator[None]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is `function`, in every thread.

    It must reach every thread because backward recomputes checkpointed blocks in its own threads. Compiled
    blocks see the same function at each step and do not compile it. The fused kernels by which torch's own
    transformer layers evaluate have attention of their own, and are not used.
    """
    before, fused = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    _functions.append(function)
    F.scaled_dot_product_attention = _uncompiled() if "torch._dynamo" in sys.modules else _innermost
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        F.scaled_dot_product_attention = before
        _functions.pop()


_functions: list[Attention] = []


def _innermost(*args: Any, **kwargs: Any) -> Tensor:
    return _functions[-1](AttentionCall(*args, **kwargs))


@functools.cache
def _uncompiled() -> Callable[..., Tensor]:
    attention: Callable[..., Tensor] = torch.compiler.disable(_innermost)
    return attention


@contextmanager
def distributed_attention(layout: SequenceSplit, mesh: DeviceMesh) -> Iterator[None]:
    """Inside, attention is over the whole sequence, of which each rank of `mesh` (1-D) has its part."""
    attention = gathered_attention(layout, mesh.get_group())
    with ExitStack() as stack:
        _around.append(F.scaled_dot_product_attention)
        stack.callback(_around.pop)
        if mesh.device_type == "cuda":
            stack.enter_context(_torch.ring_attention(mesh, layout.length, layout.balanced))
            attention = _ring_where_it_can(layout, F.scaled_dot_product_attention, attention)
        stack.enter_context(attention_as(attention))
        yield


@contextmanager
def attention_of_each_rank() -> Iterator[None]:
    """Inside, each rank attends to its own sequences, whole ones, also within `distributed_attention`."""
    with ExitStack() as stack:
        if _around:
            before = _around[0]
            stack.enter_context(attention_as(lambda call: call.make(before)))
        yield


_around: list[Callable[..., Tensor]] = []
"""What attention is outside of each `distributed_attention`."""


def gathered_attention(layout: SequenceSplit, group: dist.ProcessGroup) -> Attention:
    """Attention of this rank's queries to the keys and values of all ranks."""
    attention_before = F.scaled_dot_product_attention

    def attention(call: AttentionCall) -> Tensor:
        check_call(layout, call)
        key, value = _gather(call.key, call.value, layout, group)
        if not call.is_causal:
            return replace(call, key=key, value=value).make(attention_before)
        blocks = layout.blocks(layout.rank)
        outputs = []
        for block, part in zip(blocks, call.query.chunk(len(blocks), dim=-2), strict=True):
            past = block * layout.block_length
            end = past + layout.block_length
            mask = torch.ones(layout.block_length, end, dtype=torch.bool, device=part.device).tril(past)
            past_keys, past_values = key[..., :end, :], value[..., :end, :]
            one = replace(call, query=part, key=past_keys, value=past_values, attn_mask=mask, is_causal=False)
            outputs.append(one.make(attention_before))
        return torch.cat(outputs, dim=-2)

    return attention


def check_call(layout: SequenceSplit, call: AttentionCall) -> None:
    """Refuse attention that a rank cannot compute with its part of the sequence."""
    if call.attn_mask is not None:
        raise ParallelismValueError(
            f"Attention with a mask {tuple(call.attn_mask.shape)} cannot be split over the sequence "
            f"(cp={layout.ranks}); use is_causal=True, pad on the right, or use cp=1."
        )
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if (queries, keys) != (layout.local_length, layout.local_length):
        raise ParallelismValueError(
            f"Attention of {queries} queries to {keys} keys cannot be split over the sequence: each rank has "
            f"{layout.local_length} positions (cp={layout.ranks}). Cross-attention, caches and prefixes are "
            "not supported."
        )


def _ring_where_it_can(layout: SequenceSplit, ring: Callable[..., Tensor], gathered: Attention) -> Attention:
    """Torch's ring for calls that it computes correctly (its backward of dropout, for example, is wrong)."""

    def attention(call: AttentionCall) -> Tensor:
        check_call(layout, call)
        able = (call.is_causal or not layout.balanced) and call.query.ndim == 4 and not call.dropout_p
        return call.make(ring) if able and _is_fused(call) else gathered(call)

    return attention


def _is_fused(call: AttentionCall) -> bool:
    """Whether this call has a kernel that also returns the logarithms of the sums, which the ring needs."""
    kernels = torch.backends.cuda
    arguments = (call.query, call.key, call.value, None, 0.0, call.is_causal, call.enable_gqa)
    fused = kernels.SDPAParams(*arguments)
    return (
        kernels.can_use_flash_attention(fused)
        or kernels.can_use_efficient_attention(fused)
        or kernels.can_use_cudnn_attention(fused)
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
