"""Pairs of answers, and TRL's DPOTrainer to compare with."""

from pathlib import Path
from typing import Any

import torch

from tests.kit.huggingface import llama

PREFERENCES: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "chosen": " Paris.", "rejected": " a town, I think."},
    {"prompt": "One and one is", "chosen": " two.", "rejected": " three."},
    {"prompt": "Say hello:", "chosen": " Hello to you.", "rejected": " no"},
    {"prompt": "2 and 3?", "chosen": " 5", "rejected": " It is 6, or 7."},
]


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)


def train_a_little(model: Any) -> None:
    """Gives the adapter an effect."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)


def adapted(tokens: int, *, untrained: bool = False) -> Any:
    """A small model with LoRA, whose adapter has values."""
    from peft import get_peft_model

    torch.manual_seed(0)
    model = llama(vocab_size=tokens, max_position_embeddings=128)
    made: Any = get_peft_model(model, lora())
    if not untrained:
        train_a_little(made)
    return made


def of_trl(tokenizer: Any, rows: Any, folder: Path, **options: Any) -> Any:
    """A DPOTrainer on these rows, of a small model with a new adapter."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, **options)
    return DPOTrainer(
        model=llama(vocab_size=len(tokenizer), max_position_embeddings=128),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora(),
    )
