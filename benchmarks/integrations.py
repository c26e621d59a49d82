"""Seconds of a step in other trainers: with `parallelize_model`, and with what they bring themselves.

    python benchmarks/integrations.py --ranks 2 --rounds 5 --width 512

A Llama under AdamW on the same batches, as in `benchmarks/trainer.py`. "extra MiB" is the peak
memory of a rank from when the model is made; "first step s" the time from there to the end of the first step.

- Trainer: transformers' own, with `ComposerDistMixin`; under DDP; and on a model that transformers has
  sharded with FSDP2 while loading.
- Lightning: its Trainer, with `ComposerDistStrategy`; under DDP; and with `ModelParallelStrategy`, for which
  the module shards itself in `configure_model`.
- accelerate: a loop over `ComposerAccelerator`, and over `Accelerator` under DDP. Its FSDP is not for CPUs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import trainer
from llama import shard
from rounds import Figures, device, now, play, reduced
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from trainer import RATE, WARM, Batches, Train, dealt, samples, transformers_trainer

from composer_dist import DDPConfig, FSDP2Config
from composer_dist.distributed.account import peak, reset_peak


def measure(make: Callable[[], Train], arguments: argparse.Namespace) -> Figures:
    ends: list[float] = []

    def note(optimizer: Any, given: Any, named: Any) -> None:
        if not ends:
            ends.append(now())

    train = make()  # imports are not counted
    hook = register_optimizer_step_post_hook(note)
    reset_peak(device())
    before, start = peak(device()), now()
    figures = trainer.measure(lambda: train, arguments)
    hook.remove()
    extra = (peak(device()) - before) / 2**20
    return figures | reduced({"extra MiB": extra, "first step s": ends[0] - start})


def lightning(strategy: Callable[[], Any], sharding: bool = False) -> Train:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    clock: dict[str, float] = {}

    class Module(LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            if sharding:
                shard(self.model)

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            clock["loss"] = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    class Clock(Callback):
        def on_train_batch_end(self, engine: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if number == WARM - 1:
                dist.barrier()
                clock["start"] = now()
            if number == engine.max_steps - 1:
                clock["end"] = now()

    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        engine = LightningTrainer(
            accelerator=device().type,
            devices=dist.get_world_size(),
            strategy=strategy(),
            max_steps=len(batches),
            callbacks=[Clock()],
            use_distributed_sampler=False,  # these are the own batches of this rank
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(samples(batches), batch_size=len(batches[0]["labels"]))
        engine.fit(Module(model), loader)
        return clock["end"] - clock["start"], float(clock["loss"])

    return train


def accelerated(make: Callable[[], Any]) -> Train:
    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        accelerator = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        loader = DataLoader(samples(dealt(batches)), batch_size=len(batches[0]["labels"]), shuffle=False)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            return loss.detach()

        return trainer.steps(loader, step)

    return train


def our_strategy(parallelism: Any) -> Train:
    from composer_dist.integrations.lightning import ComposerDistStrategy

    return lightning(partial(ComposerDistStrategy, parallelism))


def model_parallel() -> Train:
    from lightning.pytorch.strategies import ModelParallelStrategy

    world = dist.get_world_size()
    strategy = partial(ModelParallelStrategy, data_parallel_size=world, tensor_parallel_size=1)
    return lightning(strategy, sharding=True)


def our_accelerator(parallelism: Any) -> Train:
    from composer_dist.integrations.accelerate import ComposerAccelerator

    return accelerated(partial(ComposerAccelerator, parallelism=parallelism, cpu=device().type == "cpu"))


def plain_accelerator() -> Train:
    from accelerate import Accelerator

    return accelerated(partial(Accelerator, cpu=device().type == "cpu"))


WAYS: dict[str, Callable[[], Train]] = {
    "Trainer, composer_dist FSDP2": partial(transformers_trainer, FSDP2Config()),
    "Trainer, its FSDP2": partial(transformers_trainer, own_fsdp=True),
    "Trainer, composer_dist DDP": partial(transformers_trainer, DDPConfig()),
    "Trainer, its DDP": transformers_trainer,
    "Lightning, composer_dist FSDP2": partial(our_strategy, FSDP2Config()),
    "Lightning, its FSDP2": model_parallel,
    "Lightning, composer_dist DDP": partial(our_strategy, DDPConfig()),
    "Lightning, its DDP": partial(lightning, lambda: "ddp"),
    "accelerate, composer_dist FSDP2": partial(our_accelerator, FSDP2Config()),
    "accelerate, composer_dist DDP": partial(our_accelerator, DDPConfig()),
    "accelerate, its DDP": plain_accelerator,
}
RATIOS = ("Trainer, its FSDP2", "Trainer, its DDP", "Lightning, its FSDP2", "Lightning, its DDP")

if __name__ == "__main__":
    contenders = {name: partial(measure, make) for name, make in WAYS.items()}
    play(contenders, (*RATIOS, "accelerate, its DDP"), trainer.options, ranks=(2,))
