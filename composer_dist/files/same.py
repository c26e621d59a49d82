"""Compares weight files as several ranks see them, for a node may have an old copy of the same size."""

import os
import socket
import zlib
from collections.abc import Sequence

from composer_dist.errors import CheckpointValueError
from composer_dist.files.read import Files
from composer_dist.files.slabs import MIB

_WHOLE = 256 * MIB
"""More bytes than this are compared by samples."""
_BLOCK = 64 * 1024


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
