"""Fine-tune a causal language model with LoRA, on one process or many. Copy this file to start your own.

    torchrun --nproc-per-node 2 examples/finetune_lora.py
    torchrun --nproc-per-node 8 examples/finetune_lora.py --model Qwen/Qwen2.5-0.5B --text notes.txt

Without a model it trains the adapter of a small new one, on Python's manual, so nothing is downloaded.
Run it again, and it continues where it was interrupted.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from composer_dist import FSDP2Config, HuggingFaceModel, Trainer
from composer_dist.checkpoint import export_pretrained
from composer_dist.distributed import init_context, process_group
from composer_dist.trainer import CosineAnnealingWithWarmupScheduler, DistributedDataLoader, PackedDataset

SMALL = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
LORA = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def main(name: str | None, text: Path | None, out: Path, steps: int, context: int) -> None:
    process_group.init()
    tokenizer = AutoTokenizer.from_pretrained(name) if name else None
    documents = [text.read_text()] if text else list(topics.values())
    tokens = [tokenizer(one).input_ids if tokenizer else list(one.encode()) for one in documents]

    if name and process_group.world_and_rank()[1] == 0:
        base = AutoModelForCausalLM.from_pretrained(name)  # the other ranks get their shards from rank 0
    else:
        with init_context():  # no memory: without rank 0's weights, each rank initializes its shards
            config = AutoConfig.from_pretrained(name) if name else SMALL
            base = AutoModelForCausalLM.from_config(config)
    model = HuggingFaceModel(base, tokenizer, peft_config=LORA)
    trainer = Trainer(
        model=model,
        parallelism_config=FSDP2Config(activation_checkpointing=True),
        train_dataloader=DistributedDataLoader(
            PackedDataset(tokens, context), global_batch_size=8, shuffle=True
        ),
        optimizers=torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        max_duration=f"{steps}ba",
        gradient_clipping=1.0,
        seed=17,
        save_folder=out / "checkpoints",
        save_interval="50ba",
        autoresume=True,
    )
    trainer.fit()
    export_pretrained(model, out / "adapter")
    trainer.close()
    process_group.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a directory, or a name of the hub")
    parser.add_argument("--text", type=Path, help="what to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="where to write")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=128, help="tokens in a sample")
    given = parser.parse_args()
    main(given.model, given.text, given.out, given.steps, given.context)
