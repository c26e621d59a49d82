"""Seconds of a training step, against others training the same model on the same batches.

    python benchmarks/trainer.py --ranks 2 --rounds 5 --width 512
    python benchmarks/trainer.py --rounds 5 --units 250

A Llama under AdamW, in one dtype; with `--units` that many tiny blocks, to measure what is not
arithmetic. Each contender trains it in processes of its own, unless `--together` is given; the first three
steps, in which all allocate what they keep, are not timed. The last loss is shown in thousandths.

- loop: a loop by hand over FSDP2: forward, backward, step. A reference, not a rival.
- composer_dist, loop: the same loop over `parallelize_model`; "unchecked" has `check_order=False`; "guarded"
  runs in a `HangGuard` with a limit of 60 s, and shows what its thread and process take of one processor.
- Lightning Fabric: its `ModelParallelStrategy` over the same `fully_shard`.
- Composer: its own Trainer with its FSDP2.
- loop, DDP: a loop by hand over DistributedDataParallel. A reference for the next one.
- transformers: its `Trainer` by way of accelerate, which on CPU replicates by DDP (its FSDP plugin is dropped
  there); compared with ours under `DDPConfig`.
"""

import argparse
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from llama import shard
from rounds import Figures, device, now, play, reduced
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import FSDP2Config, HuggingFaceModel, ParallelismConfig, Trainer
from composer_dist.distributed import HangGuard, parallelize_model

WARM = 3
"""Steps before the clock starts."""
RATE = 1e-3
Batches = list[dict[str, torch.Tensor]]
Train = Callable[[nn.Module, Batches], tuple[float, float]]
"""Seconds of the timed steps, and the last loss of this rank."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank's batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--units", type=int, default=0, help="tiny blocks instead of a Llama")


def measure(make: Callable[[], Train], arguments: argparse.Namespace) -> Figures:
    train = make()
    if arguments.units:
        arguments.layers, arguments.width, arguments.batch, arguments.length = arguments.units, 32, 1, 16
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        vocab_size=4096,
        use_cache=False,
    )
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (WARM + arguments.steps, arguments.batch, arguments.length)
    tokens = torch.randint(4096, shape, generator=generator)
    if device().type != "cpu":
        tokens = tokens.pin_memory()
    model = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype))
    seconds, loss = train(model, [{"input_ids": row, "labels": row} for row in tokens])
    mean = torch.tensor(loss / dist.get_world_size())
    dist.all_reduce(mean)
    return reduced({"seconds": seconds / arguments.steps}) | {"thousandths of loss": mean.item() * 1000}


def steps(batches: Batches, step: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> tuple[float, float]:
    """Run all steps; the clock starts after the first few."""
    for number, batch in enumerate(batches):
        if number == WARM:
            dist.barrier()
            start = now()
        loss = step(batch)
    return now() - start, loss.item()


def samples(batches: Batches) -> Batches:
    return [{name: row[n] for name, row in b.items()} for b in batches for n in range(len(b["labels"]))]


def here(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch on this rank's device."""
    return {name: value.to(device(), non_blocking=True) for name, value in batch.items()}


def dealt(own: Batches) -> Batches:
    """This rank's samples or batches in places where a sampler that deals in turn gives them back."""
    return [one for one in own for _ in range(dist.get_world_size())]


def by_hand(prepare: Callable[[nn.Module], nn.Module]) -> Train:
    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        model = prepare(model.to(device()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(**here(batch)).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return steps(batches, step)

    return train


def prepared(**options: Any) -> Train:
    config = ParallelismConfig(fsdp2=FSDP2Config(), **options)
    return by_hand(lambda model: parallelize_model(model, config).model)


def guarded(arguments: argparse.Namespace) -> Figures:
    start = time.perf_counter()
    with HangGuard(timeout=60):
        thread = next(one for one in threading.enumerate() if one.name == "composer_dist-hang-guard")
        figures = measure(prepared, arguments)
        tasks = [thread.native_id, *(child.pid for child in psutil.Process().children())]
        used = sum(int(Path(f"/proc/{task}/schedstat").read_text().split()[0]) for task in tasks) / 1e9
        share = 100 * used / (time.perf_counter() - start)
    return figures | reduced({"guard, %": share})


def ours(strategy: str) -> Train:
    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        trainer = Trainer(
            model=HuggingFaceModel(model),
            optimizers=torch.optim.AdamW(model.parameters(), lr=RATE),
            parallelism_config=strategy,
            train_dataloader=batches,
            check_sampler=False,
            progress_bar=False,
        )
        trainer.fit(duration=f"{WARM}ba")
        dist.barrier()
        start = now()
        trainer.fit(duration=f"{len(batches) - WARM}ba")
        seconds, loss = now() - start, float(trainer.state.loss)
        trainer.close()
        return seconds, loss

    return train


def fabric() -> Train:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        world = dist.get_world_size()
        strategy = ModelParallelStrategy(
            lambda model, mesh: shard(model), data_parallel_size=world, tensor_parallel_size=1
        )
        engine = Fabric(accelerator=device().type, devices=world, strategy=strategy)
        engine.launch()
        model = engine.setup(model)
        optimizer = engine.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=RATE))

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(**here(batch)).loss
            engine.backward(loss)
            optimizer.step()
            return loss.detach()

        return steps(batches, step)

    return train


def composer() -> Train:
    import composer
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig

    class Model(composer.ComposerModel):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            blocks = {*model.model.layers, model}
            self.fsdp_wrap_fn = lambda module: module in blocks

        def forward(self, batch: dict[str, torch.Tensor]) -> Any:
            return self.model(**batch)

        def loss(self, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return outputs.loss

    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        wrapped, all_ = Model(model), dealt(samples(batches))
        sampler = DistributedSampler(all_, shuffle=False)
        loader = DataLoader(all_, batch_size=len(batches[0]["labels"]), sampler=sampler)
        trainer = composer.Trainer(
            model=wrapped,
            optimizers=torch.optim.AdamW(wrapped.parameters(), lr=RATE),
            train_dataloader=loader,
            max_duration=f"{WARM}ba",
            parallelism_config=ParallelismConfig(fsdp2=FSDP2Config()),
            precision="fp32",
            device="gpu" if device().type == "cuda" else "cpu",
            progress_bar=False,
        )
        trainer.fit()
        dist.barrier()
        start = now()
        trainer.fit(duration=f"{len(batches) - WARM}ba")
        return now() - start, float(trainer.state.loss)

    return train


def transformers_trainer(parallelism: Any = None, own_fsdp: bool = False) -> Train:
    """Its Trainer: under DDP, with the mixin under `parallelism`, or on a model that transformers shards."""
    import tempfile

    import transformers
    from transformers.distributed import DistributedConfig

    from composer_dist.integrations.transformers import ComposerDistMixin

    mixed = {"parallelism": parallelism} if parallelism is not None else {}
    bases = (ComposerDistMixin, transformers.Trainer) if mixed else (transformers.Trainer,)
    clock: dict[str, Any] = {}

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == WARM:
                dist.barrier()
                clock["start"] = now()
            if state.global_step == state.max_steps:
                clock["end"] = now()

    class Last(*bases):
        def compute_loss(self, *inputs: Any, **options: Any) -> Any:
            clock["loss"] = super().compute_loss(*inputs, **options)
            return clock["loss"]

    def train(model: nn.Module, batches: Batches) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            settings = transformers.TrainingArguments(
                output_dir=folder,
                use_cpu=device().type == "cpu",
                per_device_train_batch_size=len(batches[0]["labels"]),
                max_steps=len(batches),
                learning_rate=RATE,
                weight_decay=0.01,
                optim="adamw_torch",
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                train_sampling_strategy="sequential",
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            if own_fsdp:
                shared = [folder]
                dist.broadcast_object_list(shared)
                model.save_pretrained(shared[0])
                dist.barrier()
                sharded = DistributedConfig(fsdp_size=dist.get_world_size())
                model = type(model).from_pretrained(shared[0], distributed_config=sharded)
            data = samples(dealt(batches))
            Last(model, settings, train_dataset=data, callbacks=[Clock()], **mixed).train()
        return clock["end"] - clock["start"], clock["loss"].item()

    return train


WAYS: dict[str, Callable[[], Train]] = {
    "composer_dist, fsdp": partial(ours, "fsdp"),
    "loop": lambda: by_hand(shard),
    "composer_dist, loop": prepared,
    "composer_dist, loop, unchecked": partial(prepared, check_order=False),
    "Lightning Fabric": fabric,
    "Composer": composer,
    "composer_dist, ddp": partial(ours, "ddp"),
    "loop, DDP": lambda: by_hand(DistributedDataParallel),
    "transformers, DDP": transformers_trainer,
}

if __name__ == "__main__":
    contenders = {name: partial(measure, make) for name, make in WAYS.items()}
    contenders["composer_dist, loop, guarded"] = guarded
    play(contenders, ("loop", "loop, DDP"), options, ranks=(2,))
