"""Resuming from checkpoints, wholly or in part, on the same or another number of ranks.

Longer than other files: all cases resume the same small run.
"""

import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from composer_dist.checkpoint import full_optimizer_state, load_checkpoint, save_checkpoint
from composer_dist.checkpoint.format.opened import Opened
from composer_dist.errors import (
    CheckpointError,
    CheckpointKeyError,
    CheckpointValueError,
    ParallelismTypeError,
    ParallelismValueError,
)
from composer_dist.models import ComposerClassifier
from composer_dist.trainer import EMA, Callback, CheckpointSaver, DistributedDataLoader, Resume, Trainer
from tests.kit.compare import close, equal, full_each, same, weights
from tests.kit.grids import crossed
from tests.kit.phases import adamw
from tests.kit.training import At, Result, classifier, points, quiet, raising, result_of, seen_at
from tests.kit.world import World

SAMPLES = 22


class Dropping(nn.Module):
    """Draws from the device's generator."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(8, width)
        self.head = nn.Linear(width, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.body(inputs)), 0.3, self.training)
        logits: Tensor = self.head(hidden) * 2
        return logits


def samples_seen() -> tuple[list[list[float]], At]:
    return seen_at("batch_end", lambda state: state.batch[0][:, 0].tolist())


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> tuple[Trainer, Any]:
    torch.manual_seed(0)
    return quiet(
        ComposerClassifier(Dropping(options.pop("width", 8)), num_classes=4),
        optimizers=adamw,
        schedulers=lambda optimizer: StepLR(optimizer, 2, gamma=0.7),
        step_schedulers_every_batch=True,
        train_dataloader=DistributedDataLoader(points(SAMPLES), global_batch_size=4, shuffle=True, seed=2),
        max_duration="3ep",
        parallelism_config="fsdp" if dist.is_initialized() else None,
        device="cpu",
        callbacks=[CheckpointSaver(folder, "2ba", keep=2), *callbacks],
        seed=7,
        **options,
    )


def run(folder: Path, duration: str, *callbacks: Callback, **options: Any) -> Trainer:
    """A Trainer after its fit."""
    one, _ = trainer(folder, *callbacks, **options)
    one.fit(duration=duration)
    return one


def whole(folder: Path) -> tuple[Result, list[list[float]]]:
    seen, callback = samples_seen()
    one, log = trainer(folder / "whole", callback, resume=True)
    assert one.resumed_from is None
    one.fit()
    return result_of(one, log), seen


def crashed(folder: Path, *batches: int) -> tuple[Result, list[list[float]]]:
    """Crashes after some batches, each time in another Trainer, and then ends; losses by batch."""
    losses: dict[int, float] = {}
    samples: dict[int, list[float]] = {}
    for crash in (*batches, 1000):
        seen, callback = samples_seen()
        killed = At(batch_end=raising(ArithmeticError(), crash))  # nothing is saved after it
        one, log = trainer(folder / "crashed", callback, killed, resume=True)
        start = one.state.timestamp.batch
        assert start == (0 if one.resumed_from is None else int(one.resumed_from.rpartition("ba")[2]))
        try:
            one.fit()
        except ArithmeticError:
            assert crash < 1000
        values = log.values("loss/train/total")
        losses |= {start + number: value for number, value in enumerate(values)}
        samples |= {start + number: value for number, value in enumerate(seen)}
    ordered = sorted(losses)
    return ([losses[n] for n in ordered], weights(one.state.model)), [samples[n] for n in ordered]


def crash_and_compare(folder: Path, *batches: int) -> None:
    equal(crashed(folder, *batches), whole(folder))


@pytest.mark.promise(100)
@pytest.mark.parametrize("batches", [(1,), (5, 6), (7, 13, 17)])
def test_crashed_and_resumed_is_bit_equal(tmp_path: Path, batches: tuple[int, ...]) -> None:
    crash_and_compare(tmp_path, *batches)


@pytest.mark.promise(100)
def test_crashed_and_resumed_is_bit_equal_on_two_ranks(world2: World, tmp_path: Path) -> None:
    world2(crash_and_compare, tmp_path, 5, 13)


def until(folder: Path, duration: str) -> list[list[float]]:
    seen, callback = samples_seen()
    run(folder, duration, callback, resume=True)
    return seen


def all_of(ranks: list[list[list[float]]]) -> list[list[float]]:
    """The samples of each batch of all ranks."""
    return [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)]  # noqa: RUF017


@pytest.mark.promise(100)
def test_resumed_on_other_ranks_loses_no_sample(world2: World, world4: World, tmp_path: Path) -> None:
    expected = all_of([until(tmp_path / "whole", "18ba")])
    found = all_of([until(tmp_path / "run", "3ba")])
    found += all_of(world2(until, tmp_path / "run", "4ba"))
    found += all_of(world4(until, tmp_path / "run", "4ba"))
    found += all_of([until(tmp_path / "run", "7ba")])
    assert found == expected
    assert len({sample for batch in found[:6] for sample in batch}) == SAMPLES
    last, _ = trainer(tmp_path / "run", resume=True)
    assert (last.state.timestamp.sample, last.state.timestamp.epoch) == (3 * SAMPLES, 3)


def resumed(folder: Path, expected: Any) -> None:
    """Loads the bits of the checkpoint, and trains to what one process does."""
    options = {"max_duration": "8ba", "device": "cpu", "parallelism_config": "fsdp", "optimizers": adamw}
    loader = DistributedDataLoader(points(SAMPLES), global_batch_size=4, shuffle=True)
    one, _ = quiet(classifier(), train_dataloader=loader, resume=folder, **options)
    model, optimizer = one.state.model, one.state.optimizers[0]
    saved = load_checkpoint(folder)
    same(weights(model), saved["model"])
    found = full_optimizer_state(model, optimizer)
    if found:  # on rank 0
        equal(
            {name: found["state"][name] for name in saved["optimizer"]["state"]}, saved["optimizer"]["state"]
        )
    one.fit()
    close(weights(model), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.promise(100)
def test_other_ranks_load_the_same_bits_and_then_train_the_same(
    world2: World, world4: World, tmp_path: Path
) -> None:
    loader = DistributedDataLoader(points(SAMPLES), global_batch_size=4, shuffle=True)
    saver = CheckpointSaver(tmp_path, "3ba", keep=None)
    options = {"max_duration": "8ba", "device": "cpu", "optimizers": adamw, "callbacks": saver}
    one, _ = quiet(classifier(), train_dataloader=loader, **options)
    one.fit()
    for world in (world2, world4):
        world(resumed, tmp_path / "ep0-ba3", weights(one.state.model))


def damage(checkpoint: Path) -> None:
    data, *_ = sorted(checkpoint.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-9])


@pytest.mark.promise(100)
def test_autoresume_skips_what_is_damaged_and_keeps_it(tmp_path: Path) -> None:
    run(tmp_path, "4ba")
    damage(tmp_path / "ep0-ba4")
    kept = sorted((tmp_path / "ep0-ba4").glob("*.distcp"))[0].read_bytes()
    with pytest.warns(UserWarning, match=r"Skipping .*ep0-ba4: |kept as .*ep0-ba4.damaged") as caught:
        again, _ = trainer(tmp_path, resume=True)
    assert len(caught) == 2
    assert again.state.timestamp.batch == 2
    again.fit()
    assert sorted((tmp_path / "ep0-ba4.damaged").glob("*.distcp"))[0].read_bytes() == kept
    found = {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
    assert found == {"ep0-ba4.damaged", "ep2-ba16", "ep3-ba18"}  # keep=2 counts the good ones


@pytest.mark.promise(100)
@pytest.mark.parametrize("how", ["data", "mark", "no mark"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path, how: str) -> None:
    run(tmp_path, "4ba")
    for name in ("ep0-ba2", "ep0-ba4"):
        if how == "data":
            damage(tmp_path / name)
        elif how == "mark":
            (tmp_path / name / "checkpoint.json").write_text("{}")
        else:
            (tmp_path / name / "checkpoint.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping", UserWarning)
        with pytest.raises(
            CheckpointValueError, match=f"All checkpoints in {tmp_path} are damaged: .*ep0-ba4"
        ):
            trainer(tmp_path, resume=True)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == before


@pytest.mark.promise(100)
def test_a_finished_run_that_is_resumed_has_nothing_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path)[0].fit()
    again, _ = trainer(tmp_path, resume=True)
    again.fit()
    assert again.state.timestamp.epoch == 3
    assert "already reached max_duration='3ep'; raise it to continue" in caplog.text
    again.fit(duration="1ba")
    assert again.state.timestamp.batch == 19


@pytest.mark.promise(109)
def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/nothing")):
        with pytest.raises(CheckpointError, match=f"cannot be written to {folder}: "):
            trainer(folder)


@pytest.mark.promise(100)
def test_runs_resume_at_urls(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    one = trainer(url)[0]  # type: ignore[arg-type]
    one.fit(duration="4ba")
    for resume in (True, f"{url}/latest", Resume(load_path=f"{url}/latest", load_weights_only=True)):
        two, _ = trainer(url, resume=resume)  # type: ignore[arg-type]
        same(weights(two.state.model), weights(one.state.model))
    system = fsspec.filesystem("memory")
    for name in ("ep0-ba2", "ep0-ba4"):
        (data, *_) = system.glob(f"/{tmp_path.name}/{name}/*.distcp")
        system.pipe_file(data, system.cat_file(data)[:-9])
        if name == "ep0-ba2":  # the older one
            assert trainer(url, resume=True)[0].state.timestamp.batch == 4  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping", UserWarning)
        with pytest.raises(CheckpointValueError, match=r"All checkpoints in memory://.* are damaged"):
            trainer(url, resume=True)  # type: ignore[arg-type]


@pytest.mark.promise(100)
def test_autoresume_verifies_once(tmp_path: Path) -> None:
    run(tmp_path, "2ba")
    with mock.patch.object(Opened, "verify", autospec=True, side_effect=Opened.verify) as verify:
        trainer(tmp_path, resume=True)
    assert verify.call_count == 1


def test_weights_only_begins_a_new_run(tmp_path: Path) -> None:
    one, path = run(tmp_path, "2ba"), tmp_path / "latest"
    two, _ = trainer(tmp_path / "other", resume=Resume(load_path=path, load_weights_only=True))
    close(weights(two.state.model), weights(one.state.model))
    assert two.state.timestamp.batch == 0
    assert not two.state.optimizers[0].state
    two.fit(duration="1ba")
    both = Resume(load_path=path, load_weights_only=True, autoresume=True)
    third, _ = trainer(tmp_path / "other", resume=both)
    assert third.state.timestamp.batch == 1  # its own checkpoint, wholly, and not load_path


def test_ignored_keys_stay_as_they_are(tmp_path: Path) -> None:
    one = run(tmp_path, "3ba")
    keys = ["model.module.head.*", "optimizer.*head*", "data", "schedulers"]
    resume = Resume(load_path=tmp_path / "latest", load_ignore_keys=keys)
    fresh, _ = trainer(tmp_path / "fresh")
    two, _ = trainer(tmp_path / "other", resume=resume)
    initial, trained = weights(fresh.state.model), weights(one.state.model)
    expected = {name: (initial if "head" in name else trained)[name] for name in trained}
    same(weights(two.state.model), expected)
    assert len(two.state.optimizers[0].state) == 2
    assert two.state.schedulers[0].last_epoch == 0
    assert two.state.timestamp.batch == 3


@pytest.mark.promise(101)
def test_a_glob_that_matches_nothing_is_warned_of(tmp_path: Path) -> None:
    run(tmp_path, "1ba")
    keys, path = ["model.module.haed.*", "model.module.head"], tmp_path / "latest"
    for weights_only in (False, True):
        resume = Resume(load_path=path, load_ignore_keys=keys, load_weights_only=weights_only)
        with pytest.warns(UserWarning, match=r"'model.module.haed.\*' matched nothing"):
            trainer(tmp_path / "other", resume=resume)
    trainer(tmp_path / "other", resume=Resume(load_path=path, load_ignore_keys=["optimizer"]))  # no warning


def other_names(folder: Path) -> None:
    """A checkpoint of the run without one name, and one with a name too many."""
    one = run(folder / "run", "2ba")
    state = one.state.model.state_dict()
    for kind in ("directory", "file"):
        for name, odd in (("less", dict(list(state.items())[1:])), ("more", {**state, "odd": torch.ones(2)})):
            parts = {"model": odd, "optimizer": one.state.optimizers[0], **one.state_dict()}
            options = {"sharded": kind == "directory", "model": one.state.model}
            save_checkpoint(folder / f"{name}-{kind}", parts, **options)


@pytest.mark.promise(101)
@crossed({"kind": ["directory", "file"], "weights_only": [False, True]})
def test_strict_is_strict_on_every_path(tmp_path: Path, kind: str, weights_only: bool) -> None:
    other_names(tmp_path)
    for name, message in (("less", "missing: model.module.body.weight"), ("more", "unexpected: model.odd")):
        options = {"load_path": tmp_path / f"{name}-{kind}", "load_weights_only": weights_only}
        with pytest.raises(CheckpointKeyError, match=message):
            trainer(tmp_path / "o", resume=Resume(**options))
        with pytest.warns(UserWarning, match=message):
            trainer(tmp_path / "o", resume=Resume(**options, load_strict_model_weights=False))
    if kind == "directory":
        (tmp_path / "auto").mkdir()
        shutil.move(tmp_path / "less-directory", tmp_path / "auto" / "less")
        with pytest.raises(CheckpointKeyError, match=r"missing: model.module.body.weight"):
            trainer(tmp_path / "auto", resume=True)


@pytest.mark.promise(101)
def test_shapes_are_always_checked(tmp_path: Path) -> None:
    run(tmp_path, "1ba")
    resume = Resume(load_path=tmp_path / "latest", load_strict_model_weights=False)
    with pytest.raises(CheckpointValueError, match=r"body.weight is \(8, 8\) in the checkpoint, \(6, 8\)"):
        trainer(tmp_path / "o", width=6, resume=resume)


def test_a_dangling_latest_means_the_newest(tmp_path: Path) -> None:
    run(tmp_path, "4ba")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("ep0-ba3")
    two, _ = trainer(tmp_path / "o", resume=tmp_path / "latest")
    assert two.state.timestamp.batch == 4


def test_a_latest_that_names_the_folder_above_is_not_followed(tmp_path: Path) -> None:
    run(tmp_path, "1ba")
    folder = (tmp_path / "latest").resolve() / "folder"
    folder.mkdir()
    (folder / "latest").write_text("..")
    with pytest.raises(CheckpointError, match="folder/latest is not a file of torch.save"):
        trainer(tmp_path / "o", resume=folder / "latest")


def test_what_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        trainer(tmp_path, resume=tmp_path / "nowhere")
    with pytest.raises(ParallelismValueError, match="autoresume needs a CheckpointSaver, whose folder"):
        quiet(ComposerClassifier(Dropping(), num_classes=4), resume=True)
    with pytest.raises(ParallelismValueError, match="Resume needs a load_path or autoresume"):
        Resume()
    with pytest.raises(ParallelismValueError, match="load_weights_only says what to load from load_path"):
        Resume(autoresume=True, load_weights_only=True)
    with pytest.raises(ParallelismTypeError, match=r"write \['model'\]"):
        Resume(load_path="x", load_ignore_keys="model")


def averages_read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The averages at the end of a run, those of the next, and the tensors that it read in full."""
    first, second = EMA("2ba"), EMA("2ba")
    run(folder, "2ba", first)
    with mock.patch.object(Opened, "_tensor", autospec=True, side_effect=Opened._tensor) as read:
        trainer(folder, second, resume=True)
    return full_each(first.averages), full_each(second.averages), [call.args[1] for call in read.mock_calls]


@pytest.mark.promise(100)
def test_averages_are_read_by_shards(world2: World, tmp_path: Path) -> None:
    for saved, loaded, whole_tensors in world2(averages_read, tmp_path):
        assert len(saved) == 4
        equal(loaded, saved)
        assert not [name for name in whole_tensors if "averages" in name]
