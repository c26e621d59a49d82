"""Writes `.metadata`, which torch.distributed.checkpoint's own `load` needs to read our checkpoints.

It is a pickle. We never read it, because `checkpoint.json` has the same information. Its own checksum follows
the end of the pickle, because `checkpoint.json` does not list it.
"""

import pickle
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
from composer_dist.files.checkpoint_format import METADATA, KeyPath, Manifest
from composer_dist.files.checksums import seal

NAME = METADATA
_VERSION = "1.0.0"
"""The version that torch 2.5 and later writes."""


@dataclass(frozen=True)
class Item:
    """The place of an item of `torch.save` in a file."""

    file: str
    offset: int
    nbytes: int


def dcp_metadata(
    manifest: Manifest, items: Mapping[tuple[str, tuple[int, ...] | None], Item], paths: Mapping[str, KeyPath]
) -> bytes:
    """The contents of `.metadata`.

    Args:
        items: by name and, for pieces of tensors, the start of the piece.
        paths: the key path of every name.
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
    return seal(pickle.dumps(metadata))
