"""The peak of a step, for 12 architectures, three ways to recompute, two precisions, FSDP2 and DDP."""

import logging
import warnings
from typing import Any

import transformers

from composer_dist import DDPConfig, FSDP2Config, ParallelismConfig
from tests.kit.estimates import planned_and_real_peak
from tests.kit.world import run

SHAPE = (2, 64)
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, **_GROUPED}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": {**_GROUPED, "head_dim": 64},
    "Gemma2ForCausalLM": {**_GROUPED, "head_dim": 64},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "GPT2LMHeadModel": {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "GPTNeoXForCausalLM": {},
    "BloomForCausalLM": {"n_layer": 3, "n_head": 4},
    "OPTForCausalLM": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "MixtralForCausalLM": {**_EXPERTS, "num_local_experts": 4},
    "T5ForConditionalGeneration": {"d_model": 256, "d_ff": 512, "num_layers": 2, "d_kv": 64, "num_heads": 4},
    "BertForMaskedLM": {},
    "ModernBertForMaskedLM": {"pad_token_id": 0},
}
"""Classes of transformers, each with its sizes beside `_SIZES`."""
RECOMPUTED = {"none": None, "full": "composable", "selective": "selective"}
WAYS: dict[str, dict[str, Any]] = {
    "FSDP2": {"fsdp2": FSDP2Config(), "check_order": False},
    "DDP": {"ddp": DDPConfig()},
}
_HEAD = """## The peak of a step

The plan's peak divided by that of a real step of two ranks with AdamW, in which every allocation of torch on
the CPU counts, gloo's buffers included. Collectives end before the next operation begins; otherwise gloo's
thread frees its buffers at any time later. The goal is 0.95 to 1.05.
"""


def peaks() -> list[str]:
    """The section."""
    cases = [(precision, kept) for precision in (None, "amp_bf16") for kept in RECOMPUTED]
    columns = [f"{precision or 'fp32'}, {kept}" for precision, kept in cases]
    lines = [_HEAD, f"| model | way | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 2)]
    for name in MODELS:
        for way in WAYS:
            ratios = [run(_ratio, 2, name, way, *case, timeout=120)[0] for case in cases]
            lines.append(f"| {name} | {way} | {' | '.join(f'{one:.3f}' for one in ratios)} |")
    return lines


def _ratio(name: str, way: str, precision: str | None, kept: str) -> float:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    config = ParallelismConfig(activation_checkpointing=RECOMPUTED[kept], **WAYS[way])
    try:
        estimate, real = planned_and_real_peak(lambda: _build(name), SHAPE, config, precision)
    finally:
        logging.disable(logging.NOTSET)
    return estimate.peak / real


def _build(name: str) -> Any:
    cls = getattr(transformers, name)
    own_names = name in ("GPT2LMHeadModel", "T5ForConditionalGeneration")
    sizes = MODELS[name] if own_names else _SIZES | MODELS[name]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    return cls(cls.config_class(**{"vocab_size": 1000, "use_cache": False, **special, **sizes}))
