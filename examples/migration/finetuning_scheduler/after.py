"""The same two phases with composer_dist. Run it with python after.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_dist import ComposerClassifier, Trainer
from composer_dist.trainer import FineTuningPhases, InMemoryLogger, Phase

PHASES = [Phase("module.head", until="2ep"), Phase("module.body", lr=1e-3)]


def main() -> list[float]:
    """Train, and return the loss of each batch."""
    torch.manual_seed(7)
    inputs = torch.randn(64, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    module = nn.Sequential()
    module.add_module("body", nn.Linear(16, 16))
    module.add_module("head", nn.Linear(16, 4))
    model = ComposerClassifier(module, num_classes=4)
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=DataLoader(data, batch_size=8),
        max_duration="3ep",
        callbacks=FineTuningPhases(PHASES),
        loggers=logger,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return logger.values("loss/train/total")


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
