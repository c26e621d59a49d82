"""The peak of a step on a GPU, as plans say and as torch's allocator counts it."""

import logging
import warnings
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import DDPConfig, FSDP2Config, ParallelismConfig
from composer_dist.distributed import process_group
from tests.kit.estimates import planned_and_allocated

SHAPE = (8, 1024)
_BLOCKS = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
FSDP2, OFFLOADED = FSDP2Config(), FSDP2Config(cpu_offload=True)
CASES: dict[str, dict[str, Any]] = {
    "FSDP2, float32": {"fsdp2": FSDP2},
    "FSDP2, bf16": {"fsdp2": FSDP2},
    "FSDP2, bf16, selective": {"fsdp2": FSDP2, "activation_checkpointing": "selective"},
    "FSDP2, bf16, every block": {"fsdp2": FSDP2, "activation_checkpointing": "composable"},
    "FSDP2, bf16, activations offloaded": {"fsdp2": FSDP2, "activation_checkpointing": "offload"},
    "FSDP2, bf16, parameters offloaded": {"fsdp2": OFFLOADED},
    "FSDP2, bf16, LoRA": {"fsdp2": FSDP2},
    "DDP, bf16": {"ddp": DDPConfig()},
    "DDP, bf16, every block": {"ddp": DDPConfig(), "activation_checkpointing": "composable"},
    "one process, bf16": {},
}
_HEAD = """## The peak of a step on a GPU

One rank on one {}, torch {}, NCCL. A Llama of 0.7 B parameters takes steps of {} x {} tokens under AdamW.
Peak and reserved memory are those of torch's caching allocator. The goal is 0.95 to 1.05.
"""


def gpus() -> list[str]:
    """The section."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    version = torch.__version__.split("+")[0]
    lines = [_HEAD.format(torch.cuda.get_device_name(), version, *SHAPE)]
    lines += ["| | peak, GiB | planned x | reserved, GiB | planned x |", "|" + "---|" * 5]
    for name, options in CASES.items():
        precision = "amp_bf16" if "bf16" in name else None
        build, config = partial(_build, "LoRA" in name), ParallelismConfig(**options)
        process_group.init(device="cuda")
        estimate, peak, reserved = planned_and_allocated(build, SHAPE, config, precision)
        process_group.destroy()
        ratios = estimate.peak / peak, estimate.reserved / reserved
        shown = f"{peak / 2**30:.2f} | {ratios[0]:.3f} | {reserved / 2**30:.2f} | {ratios[1]:.3f}"
        lines.append(f"| {name} | {shown} |")
    return lines


def _build(lora: bool) -> Any:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, use_cache=False, **_BLOCKS, **_HEADS))
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")) if lora else model
