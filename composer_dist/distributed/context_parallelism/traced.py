"""A rank's part of a sequence while a step is traced on tensors without values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composer_dist.distributed.context_parallelism.attention import attention_as, gathered_attention
from composer_dist.distributed.context_parallelism.batch import Splitter


@contextmanager
def traced_part(model: nn.Module, batch: Any, cp: DeviceMesh) -> Iterator[Any]:
    """As `context_parallel` with its defaults: yields the part, and attention gathers keys and values.

    Args:
        model: is not prepared.
        batch: the whole batch, without values.
        cp: this rank and its peers, which need not run.
    """
    splitter = Splitter(model, weighted=True)
    if isinstance(batch, Mapping) and "labels" in batch and splitter.accepts("num_items_in_batch"):
        batch = {"num_items_in_batch": 1, **batch}  # the labels cannot be counted
    layout = splitter.layout(batch, cp.size(), cp.get_local_rank())
    part = splitter.split(batch, layout)
    with attention_as(gathered_attention(layout, cp.get_group())):
        yield part
