"""Context parallelism: each rank trains on its part of a sequence.

The ranks of the mesh's "cp" dimension get the same batch. Inside `context_parallel` each rank has its part
of it, and attention covers all parts. The parameters are sharded over these ranks too, so FSDP2 averages the
gradients, and the mean of the ranks' losses is the loss of the whole batch.
"""

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
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.users_code import warn

_inside: ContextVar[bool] = ContextVar("context_parallel", default=False)


def expect_context(model: nn.Module, mesh: Mesh) -> None:
    """Warn if the mesh has context-parallel ranks but the first training step runs outside the context."""
    if mesh.cp is None:
        return
    ranks = mesh.cp.size()

    def look(module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        handle.remove()
        if not _inside.get():
            warn(
                f"The mesh has cp={ranks}, but the model trains outside of context_parallel(model, batch), "
                "so every rank of a sequence computes all of it. Run forward and backward inside, or "
                "assign these ranks to dp_shard."
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

    The part includes the global `position_ids` and, for a transformers model, labels that were shifted before
    the split (`shift_labels`) and the loss's denominator (`num_items_in_batch`), if the model accepts them.
    The mean of the ranks' losses is the loss of the whole batch, as in data parallelism. This is also true of
    your own loss if it is a mean over a part's labels and all parts have the same number of labels.

    Without a "cp" dimension the batch is returned unchanged. Evaluation and `generate` need no context,
    because there every rank has the whole sequence.

    Args:
        model: a model prepared by `parallelize_model`.
        batch: the whole batch, the same on all ranks that share a sequence (see `sampler_kwargs`): a
            tensor, mapping or sequence of tensors `(batch, sequence, ...)`. It is not changed.
        sequence_dims: tensor name to the dimension of its sequence, or None if it has none; by default
            dimension 1 of every tensor with two or more. Tensors in a sequence are named "0", "1", ...
        buffers: names of the model's buffers that are tables of positions, each with the dimension of these,
            such as `{"freqs_cis": 0}`. A rank sees the rows of its positions.
        balanced: give each rank one part of the head and one of the tail, for equal work under a causal
            mask; None does so if the model's attention says that it is causal.
        weighted: you multiply each part's mean loss by cp * its labels / the whole's labels, as the Trainer
            does. Otherwise a model that does not accept `num_items_in_batch` needs parts with the same number
            of `labels`.
        check: check at the first step that only attention mixes positions (two forwards of a few positions,
            and a comparison of the batches).

    Raises:
        ParallelismRuntimeError: the model is not prepared, or the context is inside another one.
        ParallelismValueError: the length cannot be divided, or a mask, a tensor or the model cannot be split.
        ParallelismKeyError: the model has no such buffer.
    """
    mesh = prepared.prepared_mesh(model)
    if _inside.get():
        raise ParallelismRuntimeError("context_parallel cannot be nested: this batch is already a part.")
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
    proven = prepared.record(model).proven
    if check and model.training not in proven:
        prove(splitter, batch, layout, mesh, cp)
        proven.add(model.training)
    part = splitter.split(batch, layout)
    token = _inside.set(True)
    try:
        with splitter.tables(layout), distributed_attention(layout, cp):
            yield part
    finally:
        _inside.reset(token)
