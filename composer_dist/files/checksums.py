"""Compares files with the checksums from when they were written.

They are CRC-32 of blocks: CRC-32 detects every single changed bit and costs less than reading, and blocks
let several threads and ranks share the work.
"""

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue

from composer_dist.errors import CheckpointValueError
from composer_dist.files.checkpoint_format import METADATA, StoredFile
from composer_dist.files.index import Entry
from composer_dist.files.read import Files
from composer_dist.files.slabs import MIB, THREADS, in_threads, lent

_PIECE = MIB
"""Bytes that a thread reads at one time."""
_SEAL = b"composer_dist crc32 "


def seal(text: bytes) -> bytes:
    """A small text followed by its own checksum."""
    return text + _SEAL + b"%08x" % zlib.crc32(text)


def unseal(sealed: bytes) -> bytes | None:
    """The text that was sealed; None if any of it has changed."""
    text = sealed[: -len(_SEAL) - 8]
    return text if sealed == seal(text) else None


def check_ours(directory: object, metadata: bytes | None) -> None:
    """Raise if a directory's `.metadata` is not ours; None means that it has none.

    Raises:
        CheckpointValueError: torch.distributed.checkpoint wrote it, or it is damaged.
    """
    if metadata is not None and unseal(metadata) is None:
        raise CheckpointValueError(
            f"{directory} has a {METADATA} of torch.distributed.checkpoint. Convert the directory with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(directory, file), and pass the file."
        )


def verify(
    files: Files,
    stored: Sequence[StoredFile],
    part: int = 0,
    parts: int = 1,
    entries: Iterable[Entry] | None = None,
) -> None:
    """Compare files with their checksums; this call does one of several parts of the work.

    Args:
        entries: verify only the blocks that contain these; None verifies all.

    Raises:
        CheckpointValueError: bytes differ; names the file and the bytes.
        CheckpointRuntimeError: a file cannot be read.
    """
    blocks = sorted(set(_blocks(stored, entries)))
    share = blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts]
    buffers: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(min(THREADS, len(share))):
        buffers.put(bytearray(_PIECE))

    def check(place: tuple[int, int]) -> None:
        number, block = place
        file, checksum = stored[number], 0
        first, last = block * file.block, min((block + 1) * file.block, file.nbytes)
        with lent(buffers) as buffer:
            for at in range(first, last, _PIECE):
                size = min(_PIECE, last - at)
                files.read(number, at, [(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), size)])
                checksum = zlib.crc32(memoryview(buffer)[:size], checksum)
        if checksum != file.checksums[block]:
            raise CheckpointValueError(
                f"{files.paths[number]} is corrupt (checksum mismatch in bytes {first}-{last}). Load an "
                "earlier checkpoint."
            )

    in_threads(check, share, "verify")


def _blocks(stored: Sequence[StoredFile], entries: Iterable[Entry] | None) -> Iterator[tuple[int, int]]:
    if entries is None:
        for number, file in enumerate(stored):
            yield from ((number, block) for block in range(len(file.checksums)))
    for one in entries or ():
        size = stored[one.file].block
        last = (one.offset + one.nbytes - 1) // size
        yield from ((one.file, block) for block in range(one.offset // size, last + 1))
