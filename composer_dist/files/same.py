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
from composer_dist.files.read import Files, read_values
from composer_dist.files.slabs import MIB
from composer_dist.tensors.blueprint import Blueprint
from composer_dist.tensors.parts import Part

_WHOLE = 256 * MIB
"""More bytes than this are compared by samples."""
_BLOCK = 64 * 1024
_COMPARED = 1 << 20
"""Elements of two tensors that are compared at a time."""


def identities(files: Files) -> list[str]:
    """What is equal for ranks that open the same files on the same host."""
    found = [os.fstat(files.opened(number).descriptor) for number in range(len(files.paths))]
    return [f"{socket.gethostname()} {one.st_dev} {one.st_ino} {one.st_mtime_ns}" for one in found]


def fingerprints(files: Files) -> list[int]:
    """Of each file a CRC-32 of its contents, or of blocks that lie evenly in it if the files are large."""
    sizes = [os.fstat(files.opened(number).descriptor).st_size for number in range(len(files.paths))]
    step = max(_BLOCK, _BLOCK * sum(sizes) // _WHOLE)
    found = []
    for number, size in enumerate(sizes):
        file, crc = files.opened(number), 0
        for offset in (*range(0, size, step), max(0, size - _BLOCK)):
            crc = zlib.crc32(os.pread(file.descriptor, _BLOCK, offset), crc)
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


def are_alike(
    one: Blueprint, other: Blueprint, entries: Mapping[str, Entry], files: Files, share: tuple[int, int]
) -> bool:
    """Whether two tensors of a checkpoint have the same bits.

    Args:
        share: the number of a part of the elements, and of how many parts; only this part is compared.
    """
    if (one.dims, one.dtype) != (other.dims, other.dtype):
        return False
    window, (number, parts) = tuple((0, size) for size in one.dims), share
    last = prod(one.dims) * (number + 1) // parts
    for start in range(prod(one.dims) * number // parts, last, _COMPARED):
        part = Part(tuple(one.dims), window, start, min(start + _COMPARED, last))
        values = (read_values(each, entries, files, part).view(torch.uint8) for each in (one, other))
        if not torch.equal(*values):
            return False
    return True
