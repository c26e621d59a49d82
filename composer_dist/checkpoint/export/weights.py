"""Writes a transformers model's files on all ranks at once, each from its own shards."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.export.merged import AdaptedLayer
from composer_dist.checkpoint.export.plan import Bundle, ExportPlan, plan_export
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.files.slabs import Slab, plan_reads
from composer_dist.files.transformers import revert, untied, untying
from composer_dist.files.write import NewFiles, write_slabs, write_tensor
from composer_dist.progress import Progress, Stage
from composer_dist.tensors.inner import codec_of, dense
from composer_dist.users_code import warn

_SMALL = 1 << 20
"""Bytes; one rank alone writes a smaller part, even if several ranks hold it."""


@dataclass
class Export:
    """An export of a model.

    Args:
        model: a transformers model, with or without peft's layers in it.
        tensors: the tensors to store, by name: the model's own, sharded or not.
        layers: name to the layer to merge for its value.
        mesh: the model's mesh, if it was prepared.
        max_shard_size: bytes, or as "5GB".
        dtype: floating-point tensors are stored in it; None keeps their own.
    """

    model: Any
    tensors: Mapping[str, Tensor]
    layers: Mapping[str, AdaptedLayer]
    mesh: Mesh | None
    max_shard_size: int | str = "5GB"
    dtype: torch.dtype | None = None
    agreement: Agreement = field(default_factory=Agreement)

    def __post_init__(self) -> None:
        self.first = self.agreement.rank == self.agreement.ranks[0]
        self.values: dict[str, object] = {}
        known: dict[tuple[int, int], object] = {}
        for name, tensor in self.tensors.items():
            layer = self.layers.get(name)
            self.values[name] = known.setdefault((id(tensor), id(layer and layer.module)), object())

    def stored(self, value: Tensor) -> Tensor:
        """A value in the dtype in which it is stored."""
        return value.to(self._stored_in(value.dtype))

    def _stored_in(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    @property
    def untying(self) -> list[Any]:
        """The configurations that ask for a tie that the stored tensors do not have."""
        return untying(self.model, self.values)

    def write(self, directory: Path) -> None:
        """Write the weights into a directory that the first rank has made; a collective.

        If another rank does not see that directory, the first rank gathers and writes everything.

        Raises:
            CheckpointValueError: something cannot be stored.
            CheckpointRuntimeError: a rank cannot write; raised on every rank.
        """
        shared = self._is_shared(directory)
        with self.agreement.together("the plan of the files"):
            plan = self.plan(gather_all=not shared)
        self.agreement.reach("the plan of the files", plan.digest(), _same_plan)
        paths = [directory / name for name, _ in plan.index.files]
        with self.agreement.together("making the files"):
            if self.first:
                plan.create_files(directory)
        with Progress(shown=self.first).stage("exporting") as stage, NewFiles(paths) as target:
            with self.agreement.together("writing the shards"):
                write_slabs(list(self._slabs(plan)), target, stage)
            failed = None
            if plan.groups:
                failed = self.agreement.collectively(
                    "gathering what is exported", lambda: self._write_groups(plan, target, shared, stage)
                )
            with self.agreement.together("flushing the files"):
                if failed is not None:
                    raise failed
                target.flush()

    def _is_shared(self, directory: Path) -> bool:
        """Whether every rank sees the first rank's directory, tested with a file of an unused name."""
        nonce = directory / f"nonce-{secrets.token_hex(8)}"
        with self.agreement.together("making the directory"):
            if self.first:
                nonce.touch()
        seen = Path(self.agreement.reach("the directory", str(nonce), lambda found: found[0])).exists()
        views: list[bool] = self.agreement.reach("who sees the directory", seen, list)
        blind = [rank for rank, sees in zip(self.agreement.ranks, views, strict=True) if not sees]
        if self.first:
            nonce.unlink()
        if blind and self.first:
            warn(
                f"Ranks {', '.join(map(str, blind))} do not see "
                f"{directory.parent}, where rank {self.agreement.ranks[0]} writes: it gathers and writes "
                "everything alone. Export to a directory that all ranks share to write in parallel."
            )
        return not blind

    def plan(self, gather_all: bool) -> ExportPlan:
        """Where everything goes, the same on every rank.

        Raises:
            CheckpointValueError: something cannot be stored.
        """
        odd = [name for name, value in self.tensors.items() if not isinstance(value, Tensor)]
        meta = [name for name in self.tensors if name not in odd and self.tensors[name].is_meta]
        for names, what in ((odd, "not tensors"), (meta, "on the meta device")):
            if names:
                raise CheckpointValueError(f"Entries of the model's state are {what}: {', '.join(names)}.")
        kept = untied(self.model, self.tensors, self.values)
        parts = {
            name: Layout.of(tensor).part(replace(here(tensor), shard=0, tp=0))  # the same on all ranks
            for name, tensor in kept.items()
            if name not in self.layers and codec_of(tensor) is None
        }
        merged: dict[int, list[str]] = {}
        for name in kept.keys() & self.layers.keys():
            merged.setdefault(id(self.layers[name].module), []).append(name)
        return plan_export(
            self.model,
            {name: (tuple(tensor.shape), self._stored_in(tensor.dtype)) for name, tensor in kept.items()},
            parts,
            sum(tensor.numel() for tensor in kept.values() if isinstance(tensor, nn.Parameter)),
            self.max_shard_size,
            [sorted(names) for names in merged.values()],
            gather_all,
        )

    def _slabs(self, plan: ExportPlan) -> Iterator[Slab]:
        """The slabs of this rank's shards that it writes."""
        for name, place in plan.direct.items():
            tensor = self.tensors[name]
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            part, flat = Layout.of(tensor).part(here(tensor)), self.stored(local).contiguous().view(-1)
            first, last = self.share(tensor, local)
            yield from plan_reads(place, plan.index.entries, part, flat, first, last)

    def share(self, tensor: Tensor, local: Tensor) -> tuple[int, int]:
        """The range [first, last) of its part that this rank writes; other holders write the rest."""
        mesh = self.mesh or (Mesh.of(tensor) if isinstance(tensor, DTensor) else None)
        numel, rank = local.numel(), self.agreement.rank
        if mesh is None or not isinstance(tensor, DTensor | nn.Parameter):
            return (0, numel) if self.first else (0, 0)  # buffers may differ: use the first rank's
        table, layout = mesh.table, Layout.of(tensor)
        place = (table == rank).nonzero()[0].tolist()
        cut = (False, layout.rows, layout.tp_dim is not None)
        number, holders = 0, 1
        for index, size, divided in zip(place, table.shape, cut, strict=True):
            if not divided:
                number, holders = number * size + index, holders * size
        if local.nbytes < _SMALL:
            return (0, numel) if number == 0 else (0, 0)
        return numel * number // holders, numel * (number + 1) // holders

    def _write_groups(
        self, plan: ExportPlan, target: NewFiles, shared: bool, stage: Stage
    ) -> Exception | None:
        """Gather tensors that cannot be written from the shards; the ranks take turns writing them.

        A rank that fails returns its error after it has taken part in all gathering.
        """
        failed: Exception | None = None
        ranks = self.agreement.ranks
        stage.expect(sum(plan.index.entries[name].nbytes for one in plan.groups for name in one.results))
        for number, group in enumerate(plan.groups):
            alike = all(isinstance(self.tensors[name], DTensor | nn.Parameter) for name in group.sources)
            turn = ranks[number % len(ranks) if shared and alike and self.mesh is not None else 0]
            values, unmerged = self._gathered(group, turn == self.agreement.rank)
            failed = failed or unmerged
            if turn == self.agreement.rank and failed is None:
                try:
                    self._write_group(group, values, plan, target)
                except Exception as error:
                    failed = error
            stage.advance(sum(plan.index.entries[name].nbytes for name in group.results))
        return failed

    def _gathered(self, group: Bundle, wanted: bool) -> tuple[dict[str, Tensor], Exception | None]:
        """The values, and why some could not be merged; all are gathered in any case."""
        values: dict[str, Tensor] = {}
        failed: Exception | None = None
        for name in group.sources:
            if name in values:
                continue
            if (layer := self.layers.get(name)) is None:
                full = gather(self.tensors[name])
                values[name] = dense(full) if wanted else torch.empty(0)
            else:
                try:
                    merged = layer.merged(wanted)
                except CheckpointValueError as error:
                    merged, failed = {}, failed or error
                values |= {
                    key: merged.get(key, torch.empty(0)) for key in group.sources if key in self.layers
                }
        return values, failed

    def _write_group(
        self, group: Bundle, values: dict[str, Tensor], plan: ExportPlan, target: NewFiles
    ) -> None:
        made = revert(self.model, {name: value.cpu() for name, value in values.items()})
        for name in group.results:
            entry, value = plan.index.entries[name], self.stored(made[name])
            if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
                raise CheckpointValueError(
                    f"{name} was computed as {tuple(value.shape)} of {value.dtype}, but planned as "
                    f"{entry.shape} of {entry.dtype}."
                )
            write_tensor(value, target, entry.file, entry.offset)


def here(tensor: Tensor) -> Coordinate:
    """This rank's coordinate in the tensor's mesh."""
    return Mesh.of(tensor).here if isinstance(tensor, DTensor) else Coordinate()


def _same_plan(digests: list[str]) -> None:
    if len(set(digests)) > 1:
        raise ParallelismValueError(
            "The ranks would write different files: their models have different names, shapes, dtypes or "
            "ties, or they pass a different max_shard_size, merge_adapters or dtype."
        )
