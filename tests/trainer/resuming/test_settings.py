"""What a resumed run says of settings that differ from its checkpoint's, and which of them count."""

from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.trainer import (
    CheckpointSaver,
    CosineAnnealingWithWarmupScheduler,
    GradientClipping,
    Resume,
    Trainer,
)
from tests.kit.training import classifier, loader, quiet
from tests.kit.world import World

pytestmark = pytest.mark.promise(106)


def trainer(folder: Path, kind: Any = AdamW, **options: Any) -> Trainer:
    """One that takes `lr` and the like for the optimizer."""
    names = ("lr", "weight_decay", "betas", "amsgrad", "momentum", "centered")
    own = {name: options.pop(name) for name in names if name in options}
    options = {"max_duration": "9ba", "train_dataloader": loader()} | options
    saver = CheckpointSaver(folder, "1ba", asynchronous=False)
    made, _ = quiet(optimizers=lambda model: kind(model.parameters(), **own), callbacks=saver, **options)
    return made


def begun(folder: Path, **options: Any) -> Trainer:
    """After three batches."""
    one = trainer(folder, **{"lr": 0.1} | options)
    one.fit(duration="3ba")
    return one


def table(caplog: pytest.LogCaptureFixture) -> dict[str, tuple[str, ...]]:
    """Setting to its value in the checkpoint, its value now, and which of them counts."""
    text = "\n".join(record.getMessage() for record in caplog.records)
    lines = (line.split() for line in text.splitlines()[2:] if line[-1] != ".")
    return {name: tuple(rest) for name, *rest in lines}


def rate(one: Trainer) -> float:
    return one.state.optimizers[0].param_groups[0]["lr"]


def test_nothing_is_said_if_nothing_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    trainer(tmp_path, lr=0.1, resume=True)
    assert caplog.records == []


def test_all_that_differs_is_in_one_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    changed = {"precision": "amp_bf16", "gradient_clipping": 1.0, "max_duration": "20ba"}
    found = trainer(tmp_path, lr=0.2, train_dataloader=loader(batch_size=6), resume=True, **changed)
    assert table(caplog) == {
        "optimizer.lr": ("0.1", "0.2", "checkpoint"),
        "max_duration": ("9ba", "20ba", "config"),
        "precision": ("None", "amp_bf16", "config"),
        "gradient_clipping": ("None", *str(GradientClipping.of(1.0)).split(), "config"),
        "batch_size": ("4", "6", "config"),
    }
    assert "resume with optimizer='config' (in YAML resume: {optimizer: config})." in caplog.text
    assert rate(found) == 0.1
    found.fit(duration="1ba")
    caplog.clear()
    trainer(tmp_path, lr=0.2, train_dataloader=loader(batch_size=6), resume=True, **changed)
    assert table(caplog) == {"optimizer.lr": ("0.1", "0.2", "checkpoint")}  # what counted is recorded


def test_the_optimizers_options_are_the_configs_if_it_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = begun(tmp_path)
    resume = Resume(autoresume=True, optimizer="config")
    two = trainer(tmp_path, lr=0.2, weight_decay=0.5, resume=resume)
    assert table(caplog) == {
        "optimizer.lr": ("0.1", "0.2", "config"),
        "optimizer.weight_decay": ("0.01", "0.5", "config"),
    }
    assert (rate(two), two.state.optimizers[0].param_groups[0]["weight_decay"]) == (0.2, 0.5)
    moments = [next(iter(one.state.optimizers[0].state.values()))["exp_avg"] for one in (first, two)]
    assert moments[0].equal(moments[1])  # the state is the checkpoint's


@pytest.mark.parametrize(
    ("kind", "option"), [(AdamW, {"amsgrad": True}), (RMSprop, {"momentum": 0.9, "centered": True})]
)
def test_an_option_that_needs_more_state_begins_with_zeros(
    tmp_path: Path, kind: Any, option: dict[str, Any]
) -> None:
    begun(tmp_path, kind=kind)
    found = trainer(tmp_path, kind, **option, resume=Resume(autoresume=True, optimizer="config"))
    state = next(iter(found.state.optimizers[0].state.values()))
    kept = {"max_exp_avg_sq", "momentum_buffer", "grad_avg"} & state.keys()
    assert len(kept) == len(option)
    assert not any(state[name].any() for name in kept)
    found.fit(duration="1ba")
    assert all(state[name].any() for name in kept)


@pytest.mark.parametrize("kind", [StepLR, CosineAnnealingWithWarmupScheduler])
def test_a_new_learning_rate_continues_its_schedule(tmp_path: Path, kind: Any) -> None:
    def schedulers(optimizer: Any) -> Any:
        return StepLR(optimizer, 2, 0.5) if kind is StepLR else CosineAnnealingWithWarmupScheduler("0ba")

    options = {"schedulers": schedulers, "step_schedulers_every_batch": True}
    begun(tmp_path / "a", **options)
    expected = trainer(tmp_path / "a", lr=0.1, resume=True, **options)
    begun(tmp_path / "b", **options)
    for optimizer in (AdamW, SGD):  # also one that starts afresh
        resume = Resume(autoresume=True, optimizer="config")
        found = trainer(tmp_path / "b", optimizer, lr=0.3, resume=resume, **options)
        rates = []
        for one in (expected, found):
            one.fit(duration="1ba")
            rates.append(rate(one))
        assert rates[1] == pytest.approx(3 * rates[0])
        expected = trainer(tmp_path / "a", lr=0.1, resume=True, **options)


def test_another_class_cannot_take_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    for kind in (SGD, Adam):
        with pytest.raises(CheckpointValueError, match=r"is AdamW, and .* is .* \{optimizer: config\}"):
            trainer(tmp_path, kind, lr=0.1, resume=True)
    found = trainer(tmp_path, SGD, lr=0.3, resume=Resume(autoresume=True, optimizer="config"))
    assert table(caplog)["optimizer"] == ("AdamW", "SGD", "config")
    assert found.state.timestamp.batch == 3
    assert not found.state.optimizers[0].state
    assert rate(found) == 0.3
    found.fit(duration="1ba")
    with pytest.raises(CheckpointValueError, match="is SGD, and this run's is AdamW"):
        trainer(tmp_path, lr=0.1, resume=True)
    ignoring = Resume(autoresume=True, load_ignore_keys=["optimizer"])
    assert not trainer(tmp_path, lr=0.1, resume=ignoring).state.optimizers[0].state
    with pytest.raises(ParallelismValueError, match="'checkpoint' or 'config', not 'both'"):
        Resume(autoresume=True, optimizer="both")  # type: ignore[arg-type]


def test_another_scheduler_cannot_take_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"schedulers": lambda optimizer: StepLR(optimizer, 2), "step_schedulers_every_batch": True}
    begun(tmp_path, **options)
    options["schedulers"] = lambda optimizer: ExponentialLR(optimizer, 0.9)
    with pytest.raises(CheckpointValueError, match="is StepLR, and this run's is ExponentialLR"):
        trainer(tmp_path, lr=0.1, resume=True, **options)
    options["schedulers"] = lambda optimizer: StepLR(optimizer, 5)
    trainer(tmp_path, lr=0.1, resume=True, **options)
    assert table(caplog) == {"scheduler.step_size": ("2", "5", "checkpoint")}


def test_load_checkpoint_refuses_the_state_of_another_kind(tmp_path: Path) -> None:
    model = classifier()
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": AdamW(model.parameters())})
    with pytest.raises(CheckpointValueError, match="another kind of optimizer than SGD: its .* amsgrad"):
        load_checkpoint(tmp_path / "c", {"model": model, "optimizer": SGD(model.parameters())})


def prepared(folder: Path, config: str | None) -> str:
    one = trainer(folder, lr=0.1, parallelism_config=config, check_sampler=False, resume=True)
    if one.resumed_from is None:
        one.fit(duration="1ba")
    return one.state.settings["parallelism"]


def test_parallelism_is_a_setting(world2: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert world2(prepared, tmp_path, "fsdp") == ["sharding, dp_shard 2"] * 2
    trainer(tmp_path, lr=0.1, resume=True)
    assert "sharding, dp_shard 2  none    config" in caplog.text
