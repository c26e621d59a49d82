"""docs/format.md says what is in a checkpoint: its tables are compared with fresh ones."""

import json
import re
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.distributed import parallelize_model
from composer_dist.errors import CheckpointError
from composer_dist.files.checkpoint_format import BLOCK, DATA_FILE, VERSION
from composer_dist.files.torch_save import read_seal
from tests.kit.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
TYPES = {"integer": int, "number": (int, float), "string": str, "object": dict}


def table(heading: str) -> dict[str, tuple[str, str]]:
    """The rows of the first table after a heading, or a sentence: first cell to second and last."""
    rows = PAGE.split(f"{heading}\n", 1)[1].split("\n|---", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: (row[1], row[-1]) for row in cells}


def agree(heading: str, found: Any) -> None:
    """The fields of an object, or the positions of an array, are those of the table, with their types."""
    entries = found if isinstance(found, dict) else {str(n): value for n, value in enumerate(found)}
    rows = table(heading)
    assert list(rows) == list(entries)
    for name, (kind, _) in rows.items():
        expected: Any = list if kind.startswith("array") else TYPES[kind]
        assert isinstance(entries[name], expected), name


def save(folder: str) -> None:
    """A state with every kind of value."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    parallelize_model(model, "fsdp", optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    values = {"a": [1, None], 3: torch.ones(2), "pair": (1, 2), "each": [{"b": 1}], "last": OrderedDict(c=1)}
    save_checkpoint(folder, {"model": model, "optimizer": optimizer, "values": values, "step": 7})


def body_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoint.json").read_text())["checkpoint"]


def codes_in(code: Any) -> set[str]:
    """The fields of all codes of a structure."""
    ((tag, inner),) = code.items()
    below = [one for _, one in inner] if tag in ("dict", "ordered") else inner if tag == "list" else []
    return {tag}.union(*map(codes_in, below))


def test_the_manifest_has_the_fields_of_the_tables(tmp_path: Path, world2: World) -> None:
    folder = tmp_path / "saved"
    world2(save, str(folder))
    agree("## The manifest", json.loads((folder / "checkpoint.json").read_text()))
    body = body_of(folder)
    agree("### Fields of `checkpoint`", body)
    agree("### Fields of `facts`", body["facts"])
    for file in body["files"]:
        agree("### An entry of `files`", file)
    for tensor in body["tensors"].values():
        agree("### An entry of `tensors`", tensor)
        for chunk in tensor[2]:
            agree("A chunk is an array:", chunk)
    for one in body["objects"].values():
        agree("### An entry of `objects`", one)
    assert set(body["kinds"].values()) == set(table("### What the kinds contain"))
    assert set().union(*map(codes_in, body["structure"].values())) == set(table("### Codes of `structure`"))


def test_the_directory_has_the_files_of_the_table(tmp_path: Path, world2: World) -> None:
    folder = tmp_path / "saved"
    world2(save, str(folder))
    assert DATA_FILE.pattern in PAGE
    names = {re.sub(DATA_FILE, "__<rank>_<token>.distcp", path.name) for path in folder.iterdir()}
    assert names == set(table("## Files of a directory"))


def test_the_numbers_of_the_page() -> None:
    assert f"{BLOCK:,} bytes" in PAGE
    assert f"the version of the format: {VERSION}" in table("### Fields of `checkpoint`")["version"][1]
    assert str(VERSION) in table("## Versions of the format")


def test_the_seal_of_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    save_checkpoint(path, {"model": nn.Linear(3, 2)}, sharded=False)
    stored = read_seal(path)
    assert stored is not None
    comment = path.read_bytes()[stored.nbytes + 2 :]
    text, mark, checksum = comment.rpartition(b"composer_dist crc32 ")
    assert mark
    assert re.fullmatch(rb"[0-9a-f]{8}", checksum)
    agree("## The single file", json.loads(text))


def test_fields_that_a_reader_does_not_know_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save_checkpoint(folder, {"model": nn.Linear(3, 2), "step": 7})

    def rewrite(change: dict[str, Any]) -> None:
        text = json.dumps(body_of(folder) | change, separators=(",", ":"))
        (folder / "checkpoint.json").write_text(
            f'{{"crc32":{zlib.crc32(text.encode())},"checkpoint":{text}}}\n'
        )

    rewrite({"new": 1})
    assert load_checkpoint(folder)["step"] == 7
    rewrite({"version": VERSION + 1})
    with pytest.raises(CheckpointError, match=f"only up to version {VERSION}"):
        load_checkpoint(folder)
