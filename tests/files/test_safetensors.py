"""Headers of safetensors files: what is read from good ones, and that no bad one passes."""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files import safetensors
from composer_dist.files.index import Index
from composer_dist.files.safetensors import DTYPES, read_index

pytestmark = pytest.mark.promise(107)

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 4), "c": torch.ones(5, dtype=torch.int8)}


def test_entries_say_where_the_bytes_are(tmp_path: Path) -> None:
    state = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()} | STATE
    path = tmp_path / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    for given in (path, tmp_path):
        index = read_index(given)
        assert index.files == (("model.safetensors", path.stat().st_size),)
        assert {name: (e.dtype, e.shape) for name, e in index.entries.items()} == {
            name: (value.dtype, tuple(value.shape)) for name, value in state.items()
        }
        entry = index.entries["a"]
        stored = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert stored == STATE["a"].numpy().tobytes()
        assert index.header_bytes + sum(e.nbytes for e in index.entries.values()) == path.stat().st_size
        packed = Index.unpack(index.pack())
        assert (packed.files, packed.entries, packed.root) == (index.files, index.entries, index.root)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edited(**fields: Any) -> Callable[[Path], None]:
    """Change fields of the entry "c"."""

    def edit(path: Path) -> None:
        header, data = header_of(path)
        header["c"] |= fields
        write(path, header, data)

    return edit


def raw(text: bytes) -> Callable[[Path], None]:
    return lambda path: write(path, text, b"")


def lengthened(by: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes((int.from_bytes(data[:8], "little") + by).to_bytes(8, "little") + data[8:])

    return change


def twice(path: Path) -> None:
    header, data = header_of(path)
    text = json.dumps(header).replace('"b": {', '"c": {', 1)
    write(path, text.encode(), data)


CORRUPT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "truncated: it has 0 bytes"),
    "no header": (lambda path: path.write_bytes(b"\1\0\0"), "truncated: it has 3 bytes"),
    "header longer than the file": (lengthened(1 << 20), "its header should have"),
    "header longer than any": (lengthened(1 << 62), "its header should have"),
    "header longer by one": (lengthened(1), "not valid JSON|bytes follow|ends? at"),
    "header shorter": (lengthened(-9), "not valid JSON"),
    "no JSON": (raw(b"{" * 20), "not valid JSON"),
    "no text": (raw(b"\xff\xfe"), "not valid JSON"),
    "text of 16 bits": (raw('{"__metadata__": {}}'.encode("utf-16")), "not valid JSON"),
    "deep": (raw(b"[" * 200_000), "not valid JSON"),
    "no object": (raw(b"[1]"), "not valid JSON: it is not an object"),
    "twice": (twice, "'c' appears twice"),
    "entry of a number": (raw(b'{"c": 3}'), "entry for 'c' lacks"),
    "entry without offsets": (raw(b'{"c": {"dtype": "F32", "shape": [1]}}'), "entry for 'c' lacks"),
    "three offsets": (edited(data_offsets=[0, 1, 2]), "entry for 'c' lacks"),
    "dtype": (edited(dtype="F4"), "'c' has dtype 'F4', which torch does not support"),
    "dtype of a list": (edited(dtype=["I8"]), "'c' has dtype"),
    "negative shape": (edited(shape=[-5]), r"'c' cannot have the shape \[-5\]"),
    "shape of text": (edited(shape="5"), "'c' cannot have the shape"),
    "true": (edited(shape=[True, 5]), "'c' cannot have the shape"),
    "fraction": (edited(data_offsets=[24.0, 29]), "'c' is"),
    "other size": (edited(shape=[6]), r"'c', I8 of shape \(6,\), needs 6 bytes, but has 5"),
    "huge": (edited(shape=[1 << 62, 1 << 62]), "'c' cannot have the shape"),
    "backwards": (edited(data_offsets=[29, 24]), "'c', I8 .* needs 5 bytes, but has -5"),
    "overlap": (edited(data_offsets=[20, 25]), "'c' overlaps with|'a' overlaps with"),
    "hole": (edited(data_offsets=[1, 6]), "leaves a hole|overlaps"),
    "out of the file": (edited(data_offsets=[1000, 1005]), "'c' should end at byte"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 3), "truncated: .* should end at"),
    "more": (lambda path: path.write_bytes(path.read_bytes() + b"12"), "2 bytes follow '[ac]', where it sh"),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_corrupt_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    change, text = CORRUPT[kind]
    change(path)
    with pytest.raises(CheckpointValueError, match=text) as caught:
        read_index(tmp_path)
    assert str(path) in str(caught.value)


def test_no_changed_byte_of_a_header_crashes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    data = path.read_bytes()
    for place in range(8 + int.from_bytes(data[:8], "little")):
        for value in (0, 34, 57, 255):
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            with suppress(CheckpointValueError):
                index = read_index(path)
                ends = [entry.offset + entry.nbytes for entry in index.entries.values()]
                assert max(ends) == len(data)


def sharded(directory: Path, **changes: Any) -> Path:
    save_file({"a": STATE["a"]}, directory / "one.safetensors")
    save_file({"b": STATE["b"], "c": STATE["c"]}, directory / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"} | changes
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {k: v for k, v in places.items() if v}}))
    return index


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    for given in (path, tmp_path):
        index = read_index(given)
        assert [name for name, _ in index.files] == ["one.safetensors", "two.safetensors"]
        assert {name: entry.file for name, entry in index.entries.items()} == {"a": 0, "b": 1, "c": 1}
    sharded(tmp_path, c=None)  # what the index leaves out counts all the same
    assert read_index(path).entries.keys() == STATE.keys()


def test_of_a_tensor_in_two_files_the_index_says_which_counts(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    save_file({"a": STATE["a"], "c": STATE["c"]}, tmp_path / "one.safetensors")
    assert read_index(path).entries["c"].file == 1
    path.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(CheckpointValueError, match="'c' is in both one.safetensors and two.safetensors"):
        read_index(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"a": "two.safetensors"}, "The index puts a in two.safetensors, but that file does not"),
        ({"d": "one.safetensors"}, "The index puts d in one.safetensors, but that file does not"),
        ({"a": "three.safetensors"}, "puts a in three.safetensors, but that file does not exist"),
        ({"a": "../one.safetensors"}, "puts 'a' outside of its directory"),
        ({"a": "/one.safetensors"}, "puts 'a' outside of its directory"),
        ({"a": None, "b": None, "c": None}, "names no tensors"),
        *((text, "is not an index of safetensors files") for text in ("{", "[]", '{"weight_map": 3}', "{}")),
    ],
)
def test_wrong_indices_are_refused_by_name(tmp_path: Path, changes: Any, text: str) -> None:
    if isinstance(changes, dict):
        sharded(tmp_path, **changes)
    else:
        sharded(tmp_path).write_text(changes)
    with pytest.raises(CheckpointValueError, match=text):
        read_index(tmp_path)


def test_what_is_looked_for_where(tmp_path: Path) -> None:
    def refused(text: str, path: Path = tmp_path) -> None:
        with pytest.raises(CheckpointValueError, match=text):
            read_index(path)

    refused(r"nor a single other .*; it has: nothing")
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"it has: pytorch_model\.bin\. Pass the file itself: .*/pytorch_model\.bin\.")
    refused("load_full_model_state", tmp_path / "pytorch_model.bin")
    for name in ("b", "a"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "adapter_config.json").touch()
    refused(r"it has: .* Pass the directory of one adapter: .*/many/a\.$", tmp_path / "many")
    refused("There is no file or directory .*none here", tmp_path / "none")
    save_file(STATE, tmp_path / "own.safetensors")
    assert read_index(tmp_path).files[0][0] == "own.safetensors"
    save_file(STATE, tmp_path / "other.safetensors")
    refused("it has: other.safetensors, own.safetensors")
    save_file(STATE, tmp_path / "adapter_model.safetensors")
    assert read_index(tmp_path).adapter
    save_file(STATE, tmp_path / "model.safetensors")
    refused("has both model.safetensors and adapter_model")
    (tmp_path / "directory.safetensors").mkdir()
    with pytest.raises(CheckpointError):
        read_index(tmp_path / "directory.safetensors")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(STATE, tmp_path / "model.safetensors")

    def fail(*arguments: Any) -> bytes:
        raise OSError(5, "Input/output error", str(tmp_path / "model.safetensors"))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(CheckpointRuntimeError, match=r"Cannot read .*model.safetensors: Input/output error"):
        read_index(tmp_path)


def spent(path: Path, header: str) -> float:
    """Seconds until a file with this header and no data is refused."""
    write(path, header.encode(), b"")
    start = time.process_time()
    with pytest.raises(CheckpointValueError, match=str(path)):
        read_index(path)
    return time.process_time() - start


def numbered(names: Iterable[int]) -> str:
    """A header with empty tensors of these names."""
    return "{" + ",".join(f'"{name}":{EMPTY}' for name in names) + "}"


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
SLOW: dict[str, Callable[[], str]] = {
    "a name twice at the end": lambda: numbered([*range(30_000), 29_999]),
    "400,000 dimensions": lambda: f'{{"a":{EMPTY.replace("[0]", str([9] * 400_000))}}}',
    "100,000 dimensions of 1": lambda: f'{{"a":{EMPTY.replace("[0]", str([0] + [1] * 100_000))}}}',
    "dimensions of 4,000 digits": lambda: f'{{"a":{EMPTY.replace("[0]", str([10**4000] * 60))}}}',
    "a name of a million modules": lambda: f'{{"{"a." * 1_000_000}b":{EMPTY}}}',
}


@pytest.mark.parametrize("what", SLOW)
def test_small_headers_take_little_time(tmp_path: Path, what: str) -> None:
    assert spent(tmp_path / "model.safetensors", SLOW[what]()) < 5


def test_an_index_of_many_tensors_looks_at_each_file_once(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    index, names = tmp_path / "model.safetensors.index.json", map(str, range(2000))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    text = "and 1992 more in a.safetensors, but that file does not have them"
    with (
        mock.patch.object(safetensors, "Path", wraps=Path) as made,
        pytest.raises(CheckpointValueError, match=text),
    ):
        read_index(tmp_path)
    assert made.call_count < 10


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_dist.files.index._MOST_TENSORS", 100)
    write(tmp_path / "model.safetensors", numbered(range(101)).encode(), b"")
    with pytest.raises(CheckpointValueError, match="has 101 tensors; at most 100"):
        read_index(tmp_path)
    places = {str(number): "a.safetensors" for number in range(101)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointValueError, match="index.json has 101 tensors; at most 100"):
        read_index(tmp_path)


def test_a_name_twice_in_an_index_is_refused(tmp_path: Path) -> None:
    for name in ("1", "2"):
        save_file({"a": torch.full((2,), float(name))}, tmp_path / f"{name}.safetensors")
    text = '{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointValueError, match="'a' appears twice"):
        read_index(tmp_path)


def test_spellings_of_a_file_are_one_file(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors")
    places = {name: f"{'./' * number}x.safetensors" for number, name in enumerate(STATE)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert [name for name, _ in read_index(tmp_path).files] == ["x.safetensors"]


@pytest.mark.parametrize("linked", ["model.safetensors", "model.safetensors.index.json", "sub"])
def test_links_may_not_lead_out_of_a_directory(tmp_path: Path, linked: str) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "model"
    (outside / "sub").mkdir(parents=True)
    inside.mkdir()
    (inside / linked).symlink_to(outside / linked)
    save_file(STATE, outside / "model.safetensors")
    save_file(STATE, outside / "sub" / "x.safetensors")
    places = dict.fromkeys(STATE, "sub/x.safetensors")
    index = inside if linked == "sub" else outside
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointValueError, match="is a link that leads out of its directory, to .*outside"):
        read_index(inside)


@pytest.mark.parametrize(
    "entry",
    [{"dtype": "F" * 10**6}, {"shape": ["x" * 10**6]}, {"data_offsets": ["x" * 10**6, 4]}],
    ids=range(3),
)
def test_an_error_is_not_as_long_as_what_it_reports(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointValueError, match=r"model.safetensors.*: 'a' ") as raised:
        read_index(tmp_path)
    assert len(str(raised.value)) < 400


def test_links_of_the_hub_and_inside_a_directory_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    save_file(STATE, tmp_path / "models--x" / "blobs" / "abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    assert read_index(snapshot).entries.keys() == STATE.keys()
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(STATE, plain / "weights")
    (plain / "model.safetensors").symlink_to("weights")
    (tmp_path / "latest").symlink_to(plain)
    assert read_index(tmp_path / "latest").entries.keys() == STATE.keys()
