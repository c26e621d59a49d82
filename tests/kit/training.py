"""The models and the data that the Trainer's tests train."""

import io
from collections.abc import Callable, Iterable, Sequence
from inspect import isfunction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from composer_dist import _torch
from composer_dist.models import ComposerClassifier, ComposerModel, HuggingFaceModel
from composer_dist.trainer import (
    Callback,
    DistributedDataLoader,
    Event,
    InMemoryLogger,
    Logger,
    State,
    Trainer,
)
from tests.kit.compare import close, weights
from tests.kit.huggingface import llama

recovers = pytest.mark.skipif(not _torch.forgets_iterations, reason="FSDP2 ends no step before torch 2.13")
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
        return self.head(hidden) * 2  # a view as the output would make FSDP2 warn


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
    return default_collate(list(samples))


def batches(parts: Sequence[int], index: int) -> list[Any]:
    """Part `index` of each batch, where `parts` are the parts' sizes."""
    samples = tagged(BATCHES * sum(parts))
    starts = range(sum(parts[:index]), len(samples), sum(parts))
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


def quiet(model: ComposerModel | None = None, **options: Any) -> tuple[Trainer, InMemoryLogger]:
    """A Trainer, of the classifier by default, that shows nothing and logs into memory.

    `optimizers` may be a function of the model, and `schedulers` one of the optimizer.
    """
    model = classifier() if model is None else model
    log = InMemoryLogger()
    options = {"optimizers": sgd, "progress_bar": False, "loggers": log} | options
    if callable(options["optimizers"]):
        options["optimizers"] = options["optimizers"](model)
    if isfunction(schedulers := options.get("schedulers")):
        options["schedulers"] = schedulers(options["optimizers"])
    return Trainer(model=model, **options), log


def fitted(model: ComposerModel | None = None, **options: Any) -> tuple[Trainer, InMemoryLogger]:
    """A quiet Trainer after a fit, by default over one epoch of `loader()`."""
    trainer, log = quiet(model, **{"train_dataloader": loader(), "max_duration": "1ep"} | options)
    trainer.fit()
    return trainer, log


def my_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def on_parts(
    parts: list[int], config: Any = None, model: ComposerModel | None = None, **options: Any
) -> tuple[Trainer, InMemoryLogger]:
    """A quiet Trainer, of the tagger by default, over one epoch of this rank's parts of the batches."""
    options = {"max_duration": "1ep", "device": "cpu", "parallelism_config": config} | options
    if "train_dataloader" not in options:
        options["train_dataloader"] = batches(parts, my_rank())
    return quiet(tagger() if model is None else model, **options)


def fitted_on_parts(*args: Any, **options: Any) -> tuple[Trainer, InMemoryLogger]:
    """`on_parts`, after its fit."""
    trainer, log = on_parts(*args, **options)
    trainer.fit()
    return trainer, log


Result = tuple[list[float], dict[str, Tensor]]
"""The losses and the final weights of a run."""


def result_of(trainer: Trainer, log: InMemoryLogger) -> Result:
    return log.values("loss/train/total"), weights(trainer.state.model)


def same_training(found: Result, expected: Result) -> None:
    """Equal to rounding."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    close(found[1], expected[1])


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.5, momentum=0.9)


class At(Callback):
    """Calls functions of the state at events: `At(batch_end=lambda state: ...)`."""

    def __init__(self, **functions: Callable[[State], Any]) -> None:
        self.functions = functions

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event.value in self.functions:
            self.functions[event.value](state)


def seen_at(event: str, read: Callable[[State], Any]) -> tuple[list[Any], At]:
    """A list of what `read` gives of the state at each `event`, and the callback that fills it."""
    found: list[Any] = []
    return found, At(**{event: lambda state: found.append(read(state))})


def raising(error: BaseException, batch: int | None = None) -> Callable[[State], None]:
    """Raises `error`, at one batch or at all."""

    def fail(state: State) -> None:
        if batch in (None, state.timestamp.batch):
            raise error

    return fail


def short_of_memory(model: nn.Module, place: str, fits: int) -> None:
    """From now on more than `fits` samples are too many at a place such as "body.head backward"."""

    def refuse(tensor: Tensor) -> None:
        if len(tensor) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (injected)")

    name, _, when = place.partition(" ")
    module = model.get_submodule(name)
    if when == "forward":
        module.register_forward_pre_hook(lambda module, args: refuse(args[0]))
    else:
        module.register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)


class Scores(Callback):
    """Logs the values that it is given, one at each evaluation."""

    def __init__(self, *values: float, name: str = "metrics/eval/score") -> None:
        self.values, self.name = list(values), name

    def eval_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics({self.name: self.values.pop(0)})


class Table(Callback):
    """Logs a table of one row at the end of each epoch."""

    def __init__(self, prompt: str, text: str) -> None:
        self.row = [prompt, text]

    def epoch_end(self, state: State, logger: Logger) -> None:
        logger.log_table("generations", ["prompt", "text"], [self.row])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Moves on by `step` seconds at each look, and whenever a test moves it."""

    def __init__(self, now: float = 0.0, step: float = 0.0) -> None:
        self.now, self.step = now, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


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


def on_sentences(
    parts: list[int], config: Any = None, peers: int = 1, **options: Any
) -> tuple[Trainer, InMemoryLogger]:
    """A language model after an epoch of this rank's sentences; `peers` ranks in a row have the same."""
    rank, batch = my_rank() // peers, sentences(sum(parts))
    rows = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
    data = [{key: value[rows] for key, value in batch.items()}] * 3
    return fitted_on_parts([], config, language_model(), **{"train_dataloader": data} | options)
