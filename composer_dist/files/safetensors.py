"""Parses and checks the headers of safetensors files.

A file is eight bytes of header length (little endian), a JSON header that gives each tensor's dtype,
shape and offsets, then the tensors, row-major, one after the other without holes
(https://github.com/huggingface/safetensors, "Format"). Larger models are several files with an index
that maps each tensor to its file.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr
from typing import Any

import torch

from composer_dist.errors import CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.index import Entry, Index, check_count, check_inside, check_limits, read_text
from composer_dist.wording import listed

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""The format's names of torch's dtypes; its other dtypes have less than a byte per element."""
_MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
_KNOWN = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
"""The names to look for in a directory; transformers prefers the first to the second."""


def read_index(path: Path) -> Index:
    """Find the safetensors files of `path`, and read and check their headers.

    Args:
        path: a safetensors file, an index, or a directory that has one of them, under the names that
            transformers and peft use or as its only safetensors file.

    Raises:
        CheckpointValueError: there are no such files, or they are corrupt; names file and tensor.
        CheckpointRuntimeError: a file cannot be read.
    """
    try:
        found = _find(path)
        if found.name.endswith(".index.json"):
            return _read_sharded(found)
        if path.is_dir():
            check_inside(path, [found.name])
        return _collect(found.parent, {found.name: None})
    except OSError as error:
        raise CheckpointRuntimeError(f"Cannot read {error.filename or path}: {error.strerror}.") from error


def _find(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
            return path
        raise CheckpointValueError(
            f"{path} is not a safetensors file. Load it with torch.load on rank 0 and pass its state to "
            "composer_dist.checkpoint.load_full_model_state."
        )
    if not path.is_dir():
        raise CheckpointValueError(
            f"There is no file or directory {path} here. Download a Hugging Face Hub model first with "
            "huggingface_hub.snapshot_download, and pass the directory."
        )
    known = [name for name in _KNOWN if (path / name).is_file()]
    if len(known) > 1 and known[-1] == _KNOWN[-1]:
        raise CheckpointValueError(
            f"{path} has both {known[0]} and {known[-1]}; pass the path of the one to read."
        )
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if known or len(others) == 1:
        return path / (known or others)[0]
    there = others or sorted(file.name for file in path.iterdir())[:10]
    pickled = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
    adapters = sorted(path.glob("*/adapter_config.json"))
    remedy = f" Pass the file itself: {path / pickled[0]}." if pickled else ""
    if any("-of-" in name for name in pickled):
        remedy = " Load the model with from_pretrained, and save it as safetensors with save_pretrained."
    if adapters and not pickled:
        remedy = f" Pass the directory of one adapter: {adapters[0].parent}."
    raise CheckpointValueError(
        f"{path} has neither {', '.join(_KNOWN)} nor a single other *.safetensors file; it has: "
        f"{', '.join(there) or 'nothing'}.{remedy}"
    )


def _read_sharded(path: Path) -> Index:
    """The files of an index; checks that each tensor is in the file that the index names."""
    files = read_places(path)
    return _collect(path.parent, files, {name: file for file, named in files.items() for name in named})


def read_places(path: Path, kind: str = "safetensors") -> dict[str, set[str]]:
    """The files that an index of weights names, and the tensors that it puts in each.

    Raises:
        CheckpointValueError: it is not an index of files of this kind, or names files that do not exist or
            are outside of its directory.
    """
    contents = read_text(path)
    try:
        weight_map = json.loads(contents.decode(), object_pairs_hook=_once)["weight_map"]
        spelled = {file: str(Path(file)) for file in set(weight_map.values())}  # few, for many tensors
        places = {str(name): spelled[file] for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointValueError(f"{path} is not an index of {kind} files: {error!r}.") from error
    check_count(str(path), len(places))
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        check_limits(str(path), name, ())
        files.setdefault(file, set()).add(name)
    for file, named in files.items():
        check_limits(str(path), file, ())
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointValueError(f"{path} puts {min(named)!r} outside of its directory, in {file}.")
    check_inside(path.parent, [path.name, *files])
    for file, named in files.items():
        if not (path.parent / file).is_file():
            raise CheckpointValueError(
                f"{path} puts {listed(sorted(named))} in {file}, but that file does not exist."
            )
    if not files:
        raise CheckpointValueError(f"{path} names no tensors.")
    return dict(sorted(files.items()))


def _collect(
    root: Path, files: Mapping[str, set[str] | None], places: Mapping[str, str] | None = None
) -> Index:
    """One index of several files; for a tensor in two of them, `places` has the file to use."""
    sizes: list[tuple[str, int]] = []
    entries: dict[str, Entry] = {}
    header_bytes = 0
    for number, (file, named) in enumerate(files.items()):
        found, size, read = _read_header(root / file, number, len(entries))
        if absent := sorted((named or set()) - found.keys()):
            raise CheckpointValueError(
                f"The index puts {listed(absent)} in {file}, but that file does not have them."
            )
        for name, entry in found.items():
            home = (places or {}).get(name, file)
            if home == file and name in entries:
                raise CheckpointValueError(
                    f"{name!r} is in both {sizes[entries[name].file][0]} and {file}, and the index does not "
                    "list it."
                )
            if home == file:
                entries[name] = entry
        sizes.append((file, size))
        header_bytes += read
    return Index(str(root), tuple(sizes), entries, header_bytes)


def _read_header(path: Path, number: int, known: int) -> tuple[dict[str, Entry], int, int]:
    """The tensors of one file, its size, and the bytes read; `known` tensors are in other files."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(_MAX_HEADER, size - 8):
            raise CheckpointValueError(
                f"{path} is corrupt or truncated: it has {size} bytes, but its header should have "
                f"{length if len(first) == 8 else 'a length of 8'}."
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointValueError(f"{path} is corrupt: its header is not valid JSON: {error}.") from error
    header.pop("__metadata__", None)
    check_count(str(path), known + len(header))
    return dict(_check_header(path, header, number, 8 + length, size)), size, 8 + length


def _check_header(
    path: Path, header: Mapping[str, Any], number: int, start: int, size: int
) -> Iterator[tuple[str, Entry]]:
    """Every tensor with its offset in the file; together they must fill it from `start` to its end."""
    spans: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        check_limits(str(path), name, ())
        try:
            dtype, shape, (begin, end) = fields["dtype"], [*fields["shape"]], fields["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CheckpointValueError(
                f"{path} is corrupt: the header's entry for {name!r} lacks dtype, shape or data_offsets."
            ) from None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointValueError(
                f"{path}: {name!r} has dtype {repr(dtype)}, which torch does not support."
            )
        check_limits(str(path), name, shape)
        if not all(type(one) is int and one >= 0 for one in (begin, end)):
            raise CheckpointValueError(f"{path} is corrupt: {name!r} is at bytes {repr(begin)}:{repr(end)}.")
        entry = Entry(number, DTYPES[dtype], tuple(shape), start + begin)
        if end - begin != entry.nbytes:
            raise CheckpointValueError(
                f"{path} is corrupt: {name!r}, {dtype} of shape {tuple(shape)}, needs {entry.nbytes} bytes, "
                f"but has {repr(end - begin)}."
            )
        spans.append((begin, end, name))
        yield name, entry
    at, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if start + end > size:
            raise CheckpointValueError(
                f"{path} is corrupt or truncated: {name!r} should end at byte {start + end} of {size}."
            )
        if begin != at:
            what = "overlaps with" if begin < at else "leaves a hole after"
            raise CheckpointValueError(f"{path} is corrupt: {name!r} {what} {before}.")
        at, before = end, repr(name)
    if start + at != size:
        raise CheckpointValueError(
            f"{path} is corrupt: {size - start - at} bytes follow {before}, where it should end."
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repr(twice)} appears twice")
    return found
