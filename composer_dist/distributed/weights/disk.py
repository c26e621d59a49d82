"""Weights from files to shards: every rank reads only what it holds.

The first rank reads the headers and sends them to the others through the store. All ranks then find out which
bytes of which files they need, check everything that can be checked, and only then read, directly into their
shards. Ranks that hold the same part of a tensor each read a share of it and gather the rest, unless it is
small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.moving.shares import shared_along, windows
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointValueError, ParallelismTypeError, ParallelismValueError
from composer_dist.files import checksums
from composer_dist.files.checkpoint_format import StoredFile
from composer_dist.files.find import index_weights, read_extra_state
from composer_dist.files.index import Index
from composer_dist.files.match import Match, match_names
from composer_dist.files.read import Files, open_files, read_slabs
from composer_dist.files.same import are_alike, are_stored_once, check_same, fingerprints, identities
from composer_dist.files.slabs import Slab, plan_reads
from composer_dist.progress import Progress
from composer_dist.structure.structure import Structure
from composer_dist.wording import kind_in_words, listed


@dataclass
class UnfilledPart:
    """This rank's part of a tensor, to be filled."""

    name: str
    layout: Layout
    local: torch.Tensor
    """Contiguous, of the part's elements in row-major order."""
    mesh: Mesh | None
    """None where this rank reads for itself alone."""

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """Dimensions of the mesh along which ranks hold the same part, of which each reads a share."""
        mesh = self.mesh
        if mesh is None or self.local.device.type != mesh.device_type:
            return ()
        return tuple(mesh.dims[name] for name in shared_along(self.layout, self.local.nbytes, mesh.sizes))


def check_weights(path: object, sync: str) -> None:
    """Raise unless `weights=` is a path or None, and `sync` does not contradict it."""
    if not isinstance(path, (str, os.PathLike, type(None))) or path == "":
        given = "''" if path == "" else kind_in_words(path)
        raise ParallelismTypeError(
            f"weights must be the path of a file or directory, or None, not {given}. A state dict is "
            "loaded by load_full_model_state, after the preparation."
        )
    if "://" in str(path):
        raise ParallelismValueError(f"weights={str(path)!r} is a URL; download the files first.")
    if path is not None and sync != "auto":
        raise ParallelismValueError(
            f"weights= reads files, but sync={sync!r} takes the weights from ranks; give only one."
        )


@dataclass
class Pretrained:
    """A checkpoint in files, matched with a model."""

    index: Index
    root: Path | str
    """The directory of the files as this rank knows it, or a URL."""
    match: Match
    agreement: Agreement
    bytes_read: int = 0
    """By this rank so far, including headers."""
    bytes_moved: int = 0
    """Sent and received by this rank for parts that several ranks hold."""
    path: Path | str = ""
    """The directory or file that the user named."""
    extra: Sequence[tuple[nn.Module, Any]] = ()
    """Modules and the extra state that they get."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        structure: Structure,
        agreement: Agreement,
        strict: bool,
        verify: bool = True,
    ) -> Pretrained | None:
        """Read the headers on the first rank and match them with the model on all.

        Args:
            verify: verify checksums, if there are any; every rank checks a share.

        Returns:
            None if the ranks' models differ, for which `decide_sources` raises.
        """
        here = Path(path)
        read = 0

        def decide(posts: list[list[str]]) -> list[Any] | None:
            nonlocal read
            if len({digest for digest, _ in posts}) > 1:
                return None
            names = [name for _, name in posts]
            if len(set(filter(None, names))) > 1:
                raise CheckpointValueError(
                    f"The ranks were given different weights: {', '.join(sorted(set(filter(None, names))))}. "
                    "Pass the same on every rank."
                )
            index, stored = index_weights(here)
            read = index.header_bytes
            return [index.pack(), [astuple(file) for file in stored]]

        post = [structure.digest, here.name if here.is_file() else ""]
        found = agreement.reach("the headers of the weights", post, decide)
        if found is None:
            return None
        index, stored = Index.unpack(found[0]), [StoredFile(*facts) for facts in found[1]]
        root = here if here.is_dir() else here.parent
        matched: list[Match] = []

        def match_them() -> None:
            if not here.exists():
                raise CheckpointValueError(f"There is no file or directory {here} on this rank's host.")
            _check_dense(structure, index, here)
            matched.append(match_names(structure, index.tensors, here, index.adapter))
            if index.extra is not None:
                matched[0].add_extra_state(structure, index.extra)
            matched[0].check(structure, index.entries, strict, here)

        check_same_files(root, index, agreement, match_them)
        (match,) = matched
        parts = agreement.ranks.index(agreement.rank), len(agreement.ranks)
        if verify and stored:
            with agreement.together("the checkpoint's contents"), Files(root, index.files) as files:
                # A single file is verified in full, because its pickle locates the tensors.
                checksums.verify(files, stored, *parts, index.entries.values() if here.is_dir() else None)
        if match.twins:
            agreement.each("its tied tensors", lambda: _differing(match, index, root, parts), _check_twins)
        extra: list[tuple[nn.Module, Any]] = []
        if index.extra:
            with agreement.together("reading the extra state"):
                extra = _read_extra(here, match, strict)
        return cls(index, root, match, agreement, read, path=here, extra=extra)

    def set_extra_state(self) -> None:
        """Give modules their extra state; every rank calls it, after the tensors have their values."""
        if not self.index.extra:
            return
        with self.agreement.together("the extra state"):
            for module, value in self.extra:
                module.set_extra_state(value)

    def warnings(self) -> list[str]:
        """What did not match, for callers with strict=False, and what does not fit the weights."""
        kept = "which are initialized if they are on meta, and keep their values otherwise"
        found = {
            f"{self.path} lacks these, {kept}": self.match.missing,
            f"The model lacks these, which {self.path} has": self.match.unexpected,
            f"These were computed from other weights than those of {self.path}; load the adapter next, or "
            "make it for a model that has its weights (from_pretrained)": self.match.stale,
        }
        return [f"{what}: {listed(names, 10)}." for what, names in found.items() if names]

    @property
    def names(self) -> frozenset[str]:
        """First names of the tensors for which the checkpoint has values."""
        return frozenset(self.match.tensors)

    def fill(
        self, targets: Sequence[UnfilledPart], bucket_bytes: int, progress: Progress | None = None
    ) -> None:
        """Read the targets' values; every rank calls it with the same tensors.

        Args:
            bucket_bytes: most bytes that are gathered at a time.
            progress: None shows progress on the first rank.
        """
        with self.agreement.together("reading the weights"), open_files(self.root, self.index.files) as files:
            slabs = [slab for target in targets for slab in self._slabs(target, bucket_bytes)]
            progress = progress or Progress(shown=self.agreement.rank == self.agreement.ranks[0])
            with progress.stage("reading weights") as stage:
                self.bytes_read += read_slabs(slabs, files, stage=stage)
        shared = [target for target in targets if target.sharing]
        if shared:
            self.bytes_moved += self.agreement.collectively(
                "gathering the weights", lambda: sum(_gather(target, bucket_bytes) for target in shared)
            )

    def read(self, name: str, whole: torch.Tensor) -> None:
        """Read a whole tensor, on this rank only."""
        target = UnfilledPart(name, Layout(tuple(whole.shape)), whole, None)
        with open_files(self.root, self.index.files) as files:
            self.bytes_read += read_slabs(list(self._slabs(target, 0)), files)

    def _slabs(self, target: UnfilledPart, bucket_bytes: int) -> Iterator[Slab]:
        """What this rank reads of a target: its share of each window, or everything."""
        part = target.layout.part(Coordinate() if target.mesh is None else target.mesh.here)
        blueprint, flat = self.match.tensors[target.name], target.local.view(-1)
        for first, last in _shares(target, bucket_bytes):
            yield from plan_reads(blueprint, self.index.entries, part, flat, first, last)


def _windows(target: UnfilledPart, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    assert target.mesh is not None
    holders = prod(target.mesh.device_mesh.size(dim) for dim in target.sharing)
    return windows(target.local.numel(), target.local.itemsize, holders, bucket_bytes)


def _shares(target: UnfilledPart, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """The elements [first, last) of a target that this rank reads."""
    dims, numel = target.sharing, target.local.numel()
    if not dims:
        yield 0, numel
        return
    assert target.mesh is not None
    mesh, number, holders = target.mesh.device_mesh, 0, 1
    here = mesh.get_coordinate() or ()
    for dim in dims:
        number, holders = number * mesh.size(dim) + here[dim], holders * mesh.size(dim)
    for first, length in _windows(target, bucket_bytes):
        share = length // holders
        yield first + number * share, first + (number + 1) * share
    yield numel // holders * holders, numel


@torch.no_grad()
def _gather(target: UnfilledPart, bucket_bytes: int) -> int:
    """Gather the shares of a target from the ranks that read them; return the bytes sent and received."""
    assert target.mesh is not None
    flat, mesh, moved = target.local.view(-1), target.mesh.device_mesh, 0
    here = mesh.get_coordinate() or ()
    for first, length in _windows(target, bucket_bytes):
        window, dims = flat[first : first + length], list(target.sharing)
        while dims:  # along the innermost dimension first: there, shares lie side by side
            dim = dims.pop()
            block = window
            for outer in dims:
                block = block.chunk(mesh.size(outer))[here[outer]]
            parts = list(block.chunk(mesh.size(dim)))
            mine = parts[here[dim]]
            dist.all_gather(parts, mine, group=mesh.get_group(dim))
            moved += 2 * (block.nbytes - mine.nbytes)
    return moved


def check_same_files(
    root: Path, index: Index, agreement: Agreement, also: Callable[[], object] = bool
) -> None:
    """Raise a CheckpointValueError if ranks see files of different contents, or what `also` raises."""

    def look(read: Callable[[Files], Any]) -> Any:
        with Files(root, index.files) as files:
            return read(files)

    def first_look() -> Any:
        also()
        return look(identities)

    first = agreement.each("the checkpoint's files", first_look, lambda all: [all.index(one) for one in all])
    if any(first):
        number = agreement.ranks.index(agreement.rank)
        mine = first[number] == number
        names = [name for name, _ in index.files]
        agreement.each(
            "the contents of the files",
            lambda: look(fingerprints) if mine else None,
            lambda all: check_same(names, all),
        )


def _read_extra(path: Path, match: Match, strict: bool) -> list[tuple[nn.Module, Any]]:
    """Modules and their extra state; if not `strict`, what cannot be read is missing."""
    try:
        values = read_extra_state(path)
    except CheckpointValueError as error:
        if strict:
            raise CheckpointValueError(f"{error} strict=False leaves extra state out.") from error
        match.missing.extend(match.extra)
        return []
    return [(module, values[name]) for name, module in match.extra.items()]


def _check_dense(structure: Structure, index: Index, path: Path) -> None:
    """Raise a CheckpointValueError if a checkpoint contains the inner tensors of quantized ones."""
    stored = index.entries if index.pieces is None else index.pieces
    quantized = [
        name
        for name, held in structure.tensors.items()
        if any(f"{name}.{inner.name}" in stored for inner in held.info.inner)
    ]
    if quantized:
        raise CheckpointValueError(
            f"{path} contains the quantized parts of {', '.join(quantized)}. Read it with load_checkpoint, "
            "or pass files with their dense values, as export_pretrained writes them."
        )


def _differing(match: Match, index: Index, root: Path, share: tuple[int, int]) -> list[str]:
    """The tied tensors for which the checkpoint has different values in a share of the elements."""
    with Files(root, index.files) as files:
        return [
            f"{' and '.join(match.keys[name])} differ in the checkpoint, but the model ties them as {name}"
            for name, twin in match.twins
            if not are_stored_once(match.tensors[name], twin, index.entries)
            and not are_alike(match.tensors[name], twin, index.entries, files, share)
        ]


def _check_twins(everywhere: list[list[str]]) -> None:
    if found := sorted(set().union(*everywhere)):
        raise CheckpointValueError(
            f"{'; '.join(found)}. Untie them (tie_word_embeddings=False) or remove the wrong one."
        )
