"""transformers' Trainer with composer_dist. Run it with torchrun --nproc-per-node 2 after.py."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.integrations.transformers import ComposerDistMixin

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


class ShardedTrainer(ComposerDistMixin, Trainer):
    """transformers' Trainer, which prepares models with composer_dist."""


def main() -> list[float]:
    """Train, and return the loss of each step, over all ranks."""
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(7)
    tokens = torch.randint(0, 64, (32, 16))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    config = ParallelismConfig(fsdp2=FSDP2Config(), activation_checkpointing="composable")
    trainer = ShardedTrainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=rows, parallelism=config)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
