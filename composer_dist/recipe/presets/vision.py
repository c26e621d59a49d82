"""The module and the data of vision.yaml; change both as you like."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset


class Net(nn.Module):
    """Two convolutions and a linear layer: images `(samples, 1, 8, 8)` to logits `(samples, 10)`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.layers(images)
        return logits


def digits() -> tuple[Subset[Any], Subset[Any]]:
    """1,797 images of handwritten digits, which come with scikit-learn; every fifth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(found.target))
    held = range(0, len(whole), 5)
    return Subset(whole, sorted(set(range(len(whole))) - set(held))), Subset(whole, held)
