"""Hands the weights of a model that trains to an inference engine, as `export_pretrained` would write them.

Tensors travel in buckets of the tensors that transformers' conversions need together. A bucket is gathered on
every rank before the bucket in front of it is handed out, so that a rank that waits for its engine never
waits in a collective at the same time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.export.plan import Bundle, ExportPlan
from composer_dist.checkpoint.export.weights import Export, here
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.moving.gather import gather_each
from composer_dist.distributed.ranks.process_group import broadcast
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.files.transformers import revert
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.inner import dense
from composer_dist.tensors.parts import Dims, rectangles

Push = Callable[[str, Dims, Tensor], object]


class WeightInfo(NamedTuple):
    """One tensor as an engine gets it."""

    name: str
    """As in a directory of `export_pretrained`."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the full tensor."""


@dataclass(frozen=True)
class WeightSource:
    """The weights of a model, by the names and in the shapes of `export_pretrained`.

    It can be iterated over again after every step: each time it gives the model's weights of that moment.
    """

    _export: Callable[[], Export]
    """Of the model as it is now; a collective."""
    _bucket_bytes: int

    def metadata(self) -> list[WeightInfo]:
        """Name, dtype and full shape of each tensor, in the order of iteration; a collective."""
        plan = self._export().plan(gather_all=True)
        entries = ((name, plan.index.entries[name]) for bundle in plan.groups for name in bundle.results)
        return [WeightInfo(name, entry.dtype, entry.shape) for name, entry in entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and full value of each tensor, on the mesh's device, the same on every rank; a collective.

        Every rank must take all of them. At most two buckets are held: one that is handed out, and the next.

        Raises:
            ParallelismRuntimeError: another rank has stopped before the end.
            ParallelismError: gathering or merging failed on a rank; raised on every rank.
        """
        export = self._export()
        agreement, ready = export.agreement, dict[str, Tensor]()
        try:
            for number, bucket in enumerate(self._buckets(export)):
                step = f"bucket {number} of weight_source"
                gathered = agreement.collectively(step, partial(self._gathered, export, bucket))
                agreement.reach(step, None)
                yield from _handed_out(ready)
                ready = gathered
            yield from _handed_out(ready)
        except GeneratorExit:
            cause = ParallelismRuntimeError(
                "Not all weights of weight_source were taken. Every rank must take all of them."
            )
            agreement.leave(cause, "weight_source")
            raise

    def push_shards(self, push: Push) -> None:
        """Give this rank's parts to an engine that takes shards; a collective.

        Each element goes out from one rank only. Tensors that are stored as the model has them are not
        gathered; those that transformers converts, peft merges or that are cut in another way are, and the
        ranks take turns to push them whole.

        Args:
            push: called as `push(name, start, part)`: `part` holds the elements of the full tensor from the
                index `start` on in each dimension. It must not use collectives.

        Raises:
            ParallelismError: gathering, merging or `push` failed on a rank; raised on every rank.
        """
        export = self._export()
        agreement, plan = export.agreement, export.plan(gather_all=False)
        whole = []
        with agreement.together("push_shards"):
            for bundle in export.plan(gather_all=True).groups:
                if not _stored_as_it_is(bundle, plan, export):
                    whole.append(bundle)
                    continue
                for start, part in _parts(export, bundle.sources[0]):
                    push(bundle.results[0], start, export.stored(part))
        for number, bundle in enumerate(whole):
            turn = agreement.ranks[number % len(agreement.ranks)] == agreement.rank
            values = agreement.collectively("push_shards", partial(self._gathered, export, [bundle]))
            with agreement.together("push_shards"):
                for name, value in values.items() if turn else ():
                    push(name, (0,) * value.ndim, value)

    def _buckets(self, export: Export) -> Iterator[list[Bundle]]:
        """Bundles in order, as many as fit into a bucket, at least one."""
        bucket, held = list[Bundle](), 0
        for bundle in export.plan(gather_all=True).groups:
            nbytes = sum(export.tensors[name].nbytes for name in bundle.sources)
            if bucket and held + nbytes > self._bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append(bundle)
            held += nbytes
        if bucket:
            yield bucket

    @torch.no_grad()
    def _gathered(self, export: Export, bucket: list[Bundle]) -> dict[str, Tensor]:
        """The stored tensors of a bucket."""
        names = [name for bundle in bucket for name in bundle.sources]
        plain = [name for name in names if name not in export.layers]
        tensors = (_the_same(export.tensors[name]) for name in plain)
        values = {plain[index]: dense(full) for index, full in gather_each(tensors)}
        made: dict[str, Tensor] = {}
        for bundle in bucket:
            for name in bundle.sources:
                if name not in values:
                    values |= export.layers[name].merged()
            stored = revert(export.model, {name: values.pop(name) for name in bundle.sources})
            made |= {name: export.stored(stored[name]) for name in bundle.results}
        return made


def _handed_out(values: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, which is let go then."""
    for name in list(values):
        yield name, values.pop(name)


def _the_same(tensor: Tensor) -> Tensor:
    """A tensor that is equal on all ranks: of a buffer, the first rank's."""
    return tensor if isinstance(tensor, DTensor | nn.Parameter) else broadcast(tensor)


def _stored_as_it_is(bundle: Bundle, plan: ExportPlan, export: Export) -> bool:
    """Whether one tensor of the model is one stored tensor, in the same order."""
    if len(bundle.sources) != 1 or len(bundle.results) != 1 or bundle.sources[0] not in plan.direct:
        return False
    tensor, place = export.tensors[bundle.sources[0]], plan.direct[bundle.sources[0]]
    same = Blueprint.stored(bundle.results[0], tuple(tensor.shape), tensor.dtype)
    return (place.boxes, place.dims) == (same.boxes, same.dims) and Layout.of(tensor).tp_groups == 1


def _parts(export: Export, name: str) -> Iterator[tuple[Dims, Tensor]]:
    """The rectangles of a tensor that this rank gives: first index in each dimension, and values."""
    tensor = export.tensors[name]
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    layout = Layout.of(tensor)
    part, flat = layout.part(here(tensor)), local.contiguous().view(-1)
    first, last = export.share(tensor, local)
    sizes, at = [high - low for low, high in part.window], first
    for corner, extent in rectangles(sizes, part.first + first, part.first + last):
        start = tuple(low + index for (low, _), index in zip(part.window, corner, strict=True))
        if (dim := layout.tp_dim) is not None:  # the one group
            start, extent = start[:dim] + start[dim + 1 :], extent[:dim] + extent[dim + 1 :]
        count = torch.Size(extent).numel()
        yield start, flat[at : at + count].view(extent)
        at += count
