"""LoRA adapters of a matrix that is cut.

An adapter adds `B(A(x))` to the matrix's output. If the output features are cut, B is cut in the same way
and A stays whole; if the input features are cut, A is cut and B stays whole. If the ranks use the whole one
for different parts of the work (positions of the sequence, or features), its gradients are summed.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from composer_dist.distributed.tensor_parallel.matrices import base_of
from composer_dist.distributed.tensor_parallel.styles import STYLES, Style, Styled
from composer_dist.errors import Faults, ParallelismValueError
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure

_PARTS = {"base_layer", "lora_A", "lora_B", "lora_dropout"}


def with_adapters(structure: Structure, styled: Mapping[str, Styled]) -> dict[str, Styled]:
    """The styles, with those of layers with adapters assigned to the layers' parts."""
    found: dict[str, Styled] = {}
    with Faults() as faults:
        for name, one in styled.items():
            layer = structure.modules[name]
            if "token_adapter" in layer._modules:
                if one.style != STYLES["replicate"]:
                    faults.append(
                        f"{name} has trainable tokens of peft, which cannot be cut with it. Leave it whole "
                        "with Rule(..., tp='replicate')."
                    )
                continue
            if "original_module" in layer._modules:  # peft's modules_to_save, trained copies
                copies = layer._modules.get("modules_to_save") or nn.ModuleDict()
                found[f"{name}.original_module"] = one
                found.update({f"{name}.modules_to_save.{key}": one for key in copies._modules})
                continue
            if base_of(layer) is layer:
                found.setdefault(name, one)
                continue
            if not isinstance(one.style, Style):
                found[f"{name}.base_layer"] = one
                faults.append(f"{name} has adapters, which torch's styles do not support.")
                continue
            odd = list(_others(layer, one.style))
            if odd:
                faults.append(
                    f"{name} has adapters whose {', '.join(odd)} cannot be cut with it; tensor parallelism "
                    "supports LoRA on matrices. Leave the module around it whole with "
                    "Rule(..., tp='replicate')."
                )
            found[f"{name}.base_layer"] = one
            found.update(dict(_lora(name, layer, one)))
    return found


def refuse_prefixes(structure: Structure, styled: Mapping[str, Styled]) -> None:
    """Refuse prefix tuning, which gives attention keys and values of all heads, if heads are divided."""
    modules = structure.modules
    cut = (name for name, one in styled.items() if getattr(one.style, "cut", True) is not None)
    around = {type(modules[above]).__name__ for name in cut for above in ancestors(name)}
    configs = (getattr(module, "peft_config", None) or {} for module in modules.values())
    prefixed = any(one.peft_type == "PREFIX_TUNING" for found in configs for one in found.values())
    if prefixed and any("attention" in kind.lower() for kind in around):
        raise ParallelismValueError(
            "Prefix tuning gives each layer keys and values of all heads, but tensor parallelism would "
            "divide the heads among the ranks. Use FSDP2 or DDP, or leave the attention whole with "
            "Rule(..., tp='replicate')."
        )


def _others(layer: nn.Module, style: Style) -> Iterator[str]:
    if style.cut is None:
        return
    if hasattr(layer, "parameter_name"):  # it adds to the matrix, not to the output
        yield "target_parameters"
    for key, child in layer._modules.items():
        if child is not None and key not in _PARTS and any(True for _ in child.parameters()):
            yield key
    if style.cut == "rows" or isinstance(base_of(layer), nn.Embedding):
        yield "embedding"
    for key in ("lora_A", "lora_B"):
        for inner in (layer._modules.get(key) or nn.ModuleDict()).children():
            if not isinstance(inner, nn.Linear):
                yield f"{key} ({type(inner).__name__})"


def _lora(name: str, layer: nn.Module, one: Styled) -> Iterator[tuple[str, Styled]]:
    style = one.style
    assert isinstance(style, Style)
    summed, whole = STYLES["sum_gradients"], STYLES["replicate"]
    if style.cut == "out":
        # A's output has a whole gradient only if B's input sums it.
        first, second = whole if style.before == "copy" else summed, style
    elif style.cut == "in":
        first, second = style, summed if style.after == "scatter_sequence" else whole
    else:
        first = second = style
    for key, part in (("lora_A", first), ("lora_B", second)):
        for adapter in layer._modules.get(key) or ():  # type: ignore[union-attr]
            yield f"{name}.{key}.{adapter}", Styled(part, f"it is an adapter of {name}, which is {one.label}")
