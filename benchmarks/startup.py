"""From the command to the first step: `composer-dist train` against a script by hand that does the same.

    python benchmarks/startup.py --ranks 2 --rounds 5

Both build the same Llama and its AdamW, read the same text as bytes, shard by FSDP2, and take steps; timed
from the start of the command (`composer-dist train -n 2`, `torchrun`) until the first step is written down in
a file. Also: how long until a faulty key or value, or a missing file, is reported. Who comes first rotates.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIGURATION = """
seed: 17
out: {out}
model:
  kind: causal_lm
  config:
    model_type: llama
    hidden_size: 256
    intermediate_size: 512
    num_hidden_layers: 8
    num_attention_heads: 8
    max_position_embeddings: 128
  tokenizer: bytes
data: {{kind: text, source: english, context: 128, batch_size: 8}}
optimizer: {{name: adamw, lr: 1e-3}}
parallelism: fsdp
trainer: {{max_duration: 2ba}}
loggers: {{file: {{interval: 1ba}}}}
"""

FAULTS = (
    "trainer.max_duratoin=2ba",
    "trainer.max_duration=2bax",
    "trainer.hang_timeout=5ba",
    "optimizer.lr=fast",
    "optimizer.lr=-1",
    "scheduler=cosin",
    "parallelism.mesh.tp=two",
    "parallelism=fspd",
    "model.config.hiden_size=64",
    "model.tokenizer=./missing",
    "data.source=missing.txt",
)
"""Overrides with something wrong in them."""

SCRIPT = """
import sys
from pathlib import Path
from pydoc_data.topics import topics
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(17)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
                     max_position_embeddings=128, vocab_size=259)
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list("".join(topics.values()).encode()))
rows = TensorDataset(text[: len(text) // 128 * 128].view(-1, 128))
loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows))
for _, (tokens,) in zip(range(2), loader):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        with open(sys.argv[1], "a") as file:
            print(loss.item(), file=file)
dist.destroy_process_group()
"""


def until_written(command: list[str], file: Path, mark: str) -> float:
    """Seconds from the start of a command until the mark stands in the file."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not file.exists() or mark not in file.read_text():
            if process.poll():
                raise RuntimeError(process.stderr.read())
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        process.communicate()
    return seconds


def until_told(command: list[str]) -> float:
    """Seconds from the start of a command until it says something."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        process.stdout.readline()
        seconds = time.perf_counter() - start
        process.communicate()
    return seconds


def turns(path: Path, ranks: str) -> dict[str, Callable[[], float]]:
    """What is timed, in an empty folder."""
    train = [sys.executable, "-m", "composer_dist", "train"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    good, script = path / "config.yaml", path / "script.py"
    good.write_text(CONFIGURATION.format(out=path / "out"))
    script.write_text(SCRIPT)
    ours, metrics = [*train, str(good), "-n", ranks], path / "out" / "metrics.jsonl"
    theirs, losses = [*torchrun, str(script), str(path / "losses")], path / "losses"
    return {
        "composer-dist train": lambda: until_written(ours, metrics, '"batch": 1'),
        "script": lambda: until_written(theirs, losses, "\n"),
        "a missing configuration is reported": lambda: until_told([*train, str(path / "missing.yaml")]),
        **{
            f"{override} is reported": lambda override=override: until_told([*train, str(good), override])
            for override in FAULTS
        },
    }


def main() -> None:
    """Run all in turn, and print all rounds and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    world = str(arguments.ranks)
    seconds: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            timed = turns(Path(folder), world)
            names = list(timed)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                load = os.getloadavg()[0]
                seconds.setdefault(name, []).append(timed[name]())
                print(f"round {number + 1}, load {load:.1f}: {name}: {seconds[name][-1]:.2f} s", flush=True)
    script = statistics.median(seconds["script"])
    table = Table("command", "seconds", "x script", "all rounds", title=f"{world} processes: medians")
    for name, found in seconds.items():
        median, rounds = statistics.median(found), " ".join(f"{each:.2f}" for each in found)
        table.add_row(name, f"{median:.2f}", f"{median / script:.2f}", rounds)
    Console(width=110).print(table)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as for a user
    main()
