"""What the tests of fine-tuning phases train, and the same training written by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from composer_dist.models import ComposerClassifier
from composer_dist.trainer import Callback, FineTuningPhases, InMemoryLogger, Phase, Trainer
from tests.kit.compare import weights
from tests.kit.training import quiet
from tests.kit.world import World

BATCHES = 8
PER_BATCH = 4
HEAD, DOWN, UP = ("module.head.weight", "module.head.bias"), ("module.down.weight",), ("module.up.weight",)
PHASES = (Phase("module.head", lr=0.05, until="3ba"), Phase("re:.*down", lr=0.02, until="2ba"), Phase("rest"))
BY_HAND = ((HEAD, 0.05, 3), (DOWN, 0.02, 2), (UP, 0.05, 3))
"""The same: parameters, learning rate, batches."""

FSDP: Any = {"fsdp2": {}}
DDP: Any = {"ddp": {}}
TP: Any = {"mesh": {"tp": 2}, "tp": {"plan": {"module.up": "colwise", "module.down": "rowwise"}}}


class Net(nn.Module):
    """Points `(batch, 8)` to logits `(batch, 4)`."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.down(torch.tanh(self.up(points)))))) * 2


def net(norm: bool = False) -> ComposerClassifier:
    torch.manual_seed(0)
    return ComposerClassifier(Net(norm), num_classes=4)


def data(part: int = 0, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Part `part` of each batch."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(BATCHES, PER_BATCH, 8, generator=generator)
    return [(x.chunk(parts)[part], x.chunk(parts)[part][:, :4].argmax(1)) for x in points]


def mine(config: Any) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of the data."""
    if not dist.is_initialized() or config is None or "tp" in config:
        return data()
    return data(dist.get_rank(), dist.get_world_size())


def adamw(model: nn.Module, lr: float = 0.05, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=lr, weight_decay=0.1, **options)


class Recorder(Callback):
    """The weights and the learning rates after each batch, and the weights before it."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []
        self.before: list[dict[str, Tensor]] = []
        self.sharded = False

    def before_train_batch(self, state: Any, logger: Any) -> None:
        self.before.append(weights(state.model))
        self.sharded = any(isinstance(parameter, DTensor) for parameter in state.model.parameters())

    def batch_end(self, state: Any, logger: Any) -> None:
        self.weights.append(weights(state.model))
        self.rates.append([float(g["lr"]) for o in state.optimizers for g in o.param_groups])

    def moved(self, batch: int) -> set[str]:
        """The parameters that batch number `batch` changed, by any bit."""
        before = self.weights[batch - 1] if batch else weights(net())
        return {name for name in before if not torch.equal(before[name], self.weights[batch][name])}


def phased(
    phases: FineTuningPhases | Sequence[Phase] = PHASES,
    config: Any = None,
    model: ComposerClassifier | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> tuple[Trainer, FineTuningPhases, Recorder, InMemoryLogger]:
    """A Trainer over one epoch."""
    model = net() if model is None else model
    phases = phases if isinstance(phases, FineTuningPhases) else FineTuningPhases(phases)
    recorder = Recorder()
    options = {"optimizers": adamw, "max_duration": "1ep", "device": "cpu"} | options
    if "train_dataloader" not in options:
        options["train_dataloader"] = mine(config)
    callbacks = [*callbacks, phases, recorder]
    trainer, log = quiet(model, parallelism_config=config, callbacks=callbacks, **options)
    return trainer, phases, recorder, log


def recorded(*args: Any, **options: Any) -> Recorder:
    """What `phased` records in its fit."""
    trainer, _, recorder, _ = phased(*args, **options)
    trainer.fit()
    trainer.close()
    return recorder


def everywhere(world2: World, config: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What `fn(*args, config=config)` gives on two ranks, or in this process without a configuration."""
    if config is None:
        return [fn(*args, config=None, **options)]
    return world2(fn, *args, config=config, **options)


def by_hand(
    schedule: Sequence[tuple[Sequence[str], float, int]] = BY_HAND, skipped: Sequence[int] = ()
) -> list[dict[str, Tensor]]:
    """The weights after each batch, but for some, of a plain loop on one process, whole batches."""
    batches = iter([batch for index, batch in enumerate(data()) if index not in skipped])
    model, optimizer, history = net(), None, []
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for names, lr, count in schedule:
        group = {"params": [parameters[name].requires_grad_() for name in names], "lr": lr}
        if optimizer is None:
            optimizer = AdamW([group], weight_decay=0.1)
        else:
            optimizer.add_param_group(group)
        for _ in range(count):
            points, labels = next(batches)
            cross_entropy(model((points, labels)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(weights(model))
    return history
