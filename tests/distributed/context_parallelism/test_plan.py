"""`distributed.context_parallelism.plan`: what the plan refuses to split over the sequence, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from composer_dist import MeshConfig, ParallelismConfig
from composer_dist.distributed import plan_parallelism
from composer_dist.errors import ParallelismValueError
from composer_dist.models import HuggingFaceModel
from tests.kit import models
from tests.kit.huggingface import gpt2
from tests.kit.toy import built

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = SIZES | {"vocab_size": 32, "num_key_value_heads": 2}


def hf(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A builder of a tiny `<name>ForCausalLM` on meta."""

    def build() -> nn.Module:
        kind = "Gemma3Text" if name == "Gemma3" else name
        config = getattr(transformers, f"{kind}Config")(**TINY, **options)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return build


def eager() -> nn.Module:
    model: Any = hf("Llama")()
    model.set_attn_implementation("eager")
    return model


def t5() -> nn.Module:
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        )


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**TINY),
    )
    with torch.device("meta"):
        return transformers.LlavaForConditionalGeneration(config)


def prompted() -> nn.Module:
    from peft import PromptTuningConfig

    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return HuggingFaceModel(hf("Llama")(), peft_config=prompts)


def below(module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), module)


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (eager, r"LlamaForCausalLM uses 'eager' attention; call model.set_attn_implementation\('sdpa'\) first"),
    (hf("Mistral", sliding_window=8), r"has a sliding window \(8\); set config.sliding_window=None"),
    (hf("Gemma3", head_dim=8), "has layers of type sliding_attention, which are not full attention"),
    (hf("Qwen2", use_sliding_window=True, max_window_layers=1), "has layers of type sliding_attention"),
    (hf("Mamba", state_size=4), "MambaForCausalLM has no scaled-dot-product attention"),
    (hf("Qwen3Moe", output_router_logits=True), "adds a router loss, .*; set output_router_logits=False"),
    (t5, "T5ForConditionalGeneration has an encoder and a decoder with separate sequences"),
    (llava, "LlavaForConditionalGeneration has parts with separate sequences; use only its text model"),
    (prompted, r"the adapter 'default' \(PromptTuningConfig\) prepends virtual tokens"),
    (
        hf("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        r"model.rotary_emb: LlamaRotaryEmbedding \('dynamic' scaling\) depends on the sequence's length",
    ),
    (below(nn.LSTM(8, 8)), "1: LSTM is recurrent"),
    (below(nn.Conv1d(8, 8, 3)), "1: Conv1d convolves neighboring positions"),
    (below(nn.BatchNorm1d(8)), "1: BatchNorm1d normalizes over all positions"),
    (models.mamba, "layers.0.conv1d, layers.1.conv1d, layers.2.conv1d: Conv1d convolves"),
    (models.B, r"layers.2.attention: Attention computes its own softmax; let it call torch"),
]


def plan(model: nn.Module, cp: int) -> Any:
    return plan_parallelism(model, ParallelismConfig(mesh=MeshConfig(cp=cp)), world_size=4)


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_the_plan_refuses_what_mixes_positions_otherwise(
    build: Callable[[], nn.Module], message: str
) -> None:
    model = build()
    with pytest.raises(ParallelismValueError, match=f"cp=2 splits the sequence.*{message}"):
        plan(model, 2)
    assert plan(model, 1).mesh["cp"] == 1


def test_all_kinds_are_named() -> None:
    model = nn.Sequential(*(nn.LSTM(8, 8) for _ in range(5)), nn.GRU(8, 8))
    with pytest.raises(ParallelismValueError, match="0, 1, 2 and 2 more: LSTM is.*; 5: GRU is .* use cp=1."):
        plan(model, 2)


class Both(models.Attention):
    """Attention with a choice."""

    def forward(self, x: torch.Tensor, fused: bool = True) -> torch.Tensor:
        if not fused:
            return super().forward(x).softmax(-1)
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "build",
    [
        hf("Llama"),
        hf("Mistral", sliding_window=None),
        hf("Qwen2", sliding_window=8),
        hf("Qwen3Moe"),
        lambda: built(gpt2, device="meta"),
        below(nn.MultiheadAttention(8, 2)),
        below(nn.Conv1d(8, 8, 1)),
        lambda: models.B(block=Both),
    ],
)
def test_the_plan_takes_what_meets_in_attention_only(build: Callable[[], nn.Module]) -> None:
    found = plan(build(), 2)
    assert (found.mesh["dp_shard"], found.mesh["cp"]) == (2, 2)
