"""Refuses parameters that share memory in ways that sharding would break.

A tie, one parameter under several names, is preserved. But if a parameter shares its memory with another
tensor object (a view kept as an attribute, a second Parameter over the same storage), the optimizer would
silently update only one of them after sharding.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import nn

from composer_dist import _torch
from composer_dist.errors import Faults
from composer_dist.structure.families import transformers_models
from composer_dist.structure.names import child_name
from composer_dist.structure.structure import Held, Registration, Structure
from composer_dist.tensors.nested import everything_in


def check_aliasing(structure: Structure, plain: Mapping[str, str]) -> None:
    """Refuse to shard parameters that something else refers to.

    Raises:
        ParallelismValueError: lists all parameters that are also plain attributes, that overlap other
            tensors in memory, or that are of a tensor subclass without a codec.
    """
    with Faults() as faults:
        for check in (_subclasses, _attributes, _overlaps):
            faults += check(structure, plain)
        faults += _untied(structure)


def _untied(structure: Structure) -> Iterator[str]:
    """Pairs of parameters on the meta device that the configuration of a transformers model ties."""
    for model in transformers_models(structure.modules[""]):
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        held = dict(model.named_parameters(remove_duplicate=False)) if tied else {}
        for first, second in tied.items():
            one, other = held.get(first), held.get(second)
            if one is not other and one is not None and other is not None and one.is_meta and other.is_meta:
                yield (
                    f"{first} and {second} are tied by the configuration of {type(model).__name__}, but are "
                    "two parameters on the meta device: model.to('meta') unties weights. Call "
                    "model.tie_weights() after it."
                )


def _subclasses(structure: Structure, plain: Mapping[str, str]) -> Iterator[str]:
    for name, held in _sharded(structure, plain):
        cls = type(held.get())
        if cls.__module__.partition(".")[0] == "bitsandbytes":
            yield (
                f"{name} is a {cls.__name__} of bitsandbytes, which stores its scales outside of the tensor, "
                "so they would be lost. Quantize with torchao's NF4Tensor, or leave its module replicated "
                "with Rule(..., shard=False)."
            )
        elif cls not in (nn.Parameter, torch.Tensor) and not held.info.inner:
            yield (
                f"{name} is a {cls.__name__}; sharding would make it a plain Parameter. Register a codec for "
                "it with register_tensor_codec, or leave its module replicated with Rule(..., shard=False)."
            )


def _attributes(structure: Structure, plain: Mapping[str, str]) -> Iterator[str]:
    for name, held in _sharded(structure, plain):
        if any(place.kind != "parameter" for place in held.places):
            yield (
                f"{name} is also held as a plain attribute or buffer ({', '.join(held.info.names[1:])}), "
                "which FSDP2 would not follow. Register it as a parameter there, or look it up when used."
            )
    names: dict[int, str] = {}
    modules = list(structure.modules[""].modules())
    # What torch.compile makes of a torch.nn layer holds the layer's own dictionaries, which stay up to date.
    seen = {id(one) for module in modules for one in (module, module._parameters, module._buffers)}
    for owner, module in structure.modules.items():
        for key, value in vars(module).items():
            if key in NO_COPIES or type(value) in _PLAIN:
                continue
            for tensor in everything_in(value, seen=seen):
                names = names or {_memory(held.get()): name for name, held in _sharded(structure, plain)}
                if _memory(tensor) in names:
                    yield (
                        f"{names[_memory(tensor)]} is also held inside of {child_name(owner, key)}, where it "
                        "would keep its old values. Look it up in its module when used, or leave it whole: "
                        "Rule(..., shard=False)."
                    )


def _memory(tensor: torch.Tensor) -> int:
    """A key of its memory, which views share; of the tensor itself if it is not an ordinary one."""
    ordinary = tensor.layout is torch.strided and type(tensor) in (nn.Parameter, torch.Tensor)
    return _torch.storage_key(tensor) if ordinary and tensor.numel() else id(tensor)


_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Tensor}
NO_COPIES = {*vars(nn.Module()), "_flat_weights"}  # torch's recurrent modules keep theirs up to date


def _overlaps(structure: Structure, plain: Mapping[str, str]) -> Iterator[str]:
    """Pairs of tensors, one of them to be sharded, that overlap in one storage."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, held in structure.tensors.items():
        tensor = held.get()
        if any(map(_is_recreated, held.places)):
            continue
        if tensor.layout is torch.strided and type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel():
            start = tensor.storage_offset() * tensor.itemsize
            reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            span = (int(start), int(start + reach * tensor.itemsize), name)
            spans.setdefault(_torch.storage_key(tensor), []).append(span)
    sharded = {name for name, _ in _sharded(structure, plain)}
    for found in spans.values():
        found.sort()
        for (_, end, first), (start, _, second) in pairwise(found):
            if start < end and (first in sharded or second in sharded):
                yield (
                    f"{first} and {second} share memory without being one parameter; after sharding they "
                    "would differ. Tie them (b.weight = a.weight), or copy one."
                )


def _is_recreated(place: Registration) -> bool:
    """Whether torch's older `spectral_norm` computes the attribute from a parameter before each forward."""
    return place.kind == "attribute" and _torch.has_spectral_norm(place.module, place.key)


def _sharded(structure: Structure, plain: Mapping[str, str]) -> Iterator[tuple[str, Held]]:
    for name, held in structure.parameters.items():
        if name not in plain and not hasattr(held.get(), "device_mesh"):
            yield name, held
