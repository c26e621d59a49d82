"""Checks by a model's structure whether it can be split over the sequence.

`proof.py` checks the rest at the first training step.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from composer_dist import _torch
from composer_dist.distributed.feature_plan import FeaturePlan, Rank, StepEvent, Transfer, sent_along
from composer_dist.distributed.wishes import Request
from composer_dist.errors import Faults
from composer_dist.structure.families import class_name, transformers_models
from composer_dist.structure.structure import Structure
from composer_dist.wording import listed

_ACROSS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.RNNBase, nn.RNNCellBase), "is recurrent: each position needs the one before it"),
    ((_torch.AnyBatchNorm,), "normalizes over all positions"),
    ((nn.ZeroPad1d, nn.ZeroPad2d), "shifts positions"),
)
_ROPE_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class ContextPlan(FeaturePlan):
    """The plan of context parallelism."""

    size: int
    """The number of ranks that share a sequence."""

    def communication(self, rank: Rank) -> Callable[[StepEvent], Iterator[Transfer]]:
        return sent_along("cp")

    def explain(self, module: str) -> str:
        return "" if module else f"Sequences are split among {self.size} ranks, inside of context_parallel()."

    def notes(self) -> Iterator[str]:
        yield f"context parallel: sequences are split among {self.size} ranks"


def plan(structure: Structure, request: Request, sizes: Mapping[str, int]) -> ContextPlan | None:
    """Plan context parallelism; None for `cp=1`."""
    ranks = sizes["cp"]
    if ranks == 1:
        return None
    first = {name: module for name, module in structure.modules.items() if structure.first[name] == name}
    before = f"cp={ranks} splits the sequence, so only scaled-dot-product attention may mix positions: "
    with Faults(before, ". Or use cp=1.", "; ") as faults:
        faults += [*_configured(first[""]), *_built(first)]
    return ContextPlan(ranks)


def _configured(model: nn.Module) -> Iterator[str]:
    for base in transformers_models(model):
        if base.config.get_text_config() is not base.config:
            yield f"{class_name(base)} has parts with separate sequences; use only its text model"
            return
        yield from _configured_one(base)
    for module in model.modules():
        adapters = vars(module).get("peft_config") or vars(module).get("_peft_config") or {}
        for adapter, peft in adapters.items():
            if peft.is_prompt_learning:
                yield f"the adapter {adapter!r} ({type(peft).__name__}) prepends virtual tokens"


def _configured_one(base: Any) -> Iterator[str]:
    config, name = base.config, class_name(base)
    if getattr(config, "is_encoder_decoder", False):
        yield f"{name} has an encoder and a decoder with separate sequences"
    attention = config._attn_implementation
    if attention != "sdpa" and base._supports_sdpa:
        yield f"{name} uses {attention!r} attention; call model.set_attn_implementation('sdpa') first"
    elif attention != "sdpa":
        yield f"{name} has no scaled-dot-product attention in transformers"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        yield f"{name} has layers of type {', '.join(sorted(kinds))}, which are not full attention"
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        yield f"{name} has a sliding window ({config.sliding_window}); set config.sliding_window=None"
    if getattr(config, "attention_chunk_size", None) and not kinds:
        yield f"{name} attends in chunks (attention_chunk_size={config.attention_chunk_size})"
    if getattr(config, "output_router_logits", False):
        yield f"{name} adds a router loss, which is not a mean over tokens; set output_router_logits=False"


def _built(modules: dict[str, nn.Module]) -> Iterator[str]:
    found: dict[tuple[type[nn.Module], str], list[str]] = {}
    for name, module in modules.items():
        if why := _fault(module):
            found.setdefault((type(module), why), []).append(name or "the root")
    for (kind, why), names in found.items():
        yield f"{listed(names, 3)}: {kind.__name__} {why}"


def _fault(module: nn.Module) -> str:
    """Why a module needs other positions; empty if its type does not show that it does."""
    if isinstance(module, _torch.AnyConvolution) and any(size > 1 for size in module.kernel_size):
        return "convolves neighboring positions"
    if _is_own_attention(type(module)):
        return "computes its own softmax; let it call torch.nn.functional.scaled_dot_product_attention"
    if (rope := vars(module).get("rope_type")) in _ROPE_BY_LENGTH:
        return f"({rope!r} scaling) depends on the sequence's length, which no rank sees"
    return next((why for kinds, why in _ACROSS if isinstance(module, kinds)), "")


def _is_own_attention(kind: type[nn.Module]) -> bool:
    """Whether a class with "attention" in its name uses a softmax but not torch's attention."""
    if "attention" not in kind.__name__.lower() or kind.__module__.startswith(("torch.", "transformers.")):
        return False
    used: set[str] = set()
    for member in vars(kind).values():
        code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
        used |= set(code.co_names) if code else set()
    return any("softmax" in name for name in used) and "scaled_dot_product_attention" not in used
