"""Train a small language model, then fine-tune it with LoRA: on one process or many.

    torchrun --nproc-per-node 2 examples/finetune_lora.py --out runs/demo

1. A Llama-style model learns English, from nothing. 2. It is read from disk by rank 0, gets LoRA and
learns Python. 3. What was written is loaded by transformers and peft alone, and gives the same logits.
The text comes with Python itself and tokens are bytes, so there is nothing to download.
"""

import argparse
import sysconfig
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, PeftModel
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from composer_dist import FSDP2Config, HuggingFaceModel, Trainer
from composer_dist.checkpoint import export_pretrained
from composer_dist.distributed import init_context, sampler_kwargs
from composer_dist.distributed.ranks import process_group
from composer_dist.trainer import InMemoryLogger

CONTEXT = 128  # bytes in a sample
BATCH = 4  # samples of each rank in a step
LEARNING_RATE = 4e-3
LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=5,
    num_attention_heads=6,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)
LORA = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")

Samples = list[dict[str, torch.Tensor]]


def english() -> str:
    """The manual of the Python language."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def python() -> str:
    """The standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n".join(file.read_text("utf-8", "replace") for file in files)


def samples(text: str, held_out: int = 64) -> tuple[Samples, Samples]:
    """The text in pieces: those to train on, and some held out, spread evenly over it."""
    tokens = torch.tensor(list(text.encode()))
    pieces = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    batches = [{"input_ids": piece, "labels": piece} for piece in pieces]
    every = len(batches) // held_out
    held = batches[::every][:held_out]
    return [batch for i, batch in enumerate(batches) if i % every], held


class Stage:
    """One training run: its model, prepared for all ranks, its data and its losses."""

    def __init__(
        self, title: str, model: HuggingFaceModel, config: FSDP2Config, text: str, steps: int
    ) -> None:
        self.title = title
        self.model = model
        self.log = InMemoryLogger()
        # Made before the model is sharded, as always; it holds the shards afterwards.
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.01)
        self.trainer = Trainer(
            model=model,
            parallelism_config=config,
            optimizers=optimizer,
            schedulers=OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps),
            step_schedulers_every_batch=True,
            max_duration=f"{steps}ba",
            eval_interval=None,
            gradient_clipping=1.0,
            seed=17,
            loggers=self.log,
        )
        train, self.held_out = samples(text)
        self.train_loader = self._loader(train, shuffle=True)
        self.eval_loader = self._loader(self.held_out, shuffle=False)

    def run(self) -> None:
        """Train; `before` and `after` are the losses on the text held out."""
        say(f"\n{self.title}\n{self.trainer.preparation}")
        self.before = self.trainer.eval(self.eval_loader)["loss/eval/total"]
        self.trainer.fit(train_dataloader=self.train_loader)
        self.after = self.trainer.eval(self.eval_loader)["loss/eval/total"]

    def _loader(self, data: Samples, shuffle: bool) -> DataLoader:
        part = sampler_kwargs(self.trainer.preparation.mesh)
        sampler = DistributedSampler(data, shuffle=shuffle, **part)
        return DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)


def main(out: Path, steps: int) -> None:
    """Train, fine-tune, and load what was written."""
    process_group.init()
    _, rank = process_group.world_and_rank()

    # 1. Built without memory; every rank initializes its part, the same on any number of ranks.
    with init_context():
        model = HuggingFaceModel(LlamaForCausalLM(LLAMA))
    first = Stage("1. Llama learns English", model, FSDP2Config(), english(), steps)
    first.run()
    export_pretrained(model, out / "base")

    # 2. Rank 0 reads the weights, the others get their shards from it.
    if rank == 0:
        llama = AutoModelForCausalLM.from_pretrained(out / "base")
    else:
        with init_context():
            llama = AutoModelForCausalLM.from_config(LLAMA)
    model = HuggingFaceModel(llama, peft_config=LORA)
    config = FSDP2Config(activation_checkpointing=True)
    second = Stage("2. LoRA learns Python", model, config, python(), steps // 2)
    second.run()
    export_pretrained(model, out / "adapter")

    # 3. The sharded model's logits, and those of the files, without composer_dist.
    prompt = second.held_out[0]["input_ids"][None]
    with torch.no_grad():
        logits = model.eval()({"input_ids": prompt.to(second.trainer.state.device)}).logits.cpu()
    if rank == 0:
        llama = AutoModelForCausalLM.from_pretrained(out / "base")
        reloaded = PeftModel.from_pretrained(llama, out / "adapter").eval()
        with torch.no_grad():
            difference = (reloaded(input_ids=prompt).logits - logits).abs().max().item()
        report(out, [first, second], difference)
    process_group.destroy()
    if rank == 0 and difference > 1e-4:
        raise SystemExit("The reloaded model gives other logits than the trained one.")


def report(out: Path, stages: list[Stage], difference: float) -> None:
    """Losses as a table and as curves, and how the reloaded model compares."""
    table = Table("", "before", "after", title="\nLoss on text held out, in nats per byte")
    for stage in stages:
        table.add_row(stage.title, f"{stage.before:.3f}", f"{stage.after:.3f}")
    Console().print(table)
    plot(out / "loss.png", stages)
    say(f"Reloaded by transformers and peft: logits differ by {difference:.1e} at most.")
    say(f"In {out}: base (transformers), adapter (peft), loss.png")


def plot(path: Path, stages: list[Stage]) -> None:
    """The training losses, step by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, stage in zip(figure.subplots(1, len(stages)), stages, strict=True):
        losses = stage.log.values("loss/train/total")
        axes.plot(losses, alpha=0.6, label="training batches")
        axes.plot([0, len(losses)], [stage.before, stage.after], "o", label="text held out")
        axes.legend()
        axes.set(title=stage.title, xlabel="step", ylabel="loss in nats per byte")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def say(text: str) -> None:
    """Print once, not on every rank."""
    if process_group.world_and_rank()[1] == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a language model, fine-tune it with LoRA.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where to write")
    parser.add_argument("--steps", type=int, default=200, help="of stage 1; stage 2 takes half")
    arguments = parser.parse_args()
    disable_progress_bar()  # transformers' own, for reading and writing files
    warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 about transformers 5.23
    main(arguments.out, arguments.steps)
