"""The models and the data that the Trainer's tests train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from composer_dist.models import ComposerClassifier, ComposerModel, HuggingFaceModel
from composer_dist.trainer import DistributedDataLoader, InMemoryLogger, Trainer
from tests.kit.huggingface import llama

IGNORED = -100
BATCHES = 4
PER_BATCH = 6


class Body(nn.Module):
    """Tokens `(batch, length)` to logits `(batch, length, 4)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden) * 2  # a view as the output would make FSDP2 warn
        return logits


class Tagger(ComposerModel):
    """Tokens to tags; the loss is a mean over the tokens whose label is not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, batch: Any) -> Any:
        return self.body(batch["input_ids"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def loss_weight(self, batch: Any) -> float:
        return float((batch["labels"] != IGNORED).sum())


def tagger(seed: int = 0) -> Tagger:
    torch.manual_seed(seed)
    return Tagger()


def tagged(samples: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Sentences of 5 tokens with very different numbers of labels, from none to all."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, (samples, 5), generator=generator)
    labels = (ids * 7 // 3) % 4
    labels[torch.arange(5) >= (torch.arange(samples) * 2 % 6)[:, None]] = IGNORED
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(samples)]


def joined(samples: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Samples as a batch."""
    rows = list(samples)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def batches(parts: list[int], index: int) -> list[Any]:
    """Part `index` of each batch, where `parts` are the parts' sizes."""
    samples = tagged(BATCHES * PER_BATCH)
    first = sum(parts[:index])
    starts = [batch * PER_BATCH + first for batch in range(BATCHES)]
    return [joined(samples[start : start + parts[index]]) for start in starts]


def classifier(seed: int = 0, **options: Any) -> ComposerClassifier:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return ComposerClassifier(module, num_classes=4, **options)


def points(samples: int = 12, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def loader(samples: int = 12, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(points(samples), batch_size=batch_size)


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    return SGD(model.parameters(), lr=lr)


def quiet(model: ComposerModel, **options: Any) -> tuple[Trainer, InMemoryLogger]:
    """A Trainer that shows nothing and logs into memory."""
    log = InMemoryLogger()
    options = {"optimizers": sgd(model), "progress_bar": False, "loggers": log} | options
    return Trainer(model=model, **options), log


def loaders(replicas: int, dataset: Any = None, batch_size: int | None = 3, **options: Any) -> list[Any]:
    data = list(range(23)) if dataset is None else dataset
    one = DistributedDataLoader(data, batch_size, **options)
    return [one.placed(replicas, rank) for rank in range(replicas)]


def language_model() -> HuggingFaceModel:
    """A Llama of 50 tokens, the same each time."""
    torch.manual_seed(0)
    return HuggingFaceModel(llama())


def sentences(count: int) -> dict[str, Tensor]:
    """Token ids `(count, 8)` of which the first few, more for each sentence, bear no label."""
    ids = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[torch.arange(8) < (torch.arange(count) * 3 % 8)[:, None]] = IGNORED
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
