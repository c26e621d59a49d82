"""Default styles: from a Hugging Face model's own plan, or inferred from the structure.

The structure shows attention (query, key and value projections, or GPT-2's fused one, and an output
projection), pairs of matrices, the token embedding and the head. All other modules are reported. Names and
sizes do not show what a forward computes between two matrices: it is assumed to be elementwise, and to work
head by head in attention.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from composer_dist.distributed.tensor_parallel.matrices import (
    base_of,
    features,
    is_conv1d,
    is_known,
    is_matrix,
)
from composer_dist.distributed.tensor_parallel.styles import STYLES, TRANSFORMERS, Styled
from composer_dist.structure.families import is_a
from composer_dist.structure.names import ancestors, child_name
from composer_dist.structure.structure import Structure

_QUERY = {"q_proj", "query", "wq", "q_lin", "to_q", "q"}
_KEY = {"k_proj", "key", "wk", "k_lin", "to_k", "k"}
_VALUE = {"v_proj", "value", "wv", "v_lin", "to_v", "v"}
_OUTPUT = {"o_proj", "out_proj", "output_proj", "wo", "to_out", "out_lin", "dense", "c_proj"}
_OUTPUT |= {"proj", "o", "out"}
_FUSED = {"c_attn", "qkv_proj", "qkv", "query_key_value", "Wqkv", "in_proj"}
_UP = {"gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc", "fc_in", "lin1", "linear1", "dense_h_to_4h"}
_UP |= {"wi", "wi_0", "wi_1", "up", "gate"}
_DOWN = {"down_proj", "w2", "fc2", "c_proj", "fc_out", "lin2", "linear2", "dense_4h_to_h", "wo", "down"}
_TOKENS = {"embed_tokens", "tok_embeddings", "token_embedding", "wte", "embed", "embedding", "embed_in"}
_HEAD = {"lm_head", "head", "output", "embed_out", "unembed", "out"}
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Hardswish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity),
)


def infer_styles(structure: Structure) -> tuple[dict[str, Styled], dict[str, str]]:
    """The styles of a model's modules, and why other modules get none."""
    styled: dict[str, Styled] = {}
    unplaced: dict[str, str] = {}
    planned = _with_own_plan(structure)
    for name in planned:
        _read_own_plan(name, structure, styled, unplaced)
    for name, module in structure.modules.items():
        if structure.first[name] == name and not any(above in planned for above in ancestors(name)):
            styled.update(_attention(name, module, unplaced))
            styled.update(_pair(name, module))
    styled.update(_ends(structure, styled, planned))
    for name, module in structure.modules.items():
        if structure.first[name] != name or any(above in {*planned, *styled} for above in ancestors(name)):
            continue
        wide = [key for key, value in module._parameters.items() if value is not None and value.ndim > 1]
        if wide and not isinstance(module, nn.Embedding):
            why = f"a {type(module).__name__}, not part of a known attention or pair of matrices"
            if is_matrix(module) and not is_known(module):
                why = (
                    f"a {type(module).__name__}, which has a forward of its own and may need the whole matrix"
                )
            unplaced.setdefault(name, why)
    if not styled and not unplaced:
        unplaced[""] = "the model has no matrix to cut"
    return styled, unplaced


def _with_own_plan(structure: Structure) -> list[str]:
    found: list[str] = []
    for name, module in structure.modules.items():
        own = is_a(module, "PreTrainedModel") and getattr(module, "_tp_plan", None)
        if own and not any(above in found for above in ancestors(name)):
            found.append(name)
    return found


def _read_own_plan(
    name: str, structure: Structure, styled: dict[str, Styled], unplaced: dict[str, str]
) -> None:
    model: Any = structure.modules[name]
    reason = f"it is in the plan of {type(model).__name__}"
    found: list[tuple[str, str, list[str], list[str]]] = []
    for pattern, style in model._tp_plan.items():
        regex = re.compile(re.escape(child_name(name, pattern)).replace(r"\*", r"\d+"))
        modules = [one for one in structure.modules if regex.fullmatch(one)]
        parameters = [one for one in structure.parameters if regex.fullmatch(one) and not modules]
        found.append((pattern, style, modules, parameters))
    experts = {one for _, style, modules, _ in found if style == "moe_tp_experts" for one in modules}
    whole = Styled(STYLES["replicate"], "its experts stay whole on every tensor-parallel rank")
    styled.update(dict.fromkeys(experts, whole))
    for pattern, style, modules, parameters in found:
        if style in TRANSFORMERS:
            styled.update({one: Styled(TRANSFORMERS[style], reason) for one in modules})
        elif modules and style != "moe_tp_experts":
            unplaced[modules[0]] = f"transformers' style {style!r} ({pattern}) is not supported"
        if cut := [one for one in parameters if one.rpartition(".")[0] not in experts]:
            why = f"transformers cuts its parameter {cut[0]}, which does not belong to a matrix ({style!r})"
            unplaced[cut[0].rpartition(".")[0]] = why


def _attention(name: str, module: nn.Module, unplaced: dict[str, str]) -> Iterator[tuple[str, Styled]]:
    children = _matrices(module)
    output = [key for key in children if key in _OUTPUT]
    inputs = [[key for key in children if key in known] for known in (_QUERY, _KEY, _VALUE)]
    fused = [key for key in children if key in _FUSED]
    why = f"{name or 'the root'} is an attention"
    if len(output) == 1 and all(len(keys) == 1 for keys in inputs):
        for (key,) in inputs:
            yield child_name(name, key), Styled(STYLES["colwise"], why)
    elif len(output) == 1 and len(fused) == 1 and not any(inputs):
        groups = _fused_groups(module, children[fused[0]])
        if groups is None:
            unplaced[child_name(name, fused[0])] = (
                "it fuses query, key and value in an unknown order: 'colwise:3' if they follow one another, "
                "'colwise' if each head's are together, 'colwise_gather' (and 'rowwise_split' for "
                f"{output[0]}) otherwise"
            )
            return
        yield child_name(name, fused[0]), Styled(replace(STYLES["colwise"], groups=groups), why)
    else:
        return
    yield child_name(name, output[0]), Styled(STYLES["rowwise"], why)
    for key, child in module._modules.items():
        if child is not None and key not in children and any(True for _ in child.parameters()):
            path, size = child_name(name, key), getattr(module, "head_dim", None)
            if all(tuple(parameter.shape) == (size,) for parameter in child.parameters()):
                yield path, Styled(STYLES["sum_gradients"], "it works head by head")
            else:
                unplaced[path] = "a part of an attention that is neither a projection nor works head by head"


def _fused_groups(module: nn.Module, matrix: nn.Module) -> int | None:
    """How many matrices follow one another in a fused projection; None if unknown."""
    width = getattr(module, "split_size", None)
    out, _ = features(matrix)
    if is_conv1d(matrix) and isinstance(width, int) and out == 3 * width:
        return 3  # transformers' GPT2Attention and its copies
    return None


def _pair(name: str, module: nn.Module) -> Iterator[tuple[str, Styled]]:
    """Matrices into a wider space and one out of it; operations in between must be elementwise."""
    children = _matrices(module)
    if isinstance(module, nn.Sequential):
        yield from _sequential_pairs(name, module)
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        return
    down = [key for key in children if key in _DOWN]
    up = [key for key in children if key in _UP]
    if len(down) != 1 or not up or any(key in _QUERY | _FUSED for key in children):
        return
    inner = {features(children[key])[0] for key in up}
    others = [
        child for key, child in module._modules.items() if key not in {*up, *down} and child is not None
    ]
    if inner != {features(children[down[0]])[1]} or any(True for o in others for _ in o.parameters()):
        return
    why = f"{name or 'the root'} is a pair of matrices"
    for key in up:
        yield child_name(name, key), Styled(STYLES["colwise"], why)
    yield child_name(name, down[0]), Styled(STYLES["rowwise"], why)


def _sequential_pairs(name: str, module: nn.Sequential) -> Iterator[tuple[str, Styled]]:
    waiting: str | None = None
    why = f"{name or 'the root'} has a pair of matrices"
    for key, child in module._modules.items():
        if child is None or (waiting and isinstance(child, _ELEMENTWISE)):
            continue
        if waiting and _can_cut(base_of(child)):
            yield child_name(name, waiting), Styled(STYLES["colwise"], why)
            yield child_name(name, key), Styled(STYLES["rowwise"], why)
            waiting = None
        else:
            waiting = key if _can_cut(base_of(child)) else None


def _ends(
    structure: Structure, styled: Mapping[str, Styled], planned: list[str]
) -> Iterator[tuple[str, Styled]]:
    lists = [name for name, module in structure.modules.items() if isinstance(module, nn.ModuleList)]
    for name, module in structure.modules.items():
        inside = any(above in {*planned, *lists, *styled} for above in ancestors(name))
        if inside or structure.first[name] != name:
            continue
        key = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and key in _TOKENS:
            yield name, Styled(STYLES["vocab"], "it embeds tokens")
        elif key in _HEAD and _can_cut(base_of(module)):
            yield name, Styled(STYLES["colwise_gather"], "it is the head")


def _matrices(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module that are matrices and can be cut, without their adapters."""
    children = {key: base_of(child) for key, child in module._modules.items() if child is not None}
    return {key: child for key, child in children.items() if _can_cut(child)}


def _can_cut(module: nn.Module) -> bool:
    return is_matrix(module) and is_known(module)
