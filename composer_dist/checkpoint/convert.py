"""Converts checkpoints from one form to another, in one process and with memory for a tensor or two.

Tensors are memory-mapped from their files. A tensor that is stored in pieces is first assembled in a
temporary file, a spool, which is mapped too. Writing such tensors reads them page by page, and the system
can drop the pages again.
"""

import mmap
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from composer_dist.checkpoint.export.directory import staged, write_settings
from composer_dist.checkpoint.export.plan import plan_export
from composer_dist.checkpoint.format.opened import Opened, open_checkpoint
from composer_dist.checkpoint.format.sharded import Saving
from composer_dist.checkpoint.format.single_file import SavingFile
from composer_dist.checkpoint.kinds.contents import stored_kind
from composer_dist.checkpoint.storage.place import place_of
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointError, CheckpointKeyError, CheckpointValueError
from composer_dist.files.checkpoint_format import NAME, Kind, decode
from composer_dist.files.find import index_weights
from composer_dist.files.index import Entry, Index, check_inside
from composer_dist.files.match import match_names
from composer_dist.files.other_libraries import model_in
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.slabs import plan_reads
from composer_dist.files.transformers import revert, untied, untying
from composer_dist.files.write import NewFiles, write_tensor
from composer_dist.progress import Progress, Stage
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.blueprint import Blueprint

Form = Literal["sharded", "file", "huggingface"]

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".distcp"}


def convert_checkpoint(
    source: Path,
    target: Path,
    form: Form,
    *,
    like: Path | None = None,
    key: str = "model",
    prefix: str = "",
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> None:
    """Read a checkpoint and write it in another form; an existing target is replaced at the end.

    Args:
        source: a directory or a file of `save_checkpoint`, another library's single file, or a directory
            of a Hugging Face model.
        target: the path to write.
        form: "sharded" and "file" are the forms of `save_checkpoint`.
        like: a directory with the configuration, and tokenizer, of the Hugging Face model; by default the
            source, or the directory that it is in.
        key: the model's key in the checkpoint.
        prefix: added to the names in a checkpoint that is made from a Hugging Face model.
        max_shard_size: of a Hugging Face directory: bytes, or as "5GB".
        progress: shows the progress.

    Raises:
        CheckpointError: the source is not a checkpoint, is damaged, or does not match the model.
    """
    progress = progress or Progress(shown=True)
    mapped = Mapped(target.absolute().parent)
    base = like or (source if source.is_dir() else source.parent)
    with progress.stage("converting") as stage:
        if form_of(source) == "huggingface":
            tensors = _from_huggingface(source, model_like(base), mapped, stage)
            named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
            contents: dict[str, tuple[Kind, Any]] = {key: ("model", named)}
        else:
            contents = _from_checkpoint(open_checkpoint(str(source)), key, mapped, stage)
            tensors = {}
        if form != "huggingface":
            _save(contents, target, sharded=form == "sharded")
            return
        if like is None and not tensors:
            raise CheckpointValueError(
                "A Hugging Face directory needs the model's configuration: pass --like with a directory "
                "that has the config.json."
            )
        model = model_like(base)
        tensors = tensors or _of_model(contents, key, model, source)
        _to_huggingface(tensors, model, base, target, max_shard_size, stage)


def form_of(path: Path) -> Form:
    """The form of the checkpoint at a path, judged by its files."""
    if path.is_dir() and not (path / NAME).exists():
        there = chain(path.glob("*.safetensors"), path.glob("pytorch_model.bin*"))
        return "huggingface" if any(there) else "sharded"
    if path.is_dir():
        return "sharded"
    return "huggingface" if path.name.endswith((".safetensors", ".index.json")) else "file"


@dataclass
class Mapped:
    """Memory-mapped files with tensors; spools are made in `directory`."""

    directory: Path
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    def tensor(self, blueprint: Blueprint, index: Index, root: Path, stage: Stage) -> Tensor:
        """A tensor of a checkpoint."""
        shape = tuple(blueprint.shape)
        if not prod(shape):
            return torch.empty(shape, dtype=blueprint.dtype)
        if blueprint.source is not None:
            entry = index.entries[blueprint.source]
            return self._part(root / index.files[entry.file][0], entry.offset, shape, entry.dtype)
        whole = self._spool(shape, blueprint.dtype)
        part = Layout(shape).part(Coordinate())
        with Files(root, index.files) as files:
            read_slabs(list(plan_reads(blueprint, index.entries, part, whole.view(-1))), files, stage=stage)
        return whole

    def _part(self, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._maps[path], dtype=dtype, count=prod(shape), offset=offset).view(shape)

    def _spool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.directory) as file:
            file.truncate(nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)


def model_like(
    directory: Path, remedy: str = "Pass --like with a directory whose config.json names an architecture"
) -> Any:
    """The transformers model of a directory's configuration, on the meta device.

    Args:
        directory: has the config.json.
        remedy: what to do if that names no architecture.

    Raises:
        CheckpointValueError: no configuration there names an architecture of transformers.
    """
    import transformers

    check_inside(directory, ["config.json"])
    from composer_dist.distributed import init_context

    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        (name, *_) = config.architectures or [""]
        cls = getattr(transformers, name)
        if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
            raise TypeError(f"transformers.{name} is not a model")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointValueError(
            f"{directory} does not name its model: {str(error).rstrip('.')}. {remedy} of transformers."
        ) from error
    with init_context(dtype=config.dtype or torch.float32):
        return cls(config)


def _from_huggingface(source: Path, model: Any, mapped: Mapped, stage: Stage) -> dict[str, Tensor]:
    """The model's tensors under all names in its `state_dict()`."""
    index, _ = index_weights(source)
    root = source if source.is_dir() else source.parent
    structure = read_structure(model)
    match = match_names(structure, index.tensors, source, index.adapter)
    match.check(structure, index.entries, True, source)
    values = {
        first: mapped.tensor(blueprint, index, root, stage) for first, blueprint in match.tensors.items()
    }
    return _named(structure, values, model)


def _named(structure: Structure, values: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Values under every name that is saved; tied ones are one object."""
    firsts = {name: first for first, held in structure.tensors.items() for name in held.info.names}
    return {name: values[firsts[name]] for name in model.state_dict() if firsts[name] in values}


def _from_checkpoint(opened: Opened, model: str, mapped: Mapped, stage: Stage) -> dict[str, tuple[Kind, Any]]:
    """Everything in a checkpoint, by key, with mapped tensors; a bare `state_dict()` gets the key `model`."""
    opened.verify(0, 1)
    known: dict[str, Tensor] = {}

    def read(tag: str, path: str) -> Any:
        if tag != "tensor":
            return opened.value({tag: path})
        if path not in known:
            known[path] = mapped.tensor(opened.tensors[path], opened.index, Path(opened.root), stage)
        return known[path]

    found = {key: decode(code, read) for key, code in opened.structure.items()}
    if not opened.sharded and model_in(found) is found:
        return {model: ("model", found)}
    return {key: (stored_kind(opened, key), value) for key, value in found.items()}


def _of_model(
    contents: Mapping[str, tuple[Kind, Any]], key: str, model: Any, source: Path
) -> dict[str, Tensor]:
    """The tensors of a transformers model in a checkpoint, under that model's names."""
    from composer_dist.models import HuggingFaceModel

    if key not in contents:
        raise CheckpointKeyError(f"{source} has no {key!r}; pass --key with one of {', '.join(contents)}.")
    state = {name: value for name, value in contents[key][1].items() if isinstance(value, Tensor)}
    entries = {name: Entry(0, value.dtype, tuple(value.shape), 0) for name, value in state.items()}
    given = {name: Blueprint.stored(name, one.shape, one.dtype) for name, one in entries.items()}
    best: CheckpointError | None = None
    for wrapped, inside in ((model, ""), (HuggingFaceModel(model), "model.")):
        structure = read_structure(wrapped)
        match = match_names(structure, given, source)
        try:
            match.check(structure, entries, True, source)
        except CheckpointError as error:
            best = best or error
            continue
        values = {
            first.removeprefix(inside): state[str(blueprint.source)]
            for first, blueprint in match.tensors.items()
        }
        return _named(read_structure(model), values, model)
    assert best is not None
    raise best


def _to_huggingface(
    tensors: Mapping[str, Tensor],
    model: Any,
    like: Path,
    target: Path,
    max_shard_size: int | str,
    stage: Stage,
) -> None:
    kept = untied(model, tensors, tensors)
    plan = plan_export(
        model,
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()},
        {},
        sum(parameter.numel() for parameter in model.parameters()),
        max_shard_size,
        everything=True,
    )
    stage.expect(sum(entry.nbytes for entry in plan.index.entries.values()))
    with staged(target) as directory:
        for file in sorted(like.iterdir()) if like.is_dir() else ():  # configuration, tokenizer, code
            if file.is_dir():  # such as the one that is written to, where it is `like`
                continue
            check_inside(like, [file.name])
            if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, directory / file.name)
        dtypes = [one.dtype for one in kept.values() if one.is_floating_point()]
        other = dtypes[0] if dtypes and model.dtype not in dtypes else None  # than the configuration's
        write_settings(model, directory, untying(model, tensors), other)
        paths = plan.create_files(directory)
        with NewFiles(paths) as files:
            for group in plan.groups:
                made = revert(model, {name: kept[name] for name in group.sources})
                for name in group.results:
                    entry = plan.index.entries[name]
                    stage.advance(write_tensor(made[name], files, entry.file, entry.offset))
            files.flush()


def _save(contents: Mapping[str, tuple[Kind, Any]], target: Path, sharded: bool) -> None:
    place, agreement = place_of(target), Agreement()
    token = place.reserve(sharded)
    if sharded:
        Saving.plan(place, token, None, contents, agreement).run(agreement)
    else:
        values = {key: value for key, (_, value) in contents.items()}
        SavingFile(place, token, None, values).run(agreement)
