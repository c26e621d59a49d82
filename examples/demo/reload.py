"""What the demo has written, loaded by transformers and peft alone: it must have the loss of the training."""

import json
import logging
import warnings
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from composer_dist.recipe.sources.text import hold_out, pieces, read

DEMO = Path("runs/demo")


def main() -> None:
    """Compare, and draw the losses."""
    warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 about transformers 5.23
    for name in ("torchao", "torch.utils._pytree"):  # which peft imports: of kernels that are not needed here
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    from peft import AutoPeftModelForCausalLM

    loaders = {
        "english": lambda: AutoModelForCausalLM.from_pretrained(DEMO / "english" / "model"),
        "python": lambda: AutoPeftModelForCausalLM.from_pretrained(DEMO / "python" / "adapter"),
    }
    table = Table("", "before", "trained", "reloaded", title="Loss on text held out, in nats per byte")
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (name, load) in zip(figure.subplots(1, 2), loaders.items(), strict=True):
        training, held_out = losses(DEMO / name / "metrics.jsonl")
        reloaded = loss_of(load().eval(), name)
        table.add_row(name, f"{training[0]:.3f}", f"{held_out[-1]:.4f}", f"{reloaded:.4f}")
        axes.plot(training)
        axes.set(title=name, xlabel="step", ylabel="loss in nats per byte")
        if abs(reloaded - held_out[-1]) > 1e-3:
            raise SystemExit(f"{name}: the reloaded model has another loss: {reloaded}, not {held_out[-1]}.")
    Console().print(table)
    figure.savefig(DEMO / "loss.png", dpi=120)
    print(f"In {DEMO}: english/model (transformers), python/adapter (peft), loss.png")
    print("Next, your own: .venv/bin/composer-dist init lora, and docs/quickstart.md")


def losses(file: Path) -> tuple[list[float], list[float]]:
    """Those of the training, step by step, and those on the text held out."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found: list[list[float]] = []
    for name in ("loss/train/total", "loss/eval/total"):
        found.append([line[name] for line in lines if name in line])
    return found[0], found[1]


def loss_of(model: torch.nn.Module, source: str) -> float:
    """The loss on the samples that the configurations hold out."""
    tokens = pieces(read(source), AutoTokenizer.from_pretrained(DEMO / "english" / "model"), 128)
    held = tokens[hold_out(range(len(tokens)), 64)[1]].long()
    with torch.no_grad():
        return model(input_ids=held, labels=held).loss.item()


if __name__ == "__main__":
    main()
