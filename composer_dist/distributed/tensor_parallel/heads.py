"""Divides the numbers of heads and features that modules store as attributes.

A module whose projections are cut reshapes their outputs by sizes that it stores as attributes. The
attributes are found by name (as in torchtune's `prepare_mha_for_tp`), checked together, and divided last.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from composer_dist.distributed.tensor_parallel.matrices import base_of, features, is_conv1d
from composer_dist.distributed.tensor_parallel.styles import Style, Styled
from composer_dist.errors import Faults
from composer_dist.structure.names import ancestors, child_name
from composer_dist.structure.structure import Structure
from composer_dist.wording import listed

_KV_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_head")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "heads", *_KV_HEADS)
_WIDTHS = ("embed_dim", "split_size", "all_head_size", "inner_dim", "hidden_size", "d_model", "n_embd")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
PROTOCOL = "tensor_parallel_attributes"
"""The attribute with which a module lists the attributes to divide, instead of the known names."""


@dataclass(frozen=True)
class Division:
    """A module's attribute, before and after it is divided by the ranks."""

    module: str
    attribute: str
    before: int
    after: int


def plan_divisions(
    structure: Structure, styled: Mapping[str, Styled], size: int, extra: Sequence[str]
) -> tuple[Division, ...]:
    """The attributes to divide by `size`, among them those of the names in `extra`."""
    found: list[Division] = []
    idle = set(extra)
    uneven: dict[str, list[str]] = {}
    with Faults() as faults:
        for name in _reshaping(structure, styled):
            module = structure.modules[name]
            idle.difference_update(_present(module, extra))
            own = getattr(module, PROTOCOL, None)
            heads = _present(module, _HEADS if own is None else own)
            names = [*heads, *_present(module, extra)]
            if own is None and heads:
                names += _present(module, _WIDTHS)
            for attribute in dict.fromkeys(names):
                value = getattr(module, attribute)
                if value % size:
                    uneven.setdefault(f"{attribute}={value}", []).append(_named(name, module))
                found.append(Division(name, attribute, value, value // size))
            if own is None:
                for heads_there, path in _uneven_heads(structure, styled, name, size):
                    uneven.setdefault(heads_there, []).append(path)
            if heads or _head_size(module) is not None:
                faults += _partial_faults(structure, styled, name)
        for name, one in styled.items():
            module = structure.modules[name]
            base = base_of(module)
            if isinstance(one.style, Style) and one.style.cut == "out" and is_conv1d(base):
                out, _ = features(base)
                if out % (size * one.style.groups):
                    uneven.setdefault(f"nf={out}", []).append(_named(name, base))
                path = name if base is module else f"{name}.base_layer"
                found.append(Division(path, "nf", out, out // size))
        faults += [
            f"{listed(names, 3)} {'have' if names[1:] else 'has'} {what}, which tp={size} does not divide; "
            "take a tp that does, or leave the module whole with Rule(..., tp='replicate')."
            for what, names in uneven.items()
        ]
        if idle:
            faults.append(
                "No module whose projections are cut has the head_attributes "
                f"{', '.join(sorted(idle))}, as integers."
            )
    return tuple(found)


def _reshaping(structure: Structure, styled: Mapping[str, Styled]) -> Iterator[str]:
    """The parents of projections whose output features stay cut."""
    seen: dict[str, None] = {}
    for name, one in styled.items():
        if _stays_cut(one) or type(one.style).__name__ == "ColwiseParallel":
            seen[structure.first[name.rpartition(".")[0]]] = None
    return iter(seen)


def _stays_cut(one: Styled) -> bool:
    return isinstance(one.style, Style) and one.style.cut == "out" and one.style.after is None


def _present(module: nn.Module, names: Sequence[str]) -> list[str]:
    return [name for name in names if type(vars(module).get(name)) is int]


def _uneven_heads(
    structure: Structure, styled: Mapping[str, Styled], name: str, size: int
) -> Iterator[tuple[str, str]]:
    """Projections whose parts would not be whole heads, in modules that do not store the number of heads.

    With the heads of each first.
    """
    module = structure.modules[name]
    head = _head_size(module)
    if head is None or _present(module, _HEADS):
        return
    for key, child in module._modules.items():
        path = child_name(name, key)
        if child is None or path not in styled or not _stays_cut(styled[path]):
            continue
        heads, rest = divmod(features(base_of(child))[0] // styled[path].style.groups, head)  # type: ignore[union-attr]
        if not rest and heads % size:
            yield f"{heads} heads of {head} features", path


def _head_size(module: nn.Module) -> int | None:
    return next((value for key in _HEAD_SIZES if type(value := getattr(module, key, None)) is int), None)


def _partial_faults(structure: Structure, styled: Mapping[str, Styled], name: str) -> Iterator[str]:
    """An attention's whole parameters without a style: each rank's gradient would cover only its heads."""
    own = styled.get(name)
    summed = own is not None and isinstance(own.style, Style) and own.style.sum_gradients
    for parameter, held in structure.parameters.items():
        for owner in held.info.owners:
            above = list(ancestors(owner))
            below = above[: above.index(name)] if name in above else []
            if name in above and not any(one in styled for one in below) and not (owner == name and summed):
                yield (
                    f"{parameter} stays whole inside {name or 'the root'}, where each rank has only some "
                    f"heads; give {owner or 'the root'} the style 'sum_gradients' if it works head by head, "
                    "or 'replicate' if it works on whole activations."
                )


def _named(name: str, module: nn.Module) -> str:
    return f"{name or 'The root'} ({type(module).__name__})"
