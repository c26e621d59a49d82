"""A training run that is killed again and again: what is lost, and whether it stays the same run.

    python -m benchmarks.goodput --kills 20 --batches 180

A small Llama learns from a file of text by `composer-dist train`: a third of its batches on 2 ranks, a
third on 3, a third on 2. A rank, the launcher, or all processes of the host (a namespace of processes) get
SIGKILL at random moments of training, or, in a quarter of the cases, of set-up. Once no process is left,
the same command runs again. Then the same three parts run undisturbed. Every rank notes its samples and its
loss of each batch, and the last notes of a batch count: they and the final weights must be equal to the bit
in both runs, and every sample must come once in each epoch. Prints Markdown: each kill, its cost, and the
share of useful time.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from composer_dist.trainer import Callback, Logger, State

RANKS = (2, 3, 2)
KINDS = ("rank", "launcher", "host")
SAMPLES, HELD_OUT, CONTEXT, BATCH = 360, 12, 128, 12
LIMIT = 60
"""Seconds in which all processes have to be gone, and a batch has to end after a start."""
CONFIGURATION = """
seed: 17
out: {folder}/out
model:
  kind: causal_lm
  config:
    model_type: llama
    hidden_size: 192
    intermediate_size: 512
    num_hidden_layers: 5
    num_attention_heads: 6
    max_position_embeddings: 128
  tokenizer: bytes
data: {{kind: text, source: {text}, context: {context}, batch_size: {batch}, held_out: {held_out}}}
optimizer: {{name: adamw, lr: 1e-3}}
parallelism: fsdp
trainer: {{max_duration: 1ba, progress_bar: false}}
checkpoints: {{interval: 5ba}}
callbacks: {{benchmarks.goodput.Notes: {{folder: {folder}/notes}}}}
"""


class Note(NamedTuple):
    """What a rank knows of a batch."""

    time: float
    batch: int
    """From 1."""
    world: int
    rank: int
    samples: list[int]
    """Checksums."""
    loss: float


class Notes(Callback):
    """Writes down each batch, in a file of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write a note."""
        samples = [zlib.crc32(row.numpy().tobytes()) for row in state.batch["input_ids"]]
        batch, loss = state.timestamp.batch, float(state.loss.detach())
        note = Note(time.time(), batch, state.world_size, state.rank, samples, loss)
        draft = self.folder / f"{time.time_ns()}-{state.rank}.draft"
        draft.write_text(json.dumps(note))
        draft.rename(draft.with_suffix(".json"))


class Run:
    """A run in a folder."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.notes.mkdir(parents=True)
        sizes = {"context": CONTEXT, "batch": BATCH, "held_out": HELD_OUT}
        (folder / "run.yaml").write_text(CONFIGURATION.format(folder=folder, text=text, **sizes))

    def start(self, ranks: int, until: int, host: bool = False) -> subprocess.Popen[bytes]:
        """Start the command; as a `host`, in a namespace of processes that ends with the command."""
        alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"] if host else []
        command = [sys.executable, "-m", "composer_dist", "train", str(self.folder / "run.yaml")]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*alone, *command, "-n", str(ranks), f"trainer.max_duration={until}ba"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, ranks: int, until: int) -> None:
        """Train to the end of a part."""
        if status := self.start(ranks, until).wait():
            raise RuntimeError(f"status {status}: {(self.folder / 'log').read_text()[-3000:]}")

    def noted(self) -> list[Note]:
        """All notes, oldest first."""
        return sorted(Note(*json.loads(one.read_text())) for one in self.notes.glob("*.json"))

    def counting(self) -> dict[tuple[int, int], Note]:
        """Batch and rank to the last note."""
        return {(note.batch, note.rank): note for note in self.noted()}

    def weights(self) -> dict[str, torch.Tensor]:
        """What was exported."""
        return load_file(self.folder / "out" / "model" / "model.safetensors")


class Kill(NamedTuple):
    """One kill, and what came of it."""

    kind: str
    ranks: int
    time: float
    gone: float
    """Seconds until no process was left."""

    def row(self, notes: list[Note]) -> tuple[list[str], int, float]:
        """Its line of the table, the batches that were computed in vain, and the seconds to the next one."""
        ended = max((note.batch for note in notes if note.time < self.time + self.gone), default=0)
        later = next(note for note in notes if note.time > self.time + self.gone)
        lost, seconds = ended + 1 - later.batch, later.time - self.time
        cells = self.kind, self.ranks, ended, lost, f"{self.gone:.1f}", f"{seconds:.1f}"
        return [str(one) for one in cells], lost, seconds


def struck(run: Run, ranks: int, until: int, start_up: float, dice: random.Random) -> Kill:
    """Starts a run and kills a part of it at a random moment."""
    kind, known = dice.choice(KINDS), len(run.noted())
    process = run.start(ranks, until, host=kind == "host")
    if dice.random() < 0.25:
        time.sleep(dice.uniform(0, start_up))
    else:
        limit = time.monotonic() + LIMIT
        while len(run.noted()) == known and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 2))
    launcher = psutil.Process(process.pid)
    everything = launcher.children(recursive=True)
    workers = [one for one in everything if one.environ().get("RANK")]
    chosen = {"launcher": [launcher], "host": everything[:1], "rank": workers}[kind] or [launcher]
    killed = time.time()
    dice.choice(chosen).kill()
    process.wait(LIMIT)
    if left := psutil.wait_procs(everything, LIMIT)[1]:
        raise RuntimeError(f"{left} are there {LIMIT} seconds after the death of a {kind}.")
    return Kill(kind, ranks, killed, time.time() - killed)


def trained(
    run: Run, batches: int, kills: int = 0, start_up: float = 0, seed: int = 0
) -> tuple[list[Kill], float]:
    """All three parts; the kills, and the seconds."""
    began, found, dice = time.monotonic(), list[Kill](), random.Random(seed)  # noqa: S311
    for part, ranks in enumerate(RANKS, 1):
        until = batches * part // len(RANKS)
        while len(found) < kills * part // len(RANKS):
            found.append(struck(run, ranks, until, start_up, dice))
        run.finish(ranks, until)
    return found, time.monotonic() - began


def check(killed: Run, whole: Run, batches: int) -> None:
    """Raise an error unless both runs are the same, and every sample came once in each epoch."""
    ours, theirs = ({key: note[2:] for key, note in run.counting().items()} for run in (killed, whole))
    differ = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    if differ:
        raise AssertionError(f"(batch, rank) {differ[:5]} differ.")
    weights, expected = killed.weights(), whole.weights()
    if weights.keys() != expected.keys() or not all(weights[key].equal(expected[key]) for key in expected):
        raise AssertionError("The final weights differ.")
    per_epoch = (SAMPLES - HELD_OUT) // BATCH
    seen: dict[int, Counter[int]] = {}
    for (batch, _), note in killed.counting().items():
        seen.setdefault((batch - 1) // per_epoch, Counter()).update(note.samples)
    for epoch in range(batches // per_epoch):
        if sorted(seen[epoch].values()) != [1] * per_epoch * BATCH:
            raise AssertionError(f"Epoch {epoch}: {len(seen[epoch])} samples, {seen[epoch].most_common(3)}")


def main() -> None:
    """Run both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--batches", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_bytes("".join(topics.values()).encode()[: SAMPLES * CONTEXT])
        whole, killed = Run(Path(folder) / "whole", text), Run(Path(folder) / "killed", text)
        began = time.time()
        _, undisturbed = trained(whole, arguments.batches)
        start_up = whole.noted()[0].time - began
        kills, seconds = trained(killed, arguments.batches, arguments.kills, start_up, arguments.seed)
        check(killed, whole, arguments.batches)
        print(report(kills, killed.noted(), whole.noted(), arguments.batches, seconds, undisturbed))


def report(
    kills: list[Kill], notes: list[Note], others: list[Note], batches: int, seconds: float, undisturbed: float
) -> str:
    """The table and what follows from it."""
    rows = [kill.row(notes) for kill in kills]
    times = {note.batch: note.time for note in others}
    step = statistics.median(times[one + 1] - times[one] for one in times if one + 1 in times)
    lost, resumed = sum(row[1] for row in rows), [row[2] for row in rows]
    useful = batches * step
    lines = [
        "| killed | ranks | after batch | batches lost | all gone, s | next batch, s |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells, *_ in rows),
        "",
        f"- {len(kills)} kills in {batches} batches: samples, losses and final weights equal to the bit.",
        f"- From a kill to the next batch: {statistics.median(resumed):.1f} s (most {max(resumed):.1f} s).",
        f"- Lost: {lost} batches of {step:.2f} s, {lost * step:.0f} s.",
        f"- Effective training time: {useful / seconds:.0%} of {seconds:.0f} s; without kills, with",
        f"  {len(RANKS)} starts, {useful / undisturbed:.0%} of {undisturbed:.0f} s.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
