"""Fine-tune in a loop of accelerate, on one process or many: a small Llama, sharded over the ranks.

    torchrun --nproc-per-node 2 examples/finetune_accelerate.py --out runs/accelerate

Needs `pip install 'composer_dist[accelerate]'`. The model starts from nothing and reads bytes, so there is
nothing to download. The same command resumes an interrupted run.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
import typer
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist.checkpoint import export_pretrained
from composer_dist.integrations.accelerate import ComposerAccelerator

LENGTH = 128
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def samples() -> list[dict[str, torch.Tensor]]:
    """Windows of the bytes of Python's own help texts."""
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    return [{"input_ids": window, "labels": window} for window in text.split(LENGTH)[:256]]


def main(out: Path = Path("runs/accelerate"), epochs: int = 2) -> None:
    """Train, and write a directory for transformers to `out/model`."""
    set_seed(0)  # every rank builds the same weights
    accelerator = ComposerAccelerator("fsdp", gradient_accumulation_steps=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = max((int(path.name.split("-")[1]) for path in out.glob("epoch-*")), default=0)
    if done:
        accelerator.load_state(str(out / f"epoch-{done}"))
    for epoch in range(done, epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean'):.3f}")
        accelerator.save_state(str(out / f"epoch-{epoch + 1}"))
    export_pretrained(model, out / "model")
    accelerator.end_training()


if __name__ == "__main__":
    typer.run(main)
