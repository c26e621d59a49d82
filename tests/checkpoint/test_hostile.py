"""Checkpoints that somebody made on purpose: nothing outside of them is touched, no garbage is loaded."""

import _codecs
import json
import os
import pickle
import shutil
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from composer_dist.checkpoint import latest_checkpoint, load_checkpoint, load_pretrained, save_checkpoint
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from composer_dist.files.checkpoint_format import StoredFile
from composer_dist.files.torch_save import seal_of
from tests.kit.grids import crossed
from tests.kit.toy import stateful

pytestmark = pytest.mark.promise(107)


def saved(path: Path, seed: int = 0) -> Path:
    save_checkpoint(path, {"model": stateful(seed), "note": [1, {"a": 2}], "thing": {3}})
    return path


def reseal(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change `checkpoint.json` and write a valid checksum."""
    body = json.loads((path / "checkpoint.json").read_text())["checkpoint"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    sealed = {"crc32": zlib.crc32(text.encode()), "checkpoint": body}
    (path / "checkpoint.json").write_text(json.dumps(sealed, separators=(",", ":")) + "\n")


NAMES = ["../secret.txt", "{tmp}/secret.txt", "sub/../../secret.txt", "../secret", "checkpoint.json", "", 7]


@pytest.mark.parametrize("name", NAMES)
def test_no_file_outside_is_read_or_removed(tmp_path: Path, name: Any) -> None:
    path = saved(tmp_path / "run")
    name = name.replace("{tmp}", str(tmp_path)) if isinstance(name, str) else name
    (path / "sub").mkdir()
    secrets = [tmp_path / "secret.txt", tmp_path / "secret", path / "notes.txt"]
    for secret in secrets:
        secret.write_text("kept")

    def rename(body: dict[str, Any]) -> None:
        body["files"].append([name, 4, [zlib.crc32(b"kept")]])

    reseal(path, rename)
    with pytest.raises(CheckpointValueError, match=r"checkpoint.json is corrupt: .*(name|string)"):
        load_checkpoint(path)
    with pytest.raises(CheckpointValueError, match="is corrupt"):
        load_pretrained(stateful(), path)
    saved(path, seed=1)
    assert [secret.read_text() for secret in secrets] == ["kept"] * 3
    assert load_checkpoint(path)["thing"] == {3}, "the new one is whole"


def test_no_file_outside_is_removed_at_a_url() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    saved("memory://hostile/run")  # type: ignore[arg-type]
    system.pipe_file("/hostile/secret", b"kept")
    mark = json.loads(system.cat_file("/hostile/run/checkpoint.json"))["checkpoint"]
    mark["files"].append(["../secret", 4, [0]])
    text = json.dumps(mark, separators=(",", ":"))
    sealed = {"crc32": zlib.crc32(text.encode()), "checkpoint": mark}
    whole = json.dumps(sealed, separators=(",", ":")) + "\n"
    system.pipe_file("/hostile/run/checkpoint.json", whole.encode())
    save_checkpoint("memory://hostile/run", {"model": stateful()})
    assert system.cat_file("/hostile/secret") == b"kept"
    system.rm("/hostile", recursive=True)


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    other = saved(tmp_path / "other")
    before = {file.name: file.read_bytes() for file in other.iterdir()}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ep0-ba8").symlink_to(other)
    saved(tmp_path / "runs" / "ep0-ba8", seed=1)
    assert {file.name: file.read_bytes() for file in other.iterdir()} == before
    assert not (tmp_path / "runs" / "ep0-ba8").is_symlink()
    assert load_checkpoint(tmp_path / "runs" / "ep0-ba8")["thing"] == {3}
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["ep0-ba8"]


@pytest.mark.parametrize("name", ["checkpoint.json", "__0_"])
def test_a_link_out_of_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "run")
    file = next(file for file in path.iterdir() if file.name.startswith(name))
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    for load in (load_checkpoint, lambda path: load_pretrained(stateful(), path)):
        with pytest.raises(CheckpointValueError, match=f"{file.name} is a link that leads out of"):
            load(path)


@crossed({"kind": ["fifo", "directory", "loop"], "name": ["checkpoint.json", ".metadata", "__0_"]})
def test_what_is_no_regular_file_is_refused_and_skipped(tmp_path: Path, name: str, kind: str) -> None:
    good, path = saved(tmp_path / "1"), saved(tmp_path / "2", seed=1)
    file = next(file for file in path.iterdir() if file.name.startswith(name))
    file.unlink()
    make = {"fifo": os.mkfifo, "directory": Path.mkdir, "loop": lambda file: file.symlink_to(file.name)}
    make[kind](file)
    text = f"There can be no file '{file.name}'" if kind == "loop" else f"{file.name} is not a regular file"
    with pytest.raises(CheckpointValueError, match=text):
        load_checkpoint(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a checkpoint without a mark is none, and no reason to warn
        assert latest_checkpoint(tmp_path) == str(good)
    if kind != "directory" or name == "__0_":
        saved(path, seed=1)
        assert load_checkpoint(path)["thing"] == {3}


@pytest.mark.parametrize("name", ["checkpoint.json", ".metadata"])
def test_a_list_of_a_terabyte_is_not_read(tmp_path: Path, name: str) -> None:
    good, path = saved(tmp_path / "1"), saved(tmp_path / "2", seed=1)
    os.truncate(path / name, 1 << 40)
    text = f"{path}/{name} has 1.0 TiB; at most 1.0 GiB"
    loads: list[Callable[[Path], Any]] = [load_checkpoint]
    if name == "checkpoint.json":
        loads.append(lambda path: load_pretrained(stateful(), path))
    for load in loads:
        with pytest.raises(CheckpointValueError, match=text):
            load(path)
    with pytest.warns(UserWarning, match=f"Skipping {path}: {text}"):
        assert latest_checkpoint(tmp_path) == str(good)
    saved(path, seed=1)
    assert load_checkpoint(path)["thing"] == {3}


@pytest.mark.parametrize("name", ["checkpoint.json", ".metadata"])
def test_a_list_of_a_terabyte_at_a_url_is_not_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    system, url = fsspec.filesystem("memory"), "memory://terabyte/run"
    saved(url)  # type: ignore[arg-type]
    sizes = system.size
    monkeypatch.setattr(type(system), "size", lambda _, path: 1 << 40 if path.endswith(name) else sizes(path))
    with pytest.raises(CheckpointValueError, match=f"{name} has 1.0 TiB; at most 1.0 GiB"):
        load_checkpoint(url)
    system.rm("/terabyte", recursive=True)


def test_an_index_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 1 << 40)
    with pytest.raises(CheckpointValueError, match=f"^{index} has 1.0 TiB; at most 1.0 GiB are "):
        load_pretrained(stateful(), tmp_path)


@pytest.mark.parametrize("pair", [("w", "x" * 5000), ("x" * 5000, "a.safetensors"), ("w", "../" * 2000)])
def test_long_names_make_no_long_errors(tmp_path: Path, pair: tuple[str, str]) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict([pair])}))
    with pytest.raises(CheckpointValueError, match=r": the name '.*'... has \d+ char") as raised:
        load_pretrained(stateful(), tmp_path)
    reseal(saved(tmp_path / "run"), lambda body: body["structure"].update(note={"tensor": "x" * 5000}))
    with pytest.raises(CheckpointValueError, match="its structure names values twice") as other:
        load_checkpoint(tmp_path / "run")
    assert max(len(str(raised.value)), len(str(other.value))) < 600


def chunk_of(body: dict[str, Any]) -> list[Any]:
    """The only chunk of a matrix of 5 x 8."""
    chunks: list[Any] = body["tensors"]["model.layers.0.up.weight"][2]
    return chunks[0]


def halves(body: dict[str, Any], second: list[int]) -> None:
    chunk = chunk_of(body)
    rest = [second, [2, 8], *chunk[2:]]
    chunk[1] = [3, 8]
    body["tensors"]["model.layers.0.up.weight"][2].append(rest)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "outside of the tensor": lambda body: chunk_of(body).__setitem__(0, [1, 0]),
    "at a negative place": lambda body: chunk_of(body).__setitem__(0, [-1, 0]),
    "overlap and a gap": lambda body: halves(body, [2, 0]),
    "missing": lambda body: chunk_of(body).__setitem__(1, [4, 8]),
    "twice": lambda body: body["tensors"]["model.layers.0.up.weight"][2].append(chunk_of(body)),
    "of negative size, and larger": lambda body: chunk_of(body).__setitem__(1, [-5, -8]),
    "of another number of dimensions": lambda body: chunk_of(body).__setitem__(1, [40]),
    "in file -1": lambda body: chunk_of(body).__setitem__(2, -1),
    "in file 99": lambda body: chunk_of(body).__setitem__(2, 99),
    "in file true": lambda body: chunk_of(body).__setitem__(2, False),
    "behind the end": lambda body: chunk_of(body).__setitem__(3, body["files"][0][1] - 8),
    "before the start": lambda body: chunk_of(body).__setitem__(3, -8),
    "at a fraction": lambda body: chunk_of(body).__setitem__(3, 64.0),
    "of huge sizes": lambda body: chunk_of(body).__setitem__(1, [10**4000] * 300),
    "of many dimensions": lambda body: body["tensors"].update(
        many=["uint8", [9] * 60, [[[n % 9] * 60, [1] * 60, 0, 0] for n in range(1000)]]
    ),
    "of more dimensions": lambda body: (chunk_of(body)[0].append(0), chunk_of(body)[1].append(1)),
    "the bytes of others": lambda body: body["tensors"].update(
        {f"{n}": beginning(body["tensors"]["model.layers.0.up.weight"], n) for n in range(1, 200)}
    ),
    "no tensors": lambda body: body.pop("tensors"),
    "tensors in a list": lambda body: body.update(tensors=[]),
    "a shape of text": lambda body: body["tensors"]["model.scale"].__setitem__(1, "ab"),
    "a huge shape": lambda body: body["tensors"]["model.scale"].__setitem__(1, [1 << 62, 1 << 62, 0]),
    "another dtype": lambda body: body["tensors"]["model.scale"].__setitem__(0, "nn"),
    "a quantized dtype": lambda body: body["tensors"]["model.scale"].__setitem__(0, "qint8"),
    "a file's name of other digits": lambda body: body["files"][0].__setitem__(0, "__\u0660_00000000.distcp"),
    "a file's name of many digits": lambda body: body["files"][0].__setitem__(
        0, f"__{'1' * 300}_00000000.distcp"
    ),
    "too few checksums": lambda body: body["files"][0][2].pop(),
    "a file twice": lambda body: body["files"].append(body["files"][0]),
    "object behind the end": lambda body: body["objects"]["thing"].__setitem__(2, 1 << 40),
    "object without a place": lambda body: body["objects"].update(thing=[]),
    "structure without object": lambda body: body["objects"].clear(),
    "structure without tensor": lambda body: body["structure"].update(note={"tensor": "nothing"}),
    "structure with a tensor twice": lambda body: body["structure"].update(
        note={"list": [{"tensor": "model.scale"}] * 2}
    ),
    "structure of another tag": lambda body: body["structure"].update(note={"function": "os.system"}),
    "structure of a number": lambda body: body["structure"].update(note=5),
    "structure with a list as a key": lambda body: body["structure"].update(
        note={"dict": [[[1], {"plain": 1}]]}
    ),
    "no structure": lambda body: body.update(structure=None),
    "another kind": lambda body: body["kinds"].update(note="function"),
    "a kind too many": lambda body: body["kinds"].update(more="model"),
    "a version of text": lambda body: body.update(version="2"),
    "no facts": lambda body: body.update(facts=None),
    "a time of text": lambda body: body["facts"].update(time="now"),
}


def beginning(tensor: list[Any], count: int) -> list[Any]:
    """The first elements of a tensor of the manifest as another tensor."""
    dtype, _, [[_, _, file, offset], *_] = tensor
    return [dtype, [count], [[[0], [count], file, offset]]]


@pytest.mark.parametrize("what", WRONG)
def test_a_sealed_but_wrong_manifest_is_refused_and_skipped(tmp_path: Path, what: str) -> None:
    good = saved(tmp_path / "1")
    bad = saved(tmp_path / "2", seed=1)
    reseal(bad, WRONG[what])
    with pytest.raises(
        CheckpointValueError, match=f"{bad}/checkpoint.json is corrupt: |of dtype '(nn|qint8)'"
    ):
        load_checkpoint(bad)
    if not what.startswith("structure"):  # which models do not use
        with pytest.raises(CheckpointValueError, match="is corrupt: |of dtype '(nn|qint8)'"):
            load_pretrained(stateful(), bad)
    with pytest.warns(UserWarning, match=f"Skipping {bad}: "):
        assert latest_checkpoint(tmp_path) == str(good)


def test_metadata_of_another_run_is_noticed(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "1"), saved(tmp_path / "2")
    shutil.copy(other / ".metadata", one / ".metadata")
    with pytest.raises(CheckpointValueError, match="metadata belongs to another checkpoint"):
        load_checkpoint(one)


class View:
    """Pickles as a tensor with any offset, shape and strides."""

    def __init__(self, *place: Any) -> None:
        self.place = place
        self.tensor = torch.arange(4.0)

    def __reduce__(self) -> Any:
        storage = torch.storage.TypedStorage(
            wrap_storage=self.tensor.untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, *self.place, False, OrderedDict())


@pytest.mark.parametrize("place", [(0, (9,), (1,)), (9, (2,), (1,)), (0, (2, 2), (3, 3)), (3, (2,), (-1,))])
def test_a_view_behind_its_storage_is_refused(tmp_path: Path, place: Any) -> None:
    torch.save({"model": {"w": View(*place)}, "more": torch.ones(1000)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointValueError, match="w is not inside of its storage"):
        load_checkpoint(tmp_path / "x.pt")


def test_one_storage_with_two_dtypes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save({"model": {"w": torch.arange(6.0), "b": torch.ones(4, dtype=torch.int8)}}, file)
    start, second = file.read_bytes().split(b"CharStorage", 1)
    file.write_bytes(start + b"CharStorage" + second.replace(b"X\x01\x00\x00\x001", b"X\x01\x00\x00\x000", 1))
    with pytest.raises(CheckpointValueError, match="model.b reads float32 as int8"):
        load_checkpoint(file)


def test_the_format_before_archives_is_refused(tmp_path: Path) -> None:
    torch.save(
        {"model": nn.Linear(2, 2).state_dict()}, tmp_path / "x.pt", _use_new_zipfile_serialization=False
    )
    with pytest.raises(CheckpointValueError, match=r"x.pt has the format of torch before 1.6"):
        load_checkpoint(tmp_path / "x.pt")
    with pytest.raises(CheckpointValueError, match=r"x.pt has the format of torch before 1.6"):
        load_pretrained(nn.Linear(2, 2), tmp_path / "x.pt")


def nested(times: int, value: Any) -> Any:
    for _ in range(times):
        value = [value] * 10 if times < 100 else [value]
    return value


def pickled(value: Any, **options: Any) -> bytes:
    """A file of `torch.save`."""
    file = BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def rezipped(archive: bytes, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    """An archive written anew, with other contents of some records."""
    file = BytesIO()
    with zipfile.ZipFile(BytesIO(archive)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, changed.get(Path(record.filename).name, old.read(record)))
    return file.getvalue()


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ({"w": torch.ones(1), "x": nested(30, 1)}, "repeats more than 20000000 values"),
        ({"w": torch.ones(1), "x": nested(200, 1)}, "nested more than 100 levels deep"),
        ({"w": torch.ones(1), "x": ITSELF}, "nested more than 100 levels deep"),
        ({"w": torch.ones(1).expand(10**12)}, "w repeats its elements to 4000000000000 bytes"),
        (
            {"w": torch.eye(3).to_sparse()},
            "has sparse tensors, which cannot be loaded: w|x.pt is not a file of torch.save",
        ),
        ({"state": {"model": {"w": torch.ones(1)}, "optimizers": [1]}}, "is not a file of torch.save, or"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "x.pt: .* would both be saved as 'a.b'"),
    ],
    ids=range(7),
)
def test_a_file_of_odd_values_is_refused(tmp_path: Path, contents: Any, text: str) -> None:
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(CheckpointValueError, match=text) as raised:
        load_checkpoint(tmp_path / "x.pt")
    assert "x.pt" in str(raised.value)


class Dtype:
    """Pickles as numpy's int64 with a state of its own."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return np.dtype, ("i8", False, True), self.state


class Array:
    """Pickles as a numpy array of 4 elements and a dtype."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype

    def __reduce__(self) -> Any:
        state = (1, (4,), self.dtype, False, bytes(range(32)))
        rebuild: Any = np.array(0).__reduce__()[0]
        return rebuild, (np.ndarray, (0,), b"b"), state


@pytest.mark.parametrize(
    "state",
    [
        (3, "<", (np.dtype("i8"), (10**9,)), None, None, 8, 8, 0),  # more memory than the array has
        (3, "<", None, ("a",), {"a": (np.dtype("i8"), 100)}, 8, 8, 0),
        (3, "<", None, None, None, 8, 8, 63),  # pointers to objects
    ],
    ids=range(3),
)
def test_what_a_pickle_says_of_a_dtype_is_not_believed(tmp_path: Path, state: Any) -> None:
    torch.save({"w": torch.ones(1), "x": Array(Dtype(*state))}, tmp_path / "x.pt")
    read = load_checkpoint(tmp_path / "x.pt")["x"]
    assert (read.tobytes(), read.dtype.fields, read.dtype.str) == (bytes(range(32)), None, "<i8")
    assert type(pickle.loads(pickle.dumps(read))) is np.ndarray


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def replace_thing(path: Path, contents: bytes) -> None:
    """Put another file of `torch.save` in the place of `thing`, with valid checksums."""
    (file,) = path.glob("*.distcp")
    start = file.stat().st_size
    file.write_bytes(file.read_bytes() + contents)

    def change(body: dict[str, Any]) -> None:
        body["files"][0][1:] = [file.stat().st_size, [zlib.crc32(file.read_bytes())]]
        body["objects"]["thing"] = [0, start, len(contents)]

    reseal(path, change)


def refused_in_both(path: Path, contents: bytes, text: str) -> None:
    """A value is refused in a sharded checkpoint and in a file."""
    replace_thing(saved(path / "run"), contents)
    (path / "x.pt").write_bytes(contents)
    for load in (lambda: load_checkpoint(path / "run"), lambda: load_checkpoint(path / "x.pt")):
        with pytest.raises(CheckpointValueError, match=text):
            load()


@pytest.mark.parametrize(
    "value",
    [
        Call(torch.Tensor, 4),
        Call(torch.FloatTensor, 4),
        Call(torch.UntypedStorage, 8),
        Call(torch._tensor._rebuild_from_type_v2, torch.Tensor, torch.Tensor, (4,), {}),
        Call(bytearray, 1 << 50),
        Call(_codecs.encode, "abc", "utf-32"),
        Call(torch._utils._rebuild_nested_tensor, torch.ones(1), torch.tensor([[9]]), torch.tensor([[1]]), 0),
    ],
    ids=range(7),
)
def test_a_pickle_cannot_make_memory(tmp_path: Path, value: Any) -> None:
    refused_in_both(tmp_path, pickled({"a": (value,)}), "it calls [A-Za-z_]+, to make values")


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (pickled(nested(200, 1)), "nested more than 100 levels deep"),
        (pickled(nested(30, 1)), "repeats more than 20000000 values"),
        (pickled([1], _use_new_zipfile_serialization=False), "has the format of torch before 1.6"),
        (pickle.dumps([1]), "is not a file of torch.save"),
        (rezipped(pickled([1]), zipfile.ZIP_DEFLATED), "is compressed"),
        (rezipped(pickled(torch.ones(3)), byteorder=b"big"), "has the byte order 'big'"),
    ],
    ids=range(6),
)
def test_values_of_a_directory_are_read_like_files(tmp_path: Path, contents: bytes, text: str) -> None:
    refused_in_both(tmp_path, contents, text)


def test_values_that_people_save_are_loaded(tmp_path: Path) -> None:
    odd = torch.ones(2)
    odd.tag = 5  # type: ignore[attr-defined]
    values = [bytearray(b"a\xff"), bytearray(), b"a\xff", b"", 1j, {2}, odd, nn.Parameter(odd)]
    values += [torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.uint16), np.arange(3)]
    for path in (tmp_path / "run", tmp_path / "x.pt"):
        save_checkpoint(path, {"model": stateful(), "thing": tuple(values)}, sharded=path.suffix == "")
        read = load_checkpoint(path)["thing"]
        assert all(map(isinstance, read, map(type, values)))
        assert read[:6] == tuple(values[:6])
        assert read[6].tag == 5
        assert [[float(value) for value in one.tolist()] for one in read[6:]] == [[1, 1]] * 4 + [[0, 1, 2]]


def test_names_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    bad = "model.\x1b[2J\x07\u202e"
    reseal(saved(tmp_path / "run"), lambda body: body["tensors"].update({bad: ["float32", [0], []]}))
    with pytest.raises(CheckpointKeyError, match=r"unexpected: \\x1b\[2J\\x07\\u202e"):
        load_pretrained(stateful(), tmp_path / "run")


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "run")
    reseal(path, lambda body: body["objects"]["thing"].__setitem__(2, body["objects"]["thing"][2] - 30))
    with pytest.raises(CheckpointValueError, match=rf"thing of {path} is corrupt: [^.]*\.$"):
        load_checkpoint(path)


def test_a_refused_pickle_is_explained_in_one_sentence(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": os.system}, tmp_path / "x.pt")
    text = r"could run code: [^\n]*GLOBAL posix.system[^\n]{0,99}\. If you trust its source"
    with pytest.raises(CheckpointValueError, match=text):
        load_checkpoint(tmp_path / "x.pt")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    archive = pickled({"model": nn.Linear(2, 2).state_dict()})
    (tmp_path / "y.pt").write_bytes(rezipped(archive, zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointValueError, match=r"y.pt is compressed \("):
        load_checkpoint(tmp_path / "y.pt")


@pytest.mark.parametrize("change", [{"block": 0}, {"block": -1}, {"checksums": ()}, {"nbytes": "x"}])
def test_a_seal_of_another_format_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()[:-2]
    facts = {"name": "x.pt", "nbytes": len(whole), "checksums": (zlib.crc32(whole),), "block": 1 << 24}
    (tmp_path / "x.pt").write_bytes(whole + seal_of(StoredFile(**facts)))
    assert "model" in load_checkpoint(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(whole + seal_of(StoredFile(**facts | change)))
    with pytest.raises(CheckpointValueError, match="its end is damaged"):
        load_checkpoint(tmp_path / "x.pt")


def test_what_load_refuses_for_its_size_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(tmp_path / "run")
    monkeypatch.setattr("composer_dist.files.index._MOST_TEXT", 100)
    with pytest.raises(CheckpointValueError, match=r"checkpoint.json has .*; at most 100 B are supported"):
        saved(tmp_path / "run", seed=1)
    monkeypatch.undo()
    assert load_checkpoint(before)["thing"] == {3}
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
