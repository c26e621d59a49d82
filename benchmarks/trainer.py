"""Tokens per second of the Trainer, against others training the same model on the same batches, in one run.

    python benchmarks/trainer.py --ranks 2 --rounds 3 --json trainer.json

launches itself by torchrun; under torchrun it runs as it is.

A Llama under AdamW, in float32; contenders take turns within each round, each with a model of its own; timed
are the steps after the first few. The loss of the last step is compared between contenders. Medians are
shown.

- loop: a loop by hand over FSDP2: forward, backward, step. A reference, not a rival.
- Lightning Fabric: its `ModelParallelStrategy` over the same `fully_shard`; where it is installed.
- loop, DDP: a loop by hand over DistributedDataParallel. A reference for the next one.
- transformers: its `Trainer` by way of accelerate, which on CPU replicates by DDP (its FSDP plugin is dropped
  there); compared with ours under `DDPConfig`.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prepare import launch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import HuggingFaceModel, Trainer

WARM = 3
"""Steps before the clock starts."""
RATE = 1e-3
Batches = list[dict[str, torch.Tensor]]
Result = tuple[float, float]
"""Seconds of the timed steps, and the last loss of this rank."""


def build(arguments: argparse.Namespace) -> nn.Module:
    """A small Llama, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        vocab_size=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches_of(arguments: argparse.Namespace) -> Batches:
    """This rank's batches."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (WARM + arguments.steps, arguments.batch, arguments.length)
    tokens = torch.randint(4096, shape, generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def steps(batches: Batches, step: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Result:
    """Run all steps; the clock starts after the first few."""
    start = 0.0
    for number, batch in enumerate(batches):
        if number == WARM:
            dist.barrier()
            start = time.perf_counter()
        loss = step(batch)
    return time.perf_counter() - start, loss.item()


def by_hand(model: nn.Module, batches: Batches) -> Result:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return steps(batches, step)


def loop(model: nn.Module, batches: Batches) -> Result:
    return by_hand(shard(model), batches)


def loop_ddp(model: nn.Module, batches: Batches) -> Result:
    return by_hand(DistributedDataParallel(model), batches)


def ours(strategy: str) -> Callable[[nn.Module, Batches], Result]:
    def train(model: nn.Module, batches: Batches) -> Result:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        trainer = Trainer(
            model=HuggingFaceModel(model),
            optimizers=optimizer,
            parallelism_config=strategy,
            train_dataloader=batches,
            check_sampler=False,
            progress_bar=False,
        )
        trainer.fit(duration=f"{WARM}ba")
        dist.barrier()
        start = time.perf_counter()
        trainer.fit(duration=f"{len(batches) - WARM}ba")
        seconds = time.perf_counter() - start
        loss = float(trainer.state.loss)
        trainer.close()
        return seconds, loss

    return train


def fabric(model: nn.Module, batches: Batches) -> Result:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    world = dist.get_world_size()
    strategy = ModelParallelStrategy(
        lambda model, mesh: shard(model), data_parallel_size=world, tensor_parallel_size=1
    )
    engine = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    engine.launch()
    model = engine.setup(model)
    optimizer = engine.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=RATE))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        engine.backward(loss)
        optimizer.step()
        return loss.detach()

    return steps(batches, step)


def transformers_trainer(model: nn.Module, batches: Batches) -> Result:
    import transformers

    clock: dict[str, float] = {}

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == WARM:
                dist.barrier()
                clock["start"] = time.perf_counter()
            clock["end"] = time.perf_counter()

    world = dist.get_world_size()
    own = [
        {name: row[number] for name, row in batch.items()}
        for batch in batches
        for number in range(len(batch["labels"]))
    ]
    # The sampler deals the samples out in turn; what is not this rank's is never looked at.
    samples = [sample for sample in own for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=len(batches[0]["labels"]),
            max_steps=len(batches),
            learning_rate=RATE,
            weight_decay=0.01,
            optim="adamw_torch",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            logging_strategy="steps",
            logging_steps=len(batches),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, settings, train_dataset=samples, callbacks=[Clock()])
        trainer.train()
    return clock["end"] - clock["start"], float("nan")


def contenders() -> Iterator[tuple[str, Callable[[nn.Module, Batches], Result]]]:
    yield "composer_dist, fsdp", ours("fsdp")
    yield "loop", loop
    if importlib.util.find_spec("lightning"):
        yield "Lightning Fabric", fabric
    yield "composer_dist, ddp", ours("ddp")
    yield "loop, DDP", loop_ddp
    if importlib.util.find_spec("accelerate"):
        yield "transformers, DDP", transformers_trainer


def main() -> None:
    """Run all contenders in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank's batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these alone, as the table names them")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="worlds to launch")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launch(arguments.ranks)
        return
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    batches = batches_of(arguments)
    rates: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    for _ in range(arguments.rounds):
        for name, train in contenders():
            if arguments.only and name not in arguments.only:
                continue
            seconds, loss = train(build(arguments), batches)
            numbers = torch.tensor([seconds, loss], dtype=torch.float64)
            worst = numbers[0].clone()
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            dist.all_reduce(numbers, op=dist.ReduceOp.SUM)
            tokens = arguments.steps * arguments.batch * arguments.length * dist.get_world_size()
            rates.setdefault(name, []).append(tokens / worst.item())
            losses[name] = numbers[1].item() / dist.get_world_size()
    compared = [loss for name, loss in losses.items() if not math.isnan(loss)]
    assert max(compared) - min(compared) < 1e-3, losses
    if dist.get_rank() == 0:
        report(rates, losses, arguments)
    dist.destroy_process_group()


def report(rates: dict[str, list[float]], losses: dict[str, float], arguments: argparse.Namespace) -> None:
    """A table, and JSON if asked."""
    median = {name: statistics.median(found) for name, found in rates.items()}
    table = Table("contender", "tokens/s", "x loop", "last loss", title=f"{dist.get_world_size()} ranks")
    for name, rate in median.items():
        reference = "loop, DDP" if name.lower().endswith("ddp") else "loop"
        ratio = f"{rate / median[reference]:.3f}" if reference in median else ""
        table.add_row(name, f"{rate:.0f}", ratio, f"{losses[name]:.4f}")
    Console(width=110).print(table)
    if arguments.json:
        path = arguments.json.with_stem(f"{arguments.json.stem}-{dist.get_world_size()}")
        path.write_text(json.dumps({"tokens_per_second": median, "losses": losses}, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
