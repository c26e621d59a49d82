"""Context parallelism: each rank trains on its part of a sequence.

The ranks of the mesh's "cp" dimension get the same batch. Inside `context_parallel` each rank has its part
of it, and attention covers all parts. Gradients need nothing special: parameters are sharded over these
ranks too, and FSDP2 averages the gradients of losses whose mean is the loss of the whole batch.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from composer_dist.distributed import prepared
from composer_dist.distributed.context_parallelism.attention import distributed_attention
from composer_dist.distributed.context_parallelism.batch import Splitter
from composer_dist.distributed.context_parallelism.proof import prove
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import ParallelismRuntimeError

_inside: ContextVar[bool] = ContextVar("context_parallel", default=False)


def expect_context(model: nn.Module, mesh: Mesh) -> None:
    """Warn if the mesh has context-parallel ranks, but the first training step does not use the context."""
    cp = mesh.cp
    if cp is None:
        return
    ranks = cp.size()

    def look(module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        if not _inside.get():
            warnings.warn(
                f"The mesh has cp={ranks}, but the model trains outside of context_parallel(model, batch): "
                "the ranks of a sequence all compute the whole of it. Put forward and backward inside, or "
                "give these ranks to dp_shard.",
                UserWarning,
                stacklevel=2,
            )

    handle = model.register_forward_pre_hook(look)


@contextmanager
def context_parallel(
    model: nn.Module,
    batch: Any,
    *,
    sequence_dims: Mapping[str, int | None] | None = None,
    buffers: Mapping[str, int] | None = None,
    balanced: bool | None = None,
    weighted: bool = False,
    check: bool = True,
) -> Iterator[Any]:
    """Give each rank its part of the sequence; forward, loss and backward belong inside.

    ```python
    with context_parallel(model, batch) as part:
        model(**part).loss.backward()
    ```

    The part has the global `position_ids`, and for a transformers model labels shifted before they were cut
    (`shift_labels`) and the loss's denominator (`num_items_in_batch`), where the model takes them. Each
    rank's loss is such that its mean over the ranks is the loss of the whole batch, as in data parallelism.
    A loss of your own is so too if it is a mean over a part's labels and all parts have equally many.

    Without a "cp" dimension the batch comes back as it is. Evaluation and `generate` need no context:
    every rank has the whole sequence there.

    Args:
        model: prepared by `parallelize_model`.
        batch: the whole batch, the same on all ranks that share a sequence (see `sampler_kwargs`): a
            tensor, mapping or sequence of tensors `(batch, sequence, ...)`. It stays as it is.
        sequence_dims: tensor name to the dimension of its sequence, None for one that has none; by default
            dimension 1 of every tensor with two or more. "0", "1", ... name a sequence's tensors.
        buffers: tables of positions among the model's buffers, such as `{"freqs_cis": 0}`: name to dimension.
            A rank sees the rows of its positions.
        balanced: give each rank one part of the head and one of the tail, for equal work under a causal
            mask; None does so where the model's attention says it is causal.
        weighted: you multiply each part's mean loss by cp * its labels / the labels of the whole, as the
            Trainer does; without, parts with unequally many `labels` are refused where the model takes no
            `num_items_in_batch`.
        check: prove at the first step that positions meet nowhere but in attention (two forwards of
            a few positions, and a comparison of the batches).

    Raises:
        ParallelismRuntimeError: the model was not prepared, or a context inside of another.
        ParallelismValueError: a length that cannot be divided, a mask or tensor that cannot be split, a
            model that cannot be.
        ParallelismKeyError: a buffer that the model does not have.
    """
    mesh = prepared.prepared_mesh(model)
    if _inside.get():
        raise ParallelismRuntimeError("This is inside of context_parallel already, where batches are parts.")
    if mesh is None:
        raise ParallelismRuntimeError(
            f"context_parallel needs the model that parallelize_model prepared, not {type(model).__name__}."
        )
    cp = mesh.cp
    if cp is None:
        yield batch
        return
    splitter = Splitter(model, sequence_dims, buffers, balanced, weighted)
    layout = splitter.layout(batch, cp.size(), cp.get_local_rank())
    if check and not prepared.record(model).proven:
        prove(splitter, batch, layout, cp, Agreement(mesh.ranks))
        prepared.record(model).proven = True
    part = splitter.split(batch, layout)
    token = _inside.set(True)
    try:
        with splitter.tables(layout), distributed_attention(layout, cp):
            yield part
    finally:
        _inside.reset(token)
