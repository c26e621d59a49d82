"""Reads the contents of `torch.save` files without tensor values, and reads and writes our seal.

Such a file is a zip archive without compression, so slices of its tensors can be read in place. The files
that we write end in a seal: checksums in the archive's comment, which other readers skip. (The archive's own
checksums cover neither its headers nor its directory.) Pickles are read by torch's restricted unpickler
unless the user allows more.
"""

import json
import os
import pickle
import pickletools
import struct
import sys
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from composer_dist import _torch
from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import BLOCK, StoredFile
from composer_dist.files.checksums import seal, unseal
from composer_dist.files.index import Entry, Index, Pieces, check_limits
from composer_dist.files.other_libraries import allowed, normalized
from composer_dist.wording import dtype_name, listed

_MOST = 256
"""Checksums in a seal: torch 2.13 looks for the archive's end only in the last 4096 bytes of a small file."""
_END = struct.Struct("<4sHHHHIIH")
"""A zip archive's last record; its last field is the length of the comment that follows."""
_END_MARK = b"PK\x05\x06"
_LOCAL_NAME = 26
"""The offset, in a record's own header, of the lengths of the name and of the extra field, which end it."""
_ARCHIVE, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The first bytes of a zip archive, and of a file of torch before 1.6."""
_MARK = object()
_DEEPEST = 100
_MOST_VALUES = 20_000_000
_LARGEST_VIEW = 1 << 30
"""Bytes by which a tensor may be larger than its file, since its elements are repeated."""
LENGTH = struct.Struct("<H")
"""The last field of a zip archive: the length of the comment that follows."""


def block_for(nbytes: int) -> int:
    """The bytes per checksum for a file of about this size, so that all checksums fit into the seal."""
    block = BLOCK
    while nbytes > block * (_MOST - 1):
        block *= 2
    return block


def seal_of(file: StoredFile) -> bytes:
    """The end of a file: the length of the comment, and the comment."""
    comment = seal(json.dumps([file.nbytes, file.block, file.checksums]).encode())
    return LENGTH.pack(len(comment)) + comment


def read_seal(path: Path) -> StoredFile | None:
    """The checksums of a file; None if it has no seal because another library wrote it.

    Raises:
        CheckpointValueError: there was a seal, but the file was truncated or changed at its end.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8192))
        tail = file.read()
    at = tail.rfind(_END_MARK)
    end = tail[at + _END.size - LENGTH.size :] if at >= 0 else b""
    if end in (b"", LENGTH.pack(0)):
        return None  # not ours, or not an archive, which reading it reports
    text = unseal(end[LENGTH.size :])
    if text is not None and end[: LENGTH.size] == LENGTH.pack(len(end) - LENGTH.size):
        with suppress(TypeError, ValueError):  # sealed, but of another format
            nbytes, block, checksums = json.loads(text)
            stored = StoredFile(path.name, nbytes, tuple(checksums), block)
            if stored.consistent and nbytes + len(end) == size:
                return stored
    raise CheckpointValueError(f"{path} is corrupt or truncated: its end is damaged. Load an earlier one.")


def is_sealed(path: Path) -> bool:
    """Whether a file ends in an intact seal."""
    try:
        return read_seal(path) is not None
    except (CheckpointError, OSError):
        return False


def load_object(data: bytes, what: str, allow_pickle: bool = False) -> Any:
    """What `torch.save` has written as these bytes, which errors call `what`.

    Raises:
        CheckpointValueError: it could run code, or is damaged.
    """
    try:
        return load(BytesIO(data), allow_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointValueError(
            f"{what} is an object that could run code: {refusal(error)} If you trust the checkpoint's "
            "source, pass allow_pickle=True to load_checkpoint."
        ) from error
    except CheckpointValueError as error:
        raise CheckpointValueError(f"{what} {error}") from error
    except Exception as error:  # torch has several for what is not an archive
        raise CheckpointValueError(f"{what} is corrupt: {refusal(error)}") from error


def read_torch_file(path: Path, allow_pickle: bool = False, values: bool = False) -> Any:
    """The contents of a file by our keys, with tensors that have an offset in the file instead of values.

    Args:
        allow_pickle: run any code that the file's pickle names.
        values: give tensors their values, mapped from the file.

    Raises:
        CheckpointValueError: it is not such a file, is truncated, or holds objects that are not allowed.
        CheckpointRuntimeError: it cannot be read.
    """
    try:
        with nullcontext() if values else _torch.without_values():
            return normalized(load(path, allow_pickle, mapped=values))
    except CheckpointError as error:
        raise CheckpointValueError(f"{path} {error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointValueError(
            f"{path} holds objects that could run code: {refusal(error)} If you trust its source, load it "
            "with torch.load(..., weights_only=False), and save a state_dict() alone with torch.save; or "
            "pass allow_pickle=True to load_checkpoint, which takes files with keys."
        ) from error
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:
        raise CheckpointValueError(
            f"{path} is not a file of torch.save, or is corrupt or truncated: {refusal(error)}"
        ) from error


def load(source: Path | BytesIO, allow_pickle: bool, mapped: bool = False) -> Any:
    """What `torch.load` returns, on the CPU, if the file gives every byte of it.

    Args:
        mapped: map the file instead of reading it.

    Raises:
        CheckpointValueError: torch would read it wrongly, or would need hours or more memory than there is;
            the text follows the name of the source.
    """
    _check_archive(source, allow_pickle)
    with torch.serialization.safe_globals(allowed()):
        contents = torch.load(source, map_location="cpu", weights_only=not allow_pickle, mmap=mapped)  # nosec B614
    _count(contents, 0, {})
    return contents


def index_of(path: Path, tensors: Mapping[str, torch.Tensor]) -> Index:
    """The index of tensors of `read_torch_file`, by the given names.

    Raises:
        CheckpointValueError: a tensor is a conjugated or negated view, or is not where the file says.
    """
    if sparse := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        raise CheckpointValueError(f"{path} has sparse tensors, which cannot be loaded: {listed(sparse)}.")
    if lazy := [name for name, tensor in tensors.items() if tensor.is_conj() or tensor.is_neg()]:
        raise CheckpointValueError(
            f"{path} has views that are conjugated or negated: {', '.join(lazy)}. Call resolve_conj() and "
            "resolve_neg() before saving."
        )
    try:
        places = dict(_records(path))
    except (zipfile.BadZipFile, struct.error) as error:
        raise CheckpointValueError(f"{path} is corrupt: {error}.") from error
    entries: dict[str, Entry] = {}
    pieces: dict[str, Pieces] = {}
    dtypes: dict[int, torch.dtype] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        record, first = _torch.offset_in_file(tensor), int(tensor.storage_offset())
        last = first + sum((size - 1) * step for size, step in zip(shape, tensor.stride(), strict=True))
        room = -1 if min(tensor.stride(), default=0) < 0 else places.get(record, 0)
        if tensor.numel() and (last + 1) * tensor.itemsize > room:
            raise CheckpointValueError(f"{path} is corrupt: {name} is not inside of its storage.")
        if (
            tensor.numel() and dtypes.setdefault(record, tensor.dtype) != tensor.dtype
        ):  # torch takes the first
            raise CheckpointValueError(
                f"{path} is corrupt: {name} reads {dtype_name(dtypes[record])} as {dtype_name(tensor.dtype)}."
            )
        check_limits(str(path), name, shape)
        if tensor.nbytes > path.stat().st_size + _LARGEST_VIEW:
            raise CheckpointValueError(f"{path}: {name} repeats its elements to {tensor.nbytes} bytes.")
        start = record + first * tensor.itemsize
        entries[name] = Entry(0, tensor.dtype, shape, start)
        pieces[name] = shape, tensor.dtype, [((0,) * len(shape), tuple(tensor.stride()), name)]
    return Index(str(path.parent), ((path.name, path.stat().st_size),), entries, pieces=pieces)


def _records(path: Path) -> Iterator[tuple[int, int]]:
    """Where the data of each uncompressed record of an archive begin, and how many bytes they are."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            file.seek(record.header_offset + _LOCAL_NAME)
            lengths = file.read(4)
            start = file.tell() + sum(struct.unpack("<HH", lengths))
            if record.compress_type == zipfile.ZIP_STORED:
                yield start, record.file_size


def _check_archive(source: Path | BytesIO, allow_pickle: bool) -> None:
    """Small files may unpack to a pickle that takes hours, or make tensors that they do not contain."""
    with nullcontext(source) if isinstance(source, BytesIO) else source.open("rb") as file:
        head = file.read(len(_LEGACY))
        file.seek(0)
    if not head.startswith(_ARCHIVE):
        if head.startswith(_LEGACY):
            raise CheckpointValueError(
                "has the format of torch before 1.6, which cannot be read safely or in place. Load it with "
                "torch.load, and save it again."
            )
        raise CheckpointValueError("is not a file of torch.save, or is corrupt or truncated.")
    with zipfile.ZipFile(source) as archive:
        packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise CheckpointValueError(f"is compressed ({listed(packed)}), which torch.save does not do.")
    pickled, order = _torch.pickle_and_byte_order(source)
    if order != sys.byteorder:
        raise CheckpointValueError(f"has the byte order {order[:20]!r}, not {sys.byteorder!r}.")
    if not allow_pickle:
        _check_calls(pickled)


def _check_calls(pickled: bytes) -> None:
    """Refuse calls of what makes memory that is not in the file, which torch's own unpickler allows.

    Only the opcodes that torch's unpickler knows are followed; it refuses the others.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    for operation, value, _ in pickletools.genops(pickled):
        match operation.name:
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "EMPTY_TUPLE":
                stack.append(())
            case "APPENDS" | "SETITEMS":
                since_mark()
            case "APPEND" | "BUILD":
                stack.pop()
            case "SETITEM":
                del stack[-2:]
            case "BINPERSID":
                stack[-1] = None
            case "REDUCE" | "NEWOBJ":
                arguments = stack.pop()
                stack[-1] = _check_call(stack[-1], arguments)
            case "PROTO" | "STOP":
                pass
            case _:
                stack.append(value)


def _check_call(function: Any, arguments: Any) -> Any:
    """What is known of the result of a call: whether it is bytes of the file."""
    name = function.rpartition(" ")[2] if isinstance(function, str) else ""
    if not isinstance(arguments, tuple):
        raise ValueError(f"it calls {name} without a tuple of arguments")
    if name == "_rebuild_from_type_v2":
        return _check_call(arguments[0], arguments[2])
    encoded = name == "encode" and isinstance(arguments[0], str) and arguments[1:] == ("latin1",)
    copied = name in ("bytes", "bytearray") and (not arguments or isinstance(arguments[0], str | bytes))
    makes = name in ("encode", "bytes", "bytearray", "_rebuild_nested_tensor") or name.endswith(
        ("Tensor", "Storage")
    )
    if makes and not (encoded or copied):
        raise CheckpointValueError(f"is corrupt: it calls {name}, to make values that it does not contain.")
    return b"" if encoded else None


def _count(value: Any, depth: int, known: dict[int, int]) -> int:
    """How many values there are, with each written out wherever it is used.

    Raises:
        ValueError: too many, or nested too deep; a value that contains itself is.
    """
    if id(value) not in known:
        if depth > _DEEPEST:
            raise ValueError(f"its values are nested more than {_DEEPEST} levels deep")
        inner = value.values() if isinstance(value, Mapping) else value
        nested = isinstance(value, Mapping | list | tuple | set | frozenset)
        known[id(value)] = 1 + (sum(_count(one, depth + 1, known) for one in inner) if nested else 0)
    if known[id(value)] > _MOST_VALUES:
        raise ValueError(f"it repeats more than {_MOST_VALUES} values")
    return known[id(value)]


def refusal(error: Exception) -> str:
    """Why torch does not load a pickle, in one sentence, without its advice."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    lines = [line for line in text.splitlines() if line and not line.startswith("Weights only load failed")]
    sentence = (lines or [type(error).__name__])[0].partition(". ")[0]
    return f"{textwrap.shorten(sentence, 300, placeholder=' ...').rstrip('.')}."
