"""Single files of `torch.save`: what is in them and where, without reading tensors; and their seal.

Such a file is a zip archive without compression, so that slices of its tensors can be read in place. The
files that we write end in a seal: checksums, as the comment that a zip archive may have, which other readers
skip. Pickles are read by torch's own restricted unpickler unless the user asks for more.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from composer_dist import _torch
from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.index import Entry, Index, Pieces
from composer_dist.files.manifest import BLOCK, StoredFile
from composer_dist.files.other_libraries import allowed

_MAGIC = b"composer"


_SEAL = struct.Struct("<QQII8s")
"""Bytes before the seal, bytes of a block, their number, CRC-32 of the seal up to here, the magic word."""


_MOST = 960
"""Checksums in a seal: torch 2.13 finds the archive's end only in the last 4096 bytes of a small file."""


_END = struct.Struct("<4sHHHHIIH")
"""A zip archive's last record; the last field is the length of the comment that follows."""


_END_MARK = b"PK\x05\x06"


def block_for(nbytes: int) -> int:
    """Bytes of a block for a file of about this size, so that the seal has room for all checksums."""
    block = BLOCK
    while nbytes > block * (_MOST - 1):
        block *= 2
    return block


def seal(file: StoredFile) -> bytes:
    """What to append to a file that ends in the announcement of a comment of this length."""
    sums = struct.pack(f"<{len(file.checksums)}I", *file.checksums)
    head = struct.pack("<QQI", file.nbytes, file.block, len(file.checksums))
    return sums + head + struct.pack("<I8s", zlib.crc32(sums + head), _MAGIC)


def seal_length(nbytes: int, block: int) -> int:
    """Bytes of the seal of a file of `nbytes`."""
    return 4 * -(-nbytes // block) + _SEAL.size


def read_seal(path: Path) -> StoredFile | None:
    """The checksums of a file; None where it has no seal, as others' files have not.

    Raises:
        CheckpointValueError: there was a seal, but the file was cut short or changed at its end.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 8192))
        tail = file.read()
    damaged = CheckpointValueError(
        f"{path} is corrupt or truncated: its end is damaged. Load an earlier one."
    )
    if tail.endswith(_MAGIC) and len(tail) >= _SEAL.size:
        nbytes, block, count, checksum, _ = _SEAL.unpack(tail[-_SEAL.size :])
        length = 4 * count + _SEAL.size
        if nbytes + length != size or length > len(tail) or zlib.crc32(tail[-length:-12]) != checksum:
            raise damaged
        sums = struct.unpack(f"<{count}I", tail[-length : -_SEAL.size])
        return StoredFile(path.name, nbytes, sums, block)
    at = tail.rfind(_END_MARK)
    if at < 0 or at + _END.size > len(tail):
        return None  # no archive at all: whoever reads it says so
    if at + _END.size + _END.unpack_from(tail, at)[-1] != len(tail):
        raise damaged
    if len(tail) > at + _END.size:
        raise damaged
    return None


def is_sealed(path: Path) -> bool:
    """Whether a file ends in a seal that fits."""
    try:
        return read_seal(path) is not None
    except (CheckpointError, OSError):
        return False


def read_torch_file(path: Path, allow_pickle: bool = False, values: bool = False) -> Any:
    """The contents of a file, with tensors that know their place in it and have no values.

    Args:
        allow_pickle: run whatever code the file's pickle names.
        values: tensors have values, which lie in the file, mapped, until they are copied.

    Raises:
        CheckpointValueError: it is no such file, is cut short, or holds objects that are not allowed.
        CheckpointRuntimeError: it cannot be read.
    """
    try:
        with (
            nullcontext() if values else _torch.without_values(),
            torch.serialization.safe_globals(allowed()),
        ):
            mapped = values and zipfile.is_zipfile(path)
            contents = torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointValueError(
            f"{path} holds objects that could run code: {_first_line(error)} If you trust where it comes "
            "from, pass allow_pickle=True."
        ) from error
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:
        raise CheckpointValueError(
            f"{path} is not a file of torch.save, or is corrupt or truncated: {_first_line(error)}"
        ) from error
    return contents


def index_of(path: Path, tensors: Mapping[str, torch.Tensor]) -> Index:
    """Where tensors of `read_torch_file` lie, under the names given; strided ones as they were saved.

    Raises:
        CheckpointValueError: a tensor that torch conjugates, or negates, only when it is read.
    """
    if lazy := [name for name, tensor in tensors.items() if tensor.is_conj() or tensor.is_neg()]:
        raise CheckpointValueError(
            f"{path} has views that are conjugated or negated: {', '.join(lazy)}. Call resolve_conj() and "
            "resolve_neg() before saving."
        )
    entries: dict[str, Entry] = {}
    pieces: dict[str, Pieces] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        start = _torch.offset_in_file(tensor) + int(tensor.storage_offset()) * tensor.itemsize
        entries[name] = Entry(0, tensor.dtype, shape, start)
        pieces[name] = shape, tensor.dtype, [((0,) * len(shape), tuple(tensor.stride()), name)]
    return Index(str(path.parent), ((path.name, path.stat().st_size),), entries, pieces=pieces)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
