"""A head first, then its body, with the Fine-Tuning Scheduler. Run it with python before.py."""

import tempfile
from typing import Any

import lightning
import torch
from finetuning_scheduler import FinetuningScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCHEDULE = {
    0: {"params": ["model.head.*"], "max_transition_epoch": 2},
    1: {"params": ["model.body.*"], "max_transition_epoch": 3, "lr": 1e-3},
}


class Module(lightning.LightningModule):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential()
        self.model.add_module("body", nn.Linear(16, 16))
        self.model.add_module("head", nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Of all parameters that are trainable, which the scheduler changes."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def main() -> list[float]:
    """Train, and return the loss of each batch."""
    lightning.seed_everything(7, verbose=False)
    inputs = torch.randn(64, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    module = Module()
    scheduler = FinetuningScheduler(ft_schedule=SCHEDULE, epoch_transitions_only=True, restore_best=False)
    trainer = lightning.Trainer(
        max_epochs=3,
        callbacks=[scheduler],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module.losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
