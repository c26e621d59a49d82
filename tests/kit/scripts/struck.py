"""A training script with a fault: `python -m tests.kit.scripts.struck FOLDER RANK STEP KIND`.

It prepares, trains for two batches and saves; then it prepares again, resumes, trains, evaluates and saves,
with the fault and a limit of 3 s, which is enough because all imports are done by then. The steps are those
of `tests.kit.faults.STEPS`.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from composer_dist.composer_model import ComposerModel
from composer_dist.distributed import process_group
from composer_dist.trainer import Callback, CheckpointSaver, DistributedDataLoader, Logger, State, Trainer
from composer_dist.trainer.events import Event
from tests.kit.faults import KINDS, Fault
from tests.kit.training import points, quiet


class Striking(Callback):
    """Strikes its rank at a step of batch 2."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.batch = 0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.batch = state.timestamp.batch
        if event.value == self.fault.step:
            self.strike()

    def state_dict(self) -> dict[str, Any]:
        if self.fault.step == "state_dict" and self.batch > 2:
            self.strike()
        return {"batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.fault.step == "load_state_dict":
            self.strike()

    def strike(self) -> None:
        if process_group.world_and_rank()[1] == self.fault.rank:
            time.sleep(1)  # the guards look around first
            KINDS[self.fault.kind]()


class Model(ComposerModel):
    """Strikes while it is being prepared, if the fault says so."""

    def __init__(self, striking: Striking) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.striking = striking

    def forward(self, batch: Any) -> Tensor:
        return self.layers(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Tensor:
        return self(batch) if outputs is None else outputs

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        if self.striking.fault.step == "setup":
            self.striking.strike()
        return False


def build(folder: Path, fault: Fault, resume: bool, hang_timeout: Any) -> Trainer:
    torch.manual_seed(0)
    striking = Striking(fault)
    return quiet(
        Model(striking),
        optimizers=lambda one: AdamW(one.parameters(), lr=0.05),
        train_dataloader=DistributedDataLoader(points(24), global_batch_size=4, shuffle=True, seed=2),
        eval_dataloader=DistributedDataLoader(points(8), global_batch_size=4),
        max_duration="6ba",
        eval_interval="3ba",
        parallelism_config="fsdp",
        device="cpu",
        callbacks=[striking, CheckpointSaver(folder / "checkpoints", "2ba")],
        hang_timeout=hang_timeout,
        resume=resume,
    )[0]


def main(folder: Path, fault: Fault) -> None:
    with build(folder, fault._replace(step=""), resume=False, hang_timeout=False) as trainer:
        trainer.fit(duration="2ba")
    with build(folder, fault, resume=True, hang_timeout=3) as trainer:
        trainer.fit()
    process_group.destroy()


if __name__ == "__main__":
    path, rank, step, kind = sys.argv[1:]
    main(Path(path), Fault(int(rank), step, kind))
