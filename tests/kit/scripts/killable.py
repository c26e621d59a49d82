"""A training script that ends itself by a signal, once, at a batch: `python -m tests.kit.scripts.killable`.

Arguments: folder, batch, signal, rank that gets it, and "parent" if its launcher is to get it instead. With
"wait" for a signal, a single rank waits at the batch until its launcher ends it. It writes the final weights,
the samples of each batch and the sizes of the worlds into the folder; started again it goes on.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch.optim import AdamW

from composer_dist.distributed.ranks import process_group
from composer_dist.models import ComposerClassifier
from composer_dist.trainer import Callback, CheckpointSaver, DistributedDataLoader, Logger, State, Trainer
from tests.kit.compare import weights
from tests.kit.training import points, quiet

SAMPLES, GLOBAL_BATCH = 22, 4


class Ending(Callback):
    """Sends the process, or its parent, a signal at a batch, if nobody before has had one."""

    def __init__(self, folder: Path, batch: int, number: int, rank: int, parent: bool = False) -> None:
        self.mark, self.batch, self.number, self.rank = folder / "signaled", batch, number, rank
        self.process = os.getppid() if parent else os.getpid()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if (state.timestamp.batch, state.rank) == (self.batch, self.rank) and not self.mark.exists():
            self.mark.touch()
            os.kill(self.process, self.number)


class Waiting(Callback):
    """Waits at a batch, where the rank is alone, for the SIGTERM by which its launcher makes room."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.mark, self.batch = folder / "waiting", batch

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if (state.timestamp.batch, state.world_size) != (self.batch, 1):
            return
        came, handler = threading.Event(), signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: FrameType | None) -> None:
            came.set()
            handler(number, frame)

        signal.signal(signal.SIGTERM, note)
        self.mark.touch()
        while not came.wait(0.05):
            pass


class Noting(Callback):
    """Writes down the samples of each batch, as far as a later process does not do the batch again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batch_end(self, state: State, logger: Logger) -> None:
        note = {"world": state.world_size, "samples": state.batch[0][:, 0].tolist()}
        path = self.folder / f"batch-{state.timestamp.batch}-{state.rank}.json"
        path.write_text(json.dumps(note))
        for gone in range(state.world_size, 4):
            (self.folder / f"batch-{state.timestamp.batch}-{gone}.json").unlink(missing_ok=True)


def build(folder: Path, *callbacks: Callback, parallel: bool) -> Trainer:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
    data = DistributedDataLoader(points(SAMPLES), global_batch_size=GLOBAL_BATCH, shuffle=True, seed=2)
    return quiet(
        ComposerClassifier(module, num_classes=4),
        optimizers=lambda model: AdamW(model.parameters(), lr=0.05),
        train_dataloader=data,
        max_duration="3ep",
        parallelism_config="fsdp" if parallel else None,
        device="cpu",
        callbacks=[CheckpointSaver(folder / "checkpoints", "2ba"), Noting(folder), *callbacks],
        seed=7,
        resume=True,
    )[0]


def main(folder: Path, batch: int, name: str, rank: int, parent: bool) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    waits = name == "wait"
    ending = Waiting(folder, batch) if waits else Ending(folder, batch, signal.Signals[name], rank, parent)
    trainer = build(folder, ending, parallel=process_group.is_distributed())
    trainer.fit()
    final = weights(trainer.state.model)
    if trainer.state.rank == 0:
        torch.save(final, folder / "final.pt")
    trainer.close()
    process_group.destroy()


if __name__ == "__main__":
    path, batch, name, rank, *target = sys.argv[1:]
    main(Path(path), int(batch), name, int(rank), target == ["parent"])
