"""Fine-tune a causal language model with LoRA, on one process or many. Copy this file to start your own.

    torchrun --nproc-per-node 2 examples/finetune_lora.py [--model Qwen/Qwen2.5-0.5B] [--text notes.txt]

Without a model it tunes a small new one on Python's manual. The same command resumes an interrupted run.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
import typer
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from composer_dist import FSDP2Config, HuggingFaceModel, Trainer
from composer_dist.checkpoint import export_pretrained
from composer_dist.distributed import init_context, process_group
from composer_dist.trainer import CosineAnnealingWithWarmupScheduler, DistributedDataLoader, PackedDataset

SMALL = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
LORA = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def main(
    model: str = "", text: str = "", out: str = "runs/lora", steps: int = 100, context: int = 128
) -> None:
    process_group.init()
    tokenizer = AutoTokenizer.from_pretrained(model) if model else None
    documents = [Path(text).read_text()] if text else list(topics.values())
    tokens = [tokenizer(one).input_ids if tokenizer else list(one.encode()) for one in documents]
    if model and process_group.world_and_rank()[1] == 0:
        base = AutoModelForCausalLM.from_pretrained(model)  # the other ranks get their shards from rank 0
    else:
        with init_context():  # no memory: without rank 0's weights, each rank initializes its shards
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model) if model else SMALL)
    tuned = HuggingFaceModel(base, tokenizer, peft_config=LORA)
    samples = PackedDataset(tokens, context)
    trainer = Trainer(
        model=tuned,
        parallelism_config=FSDP2Config(activation_checkpointing=True),
        train_dataloader=DistributedDataLoader(samples, global_batch_size=8, shuffle=True),
        optimizers=torch.optim.AdamW([one for one in tuned.parameters() if one.requires_grad], lr=1e-3),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        max_duration=f"{steps}ba",
        gradient_clipping=1.0,
        seed=17,
        save_folder=f"{out}/checkpoints",
        save_interval="50ba",
        autoresume=True,
    )
    trainer.fit()
    export_pretrained(tuned, f"{out}/adapter")
    trainer.close()
    process_group.destroy()


if __name__ == "__main__":
    typer.run(main)
