"""A small run of one rank, with a fault; see `tests.kit.faults`."""

import os
import pkgutil
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from composer_dist.checkpoint import (
    export_pretrained,
    full_model_state,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from composer_dist.checkpoint.storage.lock import FolderLock
from composer_dist.composer_model import ComposerModel
from composer_dist.distributed import HangGuard, parallelize_model, process_group, unparallelize_model
from composer_dist.trainer import Callback, CheckpointSaver, DistributedDataLoader, Logger, State, Trainer
from composer_dist.trainer.events import Event
from tests.kit.faults import ARRIVAL, HANG, KINDS, SLOW, STEPS, UNTOUCHED, Fault
from tests.kit.forked import see_another
from tests.kit.huggingface import pretrained_llama
from tests.kit.training import points, quiet

PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.debug",
    "torchao.quantization",
    "transformers.models.llama.modeling_llama",
)
"""What a run imports late; ranks are forked from a process that has it."""


class Strike:
    """Strikes its rank at the step of its fault, once it is armed."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder
        self.here = os.environ["RANK"] == str(fault.rank)
        self.armed = False

    def given(self, kind: str) -> bool:
        """Whether this rank is given something else."""
        return self.here and self.fault.kind == kind

    def __call__(self, step: str) -> None:
        strike = KINDS[self.fault.kind].strike
        if not (self.here and self.armed and step == self.fault.step and strike):
            return
        self.armed = False
        if self.fault.kind in SLOW:
            time.sleep(1)  # the guards look around first
        strike(self.folder) if self.fault.kind == "disk" else strike()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Armed, and the product's function is struck, if the step is one."""
        self.armed, at = True, STEPS[self.fault.step].at
        if not at:
            yield
            return
        place, _, name = f"composer_dist.{at}".rpartition(".")
        owner = pkgutil.resolve_name(place)
        original = getattr(owner, name)

        def struck(*given: Any, **named: Any) -> Any:
            self(self.fault.step)
            return original(*given, **named)

        with mock.patch.object(owner, name, struck):
            yield


class Samples(Dataset[Any]):
    """Strikes at the fifth sample, also in a worker."""

    def __init__(self, strike: Strike) -> None:
        self.points, self.strike = points(24), strike

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        if index >= 4:
            self.strike("data")
            self.strike("worker")
        return self.points[index]


class Striking(Callback):
    """Strikes at events of batch 1 and in the state."""

    def __init__(self, strike: Strike) -> None:
        self.strike, self.batch = strike, 0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.batch = state.timestamp.batch
        if self.batch >= 1:
            self.strike(event.value)

    def state_dict(self) -> dict[str, Any]:
        if self.batch > 1:
            self.strike("state_dict")
        return {"batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.strike("load_state_dict")


class Layer(nn.Linear):
    """Strikes while it is initialized."""

    strike: Callable[[str], None] = staticmethod(lambda step: None)

    def reset_parameters(self) -> None:
        self.strike("initialize")
        super().reset_parameters()


class Model(ComposerModel):
    """Strikes in its forward, its backward and its metric."""

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        torch.manual_seed(1 if strike.given("seed") else 0)
        width = 9 if strike.given("model") else 8
        with torch.device("meta" if strike.fault.step == "initialize" else "cpu"):
            self.layers = nn.Sequential(Layer(8, width), Layer(width, 4))
        self.layers[1].strike = strike
        self.strike = strike
        self.count = 0

    def forward(self, batch: Any) -> Tensor:
        hidden = self.layers[0](batch[0])
        if self.training:
            self.count += 1
        if self.training and self.count > 1:
            self.strike("forward")
            hidden.register_hook(lambda gradient: self.strike("backward"))
        return self.layers[1](hidden)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Tensor:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else {"accuracy": MulticlassAccuracy(4)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        self.strike("metric")
        metric.update(outputs, batch[1])


def build(strike: Strike, resume: bool = False) -> Trainer:
    """A Trainer over a model that is as before if this fails before anything has begun."""
    model, step = Model(strike), strike.fault.step
    before = {name: value.clone() for name, value in model.state_dict().items()}
    callbacks: list[Callback] = [Striking(strike)]
    if STEPS[step].part in ("save", "load"):
        folder = strike.folder / "disk" / "checkpoints"
        callbacks.append(CheckpointSaver(folder, "1ba", asynchronous=step == "background"))
    workers = {"num_workers": 1} if step == "worker" else {}
    try:
        return quiet(
            model,
            optimizers=lambda one: AdamW(one.parameters(), lr=0.05),
            train_dataloader=DistributedDataLoader(Samples(strike), global_batch_size=4, **workers),
            eval_dataloader=DistributedDataLoader(points(8), global_batch_size=4),
            max_duration="4ba",
            eval_interval="2ba" if STEPS[step].part == "train" else None,
            gradient_clipping=1.0,
            parallelism_config="ddp"
            if strike.given("config")
            else {"strategy": "fsdp", "sync": "rank0" if step == "deliver" else "auto"},
            device="cpu",
            callbacks=callbacks,
            hang_timeout=HANG,
            resume=resume,
        )[0]
    except BaseException:
        now = model.state_dict()
        if step in UNTOUCHED and not all(torch.equal(before[name], now[name]) for name in before):
            print("TOUCHED", flush=True)
        raise


def prepare(strike: Strike) -> None:
    if strike.fault.kind == "file":
        prepare_from_file(strike)
        return
    with strike.within():
        trainer = build(strike)
    trainer.close()


def prepare_from_file(strike: Strike) -> None:
    """Prepares a model from a file, in which one rank sees other values."""
    process_group.init()
    model, file = nn.Linear(8, 4), strike.folder / "weights.safetensors"
    for number, path in enumerate((file, strike.folder / "others.safetensors")):
        if strike.here:
            save_file({name: one + number for name, one in model.state_dict().items()}, path)
    process_group.barrier()
    if strike.here:
        see_another(path, file)
    with HangGuard(HANG, doing=lambda: "the set-up"):
        parallelize_model(model, "fsdp", weights=file)


def train(strike: Strike) -> None:
    with build(strike) as trainer:
        if strike.fault.step == "step":
            trainer.state.optimizers[0].register_step_pre_hook(
                lambda *given: strike("step") if trainer.state.timestamp.batch else None
            )
        with strike.within():
            trainer.fit(duration="3ba")


def save(strike: Strike) -> None:
    with build(strike) as trainer:
        trainer.fit(duration="1ba")
        with strike.within():
            trainer.fit(duration="2ba")


def load(strike: Strike) -> None:
    with build(strike) as trainer:
        trainer.fit(duration="2ba")
    saves = strike.folder / "disk" / "checkpoints"
    if strike.given("file"):
        see_another(saves / "ep0-ba1", saves / "ep0-ba2")
    with strike.within():
        trainer = build(strike, resume=True)
    trainer.close()


def export(strike: Strike) -> None:
    process_group.init()
    step = strike.fault.step
    model = pretrained_llama() if step == "export" else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    torch.manual_seed(0)
    parallelize_model(model, {"strategy": "fsdp", "sync": "rank0"})
    with HangGuard(2 * HANG if step == "export" else HANG, doing=lambda: "the export"), strike.within():
        if step == "export":
            export_pretrained(model, strike.folder / "disk" / "export")
        elif step == "gather":
            full_model_state(model)
        else:
            unparallelize_model(model)


def struck(folder: Path, fault: Fault) -> None:
    """What a rank runs."""
    strike = Strike(fault, folder)
    if fault.step == "join":
        with strike.within():
            strike("join")
        process_group.init(timeout=timedelta(seconds=ARRIVAL))
    if strike.given("torch"):
        torch.__version__ = "2.12.1"  # type: ignore[assignment]
    {"prepare": prepare, "train": train, "save": save, "load": load, "export": export}[
        STEPS[fault.step].part
    ](strike)
    process_group.destroy()


def look(folder: Path) -> list[str]:
    """What has stayed on the disk: a lock, files beside checkpoints, no checkpoint that can be loaded."""
    disk, found = folder / "disk", list[str]()
    (disk / "ballast").unlink(missing_ok=True)
    saves = disk / "checkpoints"
    if saves.exists():
        lock = FolderLock(saves, "folder", "another")
        lock.take()
        lock.release()
        newest = latest_checkpoint(saves)
        if newest is None:
            found.append("no checkpoint")
        else:
            load_checkpoint(newest)
        for path in saves.glob("ep*"):
            save_checkpoint(path, {"model": nn.Linear(1, 1)})  # as a next run does
        save_checkpoint(saves / "ep0-ba2", {"model": nn.Linear(1, 1)})
        names = {path.name for path in saves.iterdir() if not re.fullmatch(r"ep\d-ba\d|latest", path.name)}
        found += [f"checkpoints/{name}" for name in sorted(names)]
    return found + [
        f"disk/{path.name}" for path in disk.iterdir() if path.name not in ("checkpoints", "export")
    ]
