"""Writes a sharded checkpoint: each rank's file first, then `checkpoint.json`, which completes it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.checkpoint.background import Buffers
from composer_dist.checkpoint.format import dcp as dcp_metadata
from composer_dist.checkpoint.format.dcp import Item
from composer_dist.checkpoint.format.shares import LocalBox, boxes_of, choose, own
from composer_dist.checkpoint.format.state_tree import Leaves, encode
from composer_dist.checkpoint.storage.place import Place, complete, writing
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.files.checked import CheckedFile
from composer_dist.files.checkpoint_format import (
    NAME,
    Chunk,
    Kind,
    Manifest,
    StoredFile,
    StoredObject,
    StoredTensor,
)


@dataclass
class Saving:
    """A planned sharded checkpoint."""

    place: Place
    token: str
    keep: int | None
    pieces: list[LocalBox]
    """The boxes that this rank writes."""
    leaves: Leaves
    """From here on only the tensors' dtypes and shapes are used; objects are the first rank's."""
    aliases: dict[str, str]
    """Further names of tensors to their first names."""
    kinds: dict[str, Kind]
    structure: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def plan(
        cls,
        place: Place,
        token: str,
        keep: int | None,
        contents: Mapping[str, tuple[Kind, Any]],
        agreement: Agreement,
    ) -> Saving:
        """Take the contents apart, and divide them among the ranks.

        Raises:
            CheckpointValueError: something cannot be stored, or the ranks hold different things.
        """
        with agreement.together("the contents of the checkpoint"):
            leaves = Leaves()
            structure = {key: encode((key,), value, leaves) for key, (_, value) in contents.items()}
            leaves.check()
            aliases, distinct = _aliases(leaves.tensors)
            kinds = {key: kind for key, (kind, _) in contents.items()}
            alike = {
                name for name, one in distinct.items() if _is_alike(one, kinds[str(leaves.paths[name][0])])
            }
            first = agreement.rank == agreement.ranks[0]
            held = distinct if first else {name: one for name, one in distinct.items() if name in alike}
            pieces = [piece for name, tensor in held.items() for piece in boxes_of(name, tensor)]
        shapes = {name: tuple(tensor.shape) for name, tensor in distinct.items()}
        mine = choose(agreement, pieces, shapes)
        if not first:
            leaves.objects = {}
        facts = {"time": time.time(), "ranks": len(agreement.ranks), "torch": torch.__version__}
        return cls(place, token, keep, mine, leaves, aliases, kinds, structure, facts)

    def stage(self, buffers: Buffers) -> None:
        """Copy everything that training may change."""
        self.pieces = [replace(p, values=buffers.copy(p.key, p.values)) for p in self.pieces]
        self.leaves.objects, self.structure = deepcopy((self.leaves.objects, self.structure))

    def run(self, agreement: Agreement) -> None:
        """Write this rank's file; the first rank then completes the checkpoint. All succeed, or all raise."""
        post: dict[str, Any] = {}
        error: Exception | None = None
        try:
            post = self._write(agreement.rank)
        except Exception as caught:
            error = caught
        except BaseException as interrupt:
            agreement.leave(interrupt, "the files of the checkpoint")
            self._clean(agreement)
            raise
        try:
            agreement.reach("the files of the checkpoint", post, self._finish, error)
        except BaseException:
            self._clean(agreement)
            raise

    def _clean(self, agreement: Agreement) -> None:
        if agreement.rank == agreement.ranks[0]:
            self.place.discard(self.token)

    def _write(self, rank: int) -> dict[str, Any]:
        """Write this rank's file; returns its contents and their places in JSON types."""
        if not self.pieces and not self.leaves.objects:
            return {}
        name = f"__{rank}_{self.token}.distcp"
        tensors, objects = [], []
        where = f"{os.fspath(self.place.path)}/{name}"
        with writing(self.place):
            sink = self.place.sink(self.token, name)
        with CheckedFile(sink, name, where=where) as file:
            for piece in self.pieces:
                places = file.save_tensor(own(piece.values))
                tensors.append([piece.name, list(piece.start), list(piece.values.shape), *places])
            for path, value in self.leaves.objects.items():
                objects.append([path, *file.save_object(value)])
        stored = file.stored()
        facts = [stored.name, stored.nbytes, list(stored.checksums)]
        return {"file": facts, "tensors": tensors, "objects": objects}

    def _finish(self, posts: list[dict[str, Any]]) -> None:
        """Write the manifest and put the checkpoint in its place, on the first rank."""
        manifest, items = self._describe(posts)
        metadata = dcp_metadata.dcp_metadata(manifest, items, self.leaves.paths)
        marks = {dcp_metadata.NAME: metadata, NAME: manifest.to_text().encode()}
        complete(self.place, self.token, marks, self.keep)

    def _describe(
        self, posts: list[dict[str, Any]]
    ) -> tuple[Manifest, dict[tuple[str, tuple[int, ...] | None], Item]]:
        manifest = Manifest(kinds=self.kinds, structure=self.structure, facts=self.facts)
        items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
        chunks: dict[str, list[Chunk]] = {}
        for post in filter(None, posts):
            name, nbytes, checksums = post["file"]
            number = len(manifest.files)
            manifest.files.append(StoredFile(name, nbytes, tuple(checksums)))
            for path, start, sizes, first, raw, length in post["tensors"]:
                chunks.setdefault(path, []).append(Chunk(tuple(start), tuple(sizes), number, raw))
                items[path, tuple(start)] = Item(name, first, length)
            for path, first, length in post["objects"]:
                manifest.objects[path] = StoredObject(number, first, length)
                items[path, None] = Item(name, first, length)
        for path, tensor in self.leaves.tensors.items():
            source = self.aliases.get(path, path)
            boxes = tuple(sorted(chunks.get(source, ()), key=lambda chunk: chunk.start))
            manifest.tensors[path] = StoredTensor(tensor.dtype, tuple(tensor.shape), boxes)
            if source != path:
                items |= {(path, chunk.start): items[source, chunk.start] for chunk in boxes}
        return manifest, items


def _is_alike(tensor: Tensor, kind: Kind) -> bool:
    """Whether ranks that hold the same part of a tensor hold the same values; buffers may differ."""
    return isinstance(tensor, DTensor | nn.Parameter) or kind == "optimizer"


def _aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Further names of tensors to their first names, and every tensor once."""
    seen: dict[int, str] = {}
    aliases: dict[str, str] = {}
    distinct: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first = seen.setdefault(id(tensor), name)
        if first == name:
            distinct[name] = tensor
        else:
            aliases[name] = first
    return aliases, distinct
