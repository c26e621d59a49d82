"""Plans the files of an exported model before anything is written.

transformers' conversions determine the names of the stored tensors, and how they are fused, split or
permuted. They run on stand-ins here. If they only move elements, every rank knows where its elements go.
Computed tensors, and tensors that would be written in many tiny pieces, are gathered in *groups*: tensors of
the model and the stored tensors made from them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from composer_dist.errors import CheckpointValueError
from composer_dist.files.index import Entry, Index
from composer_dist.files.safetensors import DTYPES
from composer_dist.files.slabs import plan_reads
from composer_dist.files.transformers import convert, revert
from composer_dist.files.write import create
from composer_dist.tensors.blueprint import Blueprint, Box, TracedBlueprint
from composer_dist.tensors.parts import Dims, Part, contiguous_strides

_WEIGHTS = "model{suffix}.safetensors"
_WORTH = 512
"""Rows of at least this many bytes on average are written separately."""
_FEW = 1024
"""Up to this many rows of a tensor are written separately, however short."""


@dataclass(frozen=True)
class Bundle:
    """Tensors of the model (`sources`) and the stored tensors made from them (`results`)."""

    sources: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class ExportPlan:
    """The files of an exported model, and where each tensor of the model goes."""

    index: Index
    headers: dict[str, bytes]
    """File to its header."""
    listing: str | None
    """The text of the index, if there are several files."""
    direct: dict[str, Blueprint]
    """Name in the model to the places of its elements in stored tensors."""
    groups: tuple[Bundle, ...]
    """The tensors to gather."""

    def create_files(self, directory: Path) -> list[Path]:
        """Make the files, each with its header and of its final size, and the index; returns their paths."""
        for name, size in self.index.files:
            create(directory / name, self.headers[name], size)
        if self.listing is not None:
            (directory / "model.safetensors.index.json").write_text(self.listing)
        return [directory / name for name, _ in self.index.files]

    def digest(self) -> str:
        """Equal for equal plans."""
        facts: list[Any] = [self.index.pack(), self.listing, sorted(self.direct)]
        facts += [[one.sources, one.results] for one in self.groups]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plan_export(
    model: Any,
    sources: Mapping[str, tuple[Dims, torch.dtype]],
    parts: Mapping[str, Part],
    parameters: int,
    max_shard_size: int | str,
    together: Iterable[Sequence[str]] = (),
    everything: bool = False,
) -> ExportPlan:
    """Plan the files of a model; every rank makes the same plan.

    Args:
        model: a transformers model.
        sources: shape and dtype of each tensor to save, by name, without ties.
        parts: a rank's part of each tensor that may be written from the shards.
        parameters: the number of their elements, for the index.
        max_shard_size: bytes, or as "5GB".
        together: names to gather at the same time.
        everything: gather all tensors.

    Raises:
        CheckpointValueError: safetensors does not support a dtype, there is nothing to save, or
            `max_shard_size` is not a size.
    """
    given = {name: TracedBlueprint.stored(name, shape, dtype) for name, (shape, dtype) in sources.items()}
    made: dict[str, TracedBlueprint] = _in_order(revert(model, dict(given)), given)
    index, headers, listing = _lay_out(made, max_shard_size, parameters)
    groups = _groups(made, together)
    candidates = [one for one in groups if not everything and all(name in parts for name in one.sources)]
    places = _places(model, made, candidates, sources)
    direct: dict[str, Blueprint] = {}
    gathered = []
    for one in groups:
        found = {name: places[name] for name in one.sources if name in places}
        if len(found) < len(one.sources) or any(
            _is_scattered(place, index.entries, parts[name]) for name, place in found.items()
        ):
            gathered.append(one)
        else:
            direct |= found
    return ExportPlan(index, headers, listing, direct, tuple(gathered))


def _in_order(
    made: Mapping[str, TracedBlueprint], sources: Mapping[str, TracedBlueprint]
) -> dict[str, TracedBlueprint]:
    """In the model's order; transformers (5.23) sorts what it has loaded, as it has on one rank perhaps."""
    places = {name: place for place, name in enumerate(sources)}
    return dict(sorted(made.items(), key=lambda one: (places.get(one[0], len(places)), one[0])))


def _lay_out(
    tensors: Mapping[str, torch.Tensor], max_shard_size: int | str, parameters: int
) -> tuple[Index, dict[str, bytes], str | None]:
    """Files as transformers splits them, their headers as safetensors writes them, and the index."""
    from huggingface_hub import split_state_dict_into_shards_factory

    names = {dtype: name for name, dtype in DTYPES.items()}
    if odd := [name for name, one in tensors.items() if one.dtype not in names]:
        raise CheckpointValueError(
            f"safetensors lacks the dtype of {', '.join(f'{n} ({tensors[n].dtype})' for n in odd)}."
        )
    if not tensors:
        raise CheckpointValueError("The model has no tensors to export.")
    try:
        if str(max_shard_size).strip().startswith(("-", "0")):
            raise ValueError
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda one: one.numel() * one.dtype.itemsize,
            filename_pattern=_WEIGHTS,
            max_shard_size=max_shard_size,
        )
    except (TypeError, ValueError):
        raise CheckpointValueError(
            f"max_shard_size must be a number of bytes or a size such as '5GB', not {max_shard_size!r}."
        ) from None
    files, headers, entries = [], {}, {}
    for number, (file, held) in enumerate(split.filename_to_tensors.items()):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        ordered = sorted(held, key=lambda name: (-tensors[name].dtype.itemsize, name))  # for alignment
        for name in ordered:
            one = tensors[name]
            end = at + one.numel() * one.dtype.itemsize
            header[name] = {"dtype": names[one.dtype], "shape": list(one.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        start = len(headers[file])
        for name in ordered:
            offset = start + header[name]["data_offsets"][0]
            entries[name] = Entry(number, tensors[name].dtype, tuple(tensors[name].shape), offset)
        files.append((file, start + at))
    listing = None
    if split.is_sharded:
        facts = {"total_parameters": parameters, **split.metadata}
        listing = json.dumps(
            {"metadata": facts, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True
        )
    return Index("", tuple(files), entries), headers, listing and listing + "\n"


def _groups(made: Mapping[str, TracedBlueprint], together: Iterable[Sequence[str]]) -> list[Bundle]:
    """Groups of tensors that have a stored tensor in common, or must be gathered together."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for names in [*(sorted(trace.sources) for trace in made.values()), *together]:
        for name in names:
            parent[root(name)] = root(names[0])
    members: dict[str, tuple[dict[str, None], list[str]]] = {}
    for result, trace in made.items():
        if sources := sorted(trace.sources):  # none where there are no elements
            held, results = members.setdefault(root(sources[0]), ({}, []))
            held.update(dict.fromkeys(sources))
            results.append(result)
    return [Bundle(tuple(held), tuple(results)) for held, results in members.values()]


def _places(
    model: Any,
    made: Mapping[str, TracedBlueprint],
    groups: Iterable[Bundle],
    sources: Mapping[str, tuple[Dims, torch.dtype]],
) -> dict[str, Blueprint]:
    """The places of the elements of the model's tensors, for groups in which each element has one place."""
    found: dict[str, Blueprint] = {}
    moved: list[Bundle] = []
    for one in groups:
        first = made[one.results[0]]
        if len(one.results) == 1 and first.source is not None:
            shape, dtype = sources[one.sources[0]]
            found[one.sources[0]] = Blueprint.stored(one.results[0], shape, dtype)
        elif not any(made[name].computed for name in one.results):
            moved.append(one)
    if not moved:
        return found
    stored = {
        name: Blueprint.stored(name, tuple(made[name].shape), made[name].dtype)
        for one in moved
        for name in one.results
    }
    try:
        loaded = convert(model, stored, {name: shape for name, (shape, _) in sources.items()}).tensors
    except CheckpointValueError:  # it can be saved, but not loaded in slices: gather it
        return found
    for one in moved:
        blueprints = {name: loaded[name][0] for name in one.sources if name in loaded}
        if len(blueprints) == len(one.sources) and _inverse(blueprints, {n: made[n] for n in one.results}):
            found |= blueprints
    return found


def _inverse(loaded: Mapping[str, Blueprint], saved: Mapping[str, TracedBlueprint]) -> bool:
    """Whether loading is the inverse of saving, judged by the first and last element of each box."""
    count = dict.fromkeys(saved, 0)
    for blueprint in loaded.values():
        if sum(prod(box.sizes) for box in blueprint.boxes) != blueprint.numel():
            return False
        for box in blueprint.boxes:
            if box.source not in count:
                return False
            count[box.source] += prod(box.sizes)
    if any(count[name] != one.numel() for name, one in saved.items()):
        return False
    return all(
        _find(loaded[source], place) == (name, at)
        for name, one in saved.items()
        for box in one.boxes
        for at, source, place in _ends(one, box)
        if source in loaded
    )


def _ends(tensor: torch.Tensor, box: Box) -> Iterator[tuple[int, str, int]]:
    """The first and last element of a box: index in the tensor, source, index there."""
    strides = contiguous_strides(tuple(tensor.shape))
    for inside in ([0] * len(box.sizes), [size - 1 for size in box.sizes]):
        at = sum((s + i) * stride for s, i, stride in zip(box.start, inside, strides, strict=True))
        place = box.offset + sum(i * stride for i, stride in zip(inside, box.strides, strict=True))
        yield at, box.source, place


def _find(tensor: Blueprint, number: int) -> tuple[str, int] | None:
    """The source of an element of a tensor, and the index there."""
    place: list[int] = []
    for size in reversed(tensor.shape):
        number, index = divmod(number, size)
        place.insert(0, index)
    for box in tensor.boxes:
        inside = [index - start for index, start in zip(place, box.start, strict=True)]
        if all(0 <= i < size for i, size in zip(inside, box.sizes, strict=True)):
            offset = sum(i * stride for i, stride in zip(inside, box.strides, strict=True))
            return box.source, box.offset + offset
    return None


def _is_scattered(place: Blueprint, entries: Mapping[str, Entry], part: Part) -> bool:
    """Whether a rank's part would be written in many short rows."""
    target = torch.empty(part.numel, dtype=place.dtype, device="meta")
    slabs = list(plan_reads(place, entries, part, target))
    rows = sum(prod(one.sizes) // (one.sizes[-1] if one.strides[-1] == 1 else 1) for one in slabs)
    return rows > _FEW and sum(one.nbytes for one in slabs) < rows * _WORTH
