"""Compares weight files as several ranks see them, for a node may have an old copy of the same size.

It also compares two stored tensors that are one tensor in a model.
"""

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from math import prod

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.files.index import Entry
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.slabs import MIB, plan_reads
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.parts import Part

_WHOLE = 256 * MIB
"""More bytes than this are compared by samples."""
_BLOCK = 64 * 1024
_SAMPLE = 1 << 18
"""Elements of two tensors that are compared at each of three places."""


def identities(files: Files) -> list[str]:
    """What is equal for ranks that open the same files on the same host."""
    found = [os.fstat(descriptor) for descriptor in files.descriptors]
    return [f"{socket.gethostname()} {one.st_dev} {one.st_ino} {one.st_mtime_ns}" for one in found]


def fingerprints(files: Files) -> list[int]:
    """Of each file a CRC-32 of its contents, or of blocks that lie evenly in it if the files are large."""
    sizes = [os.fstat(descriptor).st_size for descriptor in files.descriptors]
    step = max(_BLOCK, _BLOCK * sum(sizes) // _WHOLE)
    found = []
    for descriptor, size in zip(files.descriptors, sizes, strict=True):
        crc = 0
        for offset in (*range(0, size, step), max(0, size - _BLOCK)):
            crc = zlib.crc32(os.pread(descriptor, _BLOCK, offset), crc)
        found.append(crc)
    return found


def check_same(names: Sequence[str], found: Sequence[Sequence[int] | None]) -> None:
    """Compares the fingerprints of all ranks; None is a rank that sees another one's files.

    Raises:
        CheckpointValueError: some differ; names them.
    """
    for rank, one in enumerate(found):
        different = [n for n, a, b in zip(names, found[0] or (), one or (), strict=False) if a != b]
        if different:
            raise CheckpointValueError(
                f"Ranks 0 and {rank} see different contents in {', '.join(different)}, so the model would be "
                "a mixture of two. Give every rank the same files, or copy them again."
            )


def are_stored_once(one: Blueprint, other: Blueprint, entries: Mapping[str, Entry]) -> bool:
    """Whether two tensors of a checkpoint are the same bytes of its files."""
    places = [
        [(entries[box.source], box.start, box.offset, box.strides) for box in blueprint.boxes]
        for blueprint in (one, other)
    ]
    return places[0] == places[1]


def are_alike(one: Blueprint, other: Blueprint, entries: Mapping[str, Entry], files: Files) -> bool:
    """Whether two tensors of a checkpoint have the same bits at their beginning, middle and end."""
    if (one.dims, one.dtype) != (other.dims, other.dtype):
        return False
    return torch.equal(*(_sample(blueprint, entries, files) for blueprint in (one, other)))


def _sample(blueprint: Blueprint, entries: Mapping[str, Entry], files: Files) -> torch.Tensor:
    """The bytes of the elements that are compared."""
    dims = blueprint.dims
    whole = torch.empty(dims, dtype=blueprint.dtype).view(-1)  # memory only where it is read
    part = Part(dims, tuple((0, size) for size in dims), 0, prod(dims))
    length = min(part.numel, _SAMPLE)
    spare = part.numel - length
    windows = [(start, start + length) for start in (0, spare // 2, spare)]
    slabs = [slab for window in windows for slab in plan_reads(blueprint, entries, part, whole, *window)]
    read_slabs(slabs, files)
    return torch.cat([whole[first:last] for first, last in windows]).view(torch.uint8)
