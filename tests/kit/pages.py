"""What a page of the documentation leaves to its reader: a model, its optimizer, rows and batches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from composer_dist import HuggingFaceModel
from tests.kit.huggingface import llama


def model() -> Any:
    """A Llama of two layers, 50 tokens and 32 positions."""
    torch.manual_seed(0)
    return llama()


def composer_model() -> HuggingFaceModel:
    """The same for the Trainer."""
    return HuggingFaceModel(model())


def adamw(model: Any) -> torch.optim.AdamW:
    """An optimizer of what is trainable."""
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)


def rows(count: int = 4, length: int = 8) -> list[dict[str, Tensor]]:
    """Rows of tokens with labels."""
    tokens = torch.randint(0, 50, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def loader(count: int = 4) -> DataLoader[Any]:
    """Batches of two of these rows."""
    return DataLoader(rows(count), batch_size=2)
