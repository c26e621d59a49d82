"""`.metadata`, by which torch.distributed.checkpoint's own `load` finds everything in our checkpoints.

It is a pickle, as torch has it. We only write it: what we read ourselves is in `checkpoint.json`. It is
replaced before the mark of the checkpoint is, so it carries its own checksum, after the pickle's end.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composer_dist import _torch
from composer_dist.files.manifest import Manifest, Path

NAME = ".metadata"


_SEAL = b"composer_dist crc32 "


_VERSION = "1.0.0"
"""That of torch 2.5 and later."""


@dataclass(frozen=True)
class Item:
    """Where an item of `torch.save` lies, from its first byte to its last."""

    file: str
    offset: int
    nbytes: int


def dcp_metadata(
    manifest: Manifest, items: Mapping[tuple[str, tuple[int, ...] | None], Item], paths: Mapping[str, Path]
) -> bytes:
    """The contents of `.metadata`.

    Args:
        items: by name and, for pieces of tensors, where the piece begins.
        paths: of every name.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, tensor in manifest.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = TensorProperties(dtype=tensor.dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    described |= {name: BytesStorageMetadata() for name in manifest.objects}
    metadata = Metadata(
        described,
        planner_data={name: paths[name] for name in described},
        storage_data={
            MetadataIndex(name, None if start is None else torch.Size(start)): _torch.storage_info(
                item.file, item.offset, item.nbytes
            )
            for (name, start), item in items.items()
        },
        storage_meta=StorageMeta(),
        version=_VERSION,
    )
    text = pickle.dumps(metadata)
    return text + _SEAL + b"%08x" % zlib.crc32(text)


def is_intact(contents: bytes) -> bool:
    """Whether nothing of a `.metadata` was changed or lost."""
    text, checksum = contents[: -len(_SEAL) - 8], contents[-8:]
    return contents[len(text) : -8] == _SEAL and checksum == b"%08x" % zlib.crc32(text)
