"""Fine-tune with TRL's SFTTrainer, on one process or many: LoRA on a small Llama, sharded over the ranks.

    torchrun --nproc-per-node 2 examples/finetune_trl.py --out runs/trl

Needs `pip install 'composer_dist[trl]'`. The model starts from nothing and reads bytes, so there is nothing
to download. The same command resumes an interrupted run.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from composer_dist import FSDP2Config
from composer_dist.integrations.transformers import ComposerDistMixin

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class SFT(ComposerDistMixin, SFTTrainer):
    """TRL's trainer on a model that `parallelize_model` shards."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(["<pad>", "</s>", *letters])}
    tokens = Tokenizer(models.BPE(words, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>")


def main(out: Path = Path("runs/trl"), steps: int = 20) -> None:
    """Train, and write the adapter to `out`."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **SIZES))
    texts = [{"text": topics[name]} for name in sorted(topics)]
    trainer = SFT(
        model=model,
        args=SFTConfig(
            output_dir=str(out),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_length=128,
            learning_rate=1e-3,
            save_steps=5,
            logging_steps=5,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
        parallelism=FSDP2Config(),
    )
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*/trainer_state.json")) or None)
    trainer.save_model()


if __name__ == "__main__":
    typer.run(main)
