"""Files compared with their checksums, whole or in part."""

import zlib
from pathlib import Path

import pytest
import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.files.checkpoint_format import StoredFile
from composer_dist.files.checksums import verify
from composer_dist.files.index import Entry
from composer_dist.files.read import Files

BLOCK = 100


def refused(path: Path, stored: StoredFile, part: int = 0, parts: int = 1, at: int | None = None) -> bool:
    """Whether the file is; `at` is where the only tensor of 50 bytes that counts begins."""
    entries = None if at is None else [Entry(0, torch.uint8, (50,), at)]
    with Files(path.parent, [(path.name, stored.nbytes)]) as files:
        try:
            verify(files, [stored], part, parts, entries)
        except CheckpointValueError as error:
            return str(path) in str(error)
    return False


def test_the_blocks_that_count_and_no_others(tmp_path: Path) -> None:
    data = bytearray(torch.randint(256, (450,), dtype=torch.uint8).tolist())
    sums = tuple(zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    stored, path = StoredFile("f", len(data), sums, BLOCK), tmp_path / "f"
    path.write_bytes(data)
    assert not refused(path, stored)
    data[210] ^= 1
    path.write_bytes(data)
    assert refused(path, stored)
    assert [refused(path, stored, part, 5) for part in range(5)] == [False, False, True, False, False]
    places = {0: False, 149: False, 150: False, 151: True, 250: True, 299: True, 300: False, 400: False}
    assert {at: refused(path, stored, at=at) for at in places} == places
    with pytest.raises(CheckpointValueError, match="bytes 200-300"), Files(tmp_path, [("f", 450)]) as f:
        verify(f, [stored])
