"""Fine-tune with Lightning's Trainer, on one process or many: a small Llama, sharded over the ranks.

    torchrun --nproc-per-node 2 examples/finetune_lightning.py --out runs/lightning

Needs `pip install 'composer_dist[lightning]'`. The model starts from nothing and reads bytes, so there is
nothing to download. The same command resumes an interrupted run.
"""

import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning
import torch
import typer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist.checkpoint import export_pretrained
from composer_dist.integrations.lightning import ComposerDistStrategy

LENGTH = 128
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Module(lightning.LightningModule):
    """A Llama that learns the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, as without any strategy."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def samples() -> list[dict[str, torch.Tensor]]:
    """Windows of the bytes of Python's own help texts."""
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    return [{"input_ids": window, "labels": window} for window in text.split(LENGTH)[:256]]


def main(out: Path = Path("runs/lightning"), epochs: int = 2) -> None:
    """Train, and write a directory for transformers to `out/model`."""
    lightning.seed_everything(0)  # every rank builds the same weights
    module = Module()
    trainer = lightning.Trainer(
        strategy=ComposerDistStrategy("fsdp"),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(out / "checkpoints", save_last=True)],
        logger=False,
    )
    last = out / "checkpoints" / "last.ckpt"
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    export_pretrained(module.model, out / "model")


if __name__ == "__main__":
    typer.run(main)
