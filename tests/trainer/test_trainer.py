"""The Trainer on one process: durations, schedulers, seeds, arguments, interruptions."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from composer_dist.distributed.ranks.hangs import guard
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models import ComposerClassifier
from composer_dist.trainer import (
    Callback,
    CheckpointSaver,
    EarlyStopper,
    Event,
    Logger,
    LossScaling,
    State,
    Time,
    Trainer,
)
from tests.kit.compare import close, weights
from tests.kit.training import (
    Scores,
    classifier,
    fitted,
    fitted_on_parts,
    joined,
    loader,
    points,
    quiet,
    seen_at,
    sgd,
    tagged,
    tagger,
)
from tests.kit.world import World


def by_hand(epochs: int) -> dict[str, torch.Tensor]:
    """The weights after plain PyTorch training."""
    model = classifier()
    optimizer = sgd(model)
    for _ in range(epochs):
        for batch in loader():
            optimizer.zero_grad()
            model.loss(model(batch), batch).backward()
            optimizer.step()
    return weights(model)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (points()[index] for index in range(12))


@pytest.mark.promise(98)
@pytest.mark.parametrize("data", [loader(), DataLoader(Stream(), 4)])
def test_fit_is_plain_training_on_data_of_any_kind(data: Any) -> None:
    trainer, _ = fitted(train_dataloader=data, max_duration="2ep", device="cpu")
    close(weights(trainer.state.model), by_hand(2))
    at = trainer.state.timestamp
    assert (at.epoch, at.batch, at.sample, at.batch_in_epoch) == (2, 6, 24, 0)


@pytest.mark.promise(98)
@pytest.mark.parametrize(("duration", "batches"), [("1ep", 3), (2, 6), ("4ba", 4), ("9sp", 3), ("0.5dur", 5)])
def test_durations(duration: str | int, batches: int) -> None:
    trainer, _ = quiet(train_dataloader=loader(), max_duration="10ba")
    trainer.fit(duration=duration)
    assert trainer.state.timestamp.batch == batches


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("max_duration", "share", "batches"),
    [("1ep", "0.5dur", None), ("3ep", "0.5dur", None), ("10ba", "0.01dur", None), ("2ep", "0.5dur", 3)],
)
def test_a_share_of_epochs_that_is_not_whole_is_refused(
    max_duration: str, share: str, batches: int | None
) -> None:
    trainer, _ = quiet(train_dataloader=loader(), max_duration=max_duration)
    if batches is None:
        with pytest.raises(ParallelismValueError, match=f"of '{share}' .*Give the duration in batches"):
            trainer.fit(duration=share)
    else:
        trainer.fit(duration=share)
    assert trainer.state.timestamp.batch == (batches or 0)


@pytest.mark.promise(98)
def test_durations_in_tokens_and_seconds() -> None:
    trainer, _ = quiet(tagger(), train_dataloader=[joined(tagged(4)[1:])] * 5)
    trainer.fit(duration="2e1tok")
    assert (trainer.state.timestamp.batch, trainer.state.timestamp.token) == (2, 30)
    trainer.fit(duration="0.000001sec")
    assert 3 <= trainer.state.timestamp.batch <= 4


@pytest.mark.promise(98)
def test_fit_continues_in_the_middle_of_an_epoch() -> None:
    trainer, _ = quiet(train_dataloader=loader())
    seen = []
    for duration in ("2ba", "2ba", "1ep"):
        trainer.fit(duration=duration)
        seen.append((trainer.state.timestamp.epoch, trainer.state.timestamp.batch))
    assert seen == [(0, 2), (1, 4), (2, 6)]
    close(weights(trainer.state.model), by_hand(2))


def test_an_epoch_ends_with_its_last_batch_and_another_dataloader_starts_at_its_beginning() -> None:
    trainer, _ = fitted(max_duration="3ba")
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch_in_epoch) == (1, 0)
    trainer, _ = fitted(max_duration="2ba")
    trainer.fit(duration="1ep", train_dataloader=loader(8))
    assert (trainer.state.timestamp.epoch, trainer.state.timestamp.batch) == (1, 4)


def test_a_fit_needs_a_duration_data_and_optimizers() -> None:
    trainer, _ = quiet()
    with pytest.raises(ParallelismValueError, match="needs a train_dataloader"):
        trainer.fit(duration="1ba")
    with pytest.raises(ParallelismValueError, match="No training length given"):
        trainer.fit(train_dataloader=loader())
    with pytest.raises(ParallelismValueError, match="'0.5dur' is a share of max_duration"):
        trainer.fit(duration="0.5dur")
    with pytest.raises(ParallelismValueError, match="duration must be positive, not '0ba'"):
        trainer.fit(duration="0ba")
    with pytest.raises(ParallelismValueError, match="Training needs optimizers"):
        fitted(optimizers=None)
    with pytest.raises(
        ParallelismValueError, match=r"hold none of the model's trainable parameters \(.*weight"
    ):
        fitted(optimizers=Adam(classifier().parameters()))  # of another model
    done, _ = fitted(max_duration="1ba")
    with pytest.raises(ParallelismValueError, match="already reached max_duration='1ba'"):
        done.fit()


def test_arguments_that_cannot_work_are_refused() -> None:
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ParallelismTypeError, "needs a ComposerModel, not Linear", {"model": nn.Linear(2, 2)}),
        (ParallelismTypeError, "optimizers takes a Optimizer .* not str", {"optimizers": "adam"}),
        (ParallelismTypeError, "callbacks takes a Callback .* not int", {"callbacks": [1]}),
        (ParallelismTypeError, "loggers takes a LoggerDestination", {"loggers": Callback()}),
        (ParallelismValueError, "or None, not 'most'", {"device_train_microbatch_size": "most"}),
        (ParallelismValueError, "positive number .* not 0", {"device_train_microbatch_size": 0}),
        (ParallelismValueError, "'cuda:99' was asked for, but this machine offers", {"device": "cuda:99"}),
        (ParallelismValueError, "'amp_fp8' needs a parallelism_config", {"precision": "amp_fp8"}),
        (ParallelismValueError, "loss_scaling has an effect", {"loss_scaling": LossScaling()}),
        (ParallelismTypeError, "compile is True or .* not 'max'", {"compile": "max"}),
        (ParallelismTypeError, "schedulers takes schedulers .* not str", {"schedulers": "cosine"}),
        (ParallelismTypeError, "Several dataloaders need labels", {"eval_dataloader": [loader(), loader()]}),
        (ParallelismValueError, "Unknown precision 'bf16'", {"precision": "bf16"}),
        (ParallelismValueError, "eval_interval must be positive", {"eval_interval": "0ba"}),
        (ParallelismValueError, "'soon' is not a valid duration", {"max_duration": "soon"}),
        (ParallelismValueError, "hang_timeout='3ep' is not a positive time", {"hang_timeout": "3ep"}),
        (ParallelismValueError, "hang_timeout=0 is not a positive time", {"hang_timeout": 0}),
        (ParallelismValueError, "hang_timeout has no section 'train'; it", {"hang_timeout": {"train": 1}}),
    ]
    for kind, text, options in refused:
        with pytest.raises(kind, match=text):
            Trainer(**{"model": classifier(), "progress_bar": False} | options)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = classifier()
    with pytest.raises(ParallelismValueError, match=r"module.0.weight.* on the meta device"):
        quiet(model, optimizers=None)


def test_parameters_that_no_optimizer_has_are_named() -> None:
    with pytest.warns(UserWarning, match=r"module.2.weight, module.2.bias: trainable but in no"):
        fitted(optimizers=lambda model: sgd(model.module[0]))


def rates(every_batch: bool | None, duration: str) -> list[float]:
    _, log = fitted(
        optimizers=partial(sgd, lr=1.0),
        schedulers=lambda optimizer: [StepLR(optimizer, 1, gamma=0.5)],
        step_schedulers_every_batch=every_batch,
        max_duration=duration,
    )
    return log.values("lr-SGD/group0")


def test_schedulers_step_by_batches_or_epochs_and_one_that_would_never_move_is_warned_of() -> None:
    """What is logged of a batch is the rate that its step has used."""
    assert rates(True, "4ba") == [1.0, 0.5, 0.25, 0.125]
    assert rates(False, "4ba") == rates(None, "4ba") == [1.0, 1.0, 1.0, 0.5]
    for duration in ("1ep", "3ba"):
        with pytest.warns(UserWarning, match="the learning rate will not move"):
            rates(None, duration)
        assert rates(False, duration) == [1.0] * 3


def test_several_optimizers_all_step() -> None:
    model = classifier()
    first, second = sgd(model.module[0]), Adam(model.module[2].parameters())
    before = weights(model)
    _, log = fitted(model, optimizers=[first, second], max_duration="1ba")
    assert all(not torch.equal(before[name], value) for name, value in weights(model).items())
    assert {name for name in log.data if name.startswith("lr-")} == {"lr-SGD/group0", "lr-Adam/group0"}


def test_a_seed_repeats_a_run_with_dropout() -> None:
    def run(seed: int) -> list[float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        _, log = fitted(ComposerClassifier(module, num_classes=4), seed=seed)
        return log.values("loss/train/total")

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_bf16_computes_low_and_keeps_float32_weights() -> None:
    dtypes, seen = seen_at("after_forward", lambda state: state.outputs.dtype)
    for precision, dtype in [("amp_bf16", torch.bfloat16), ("fp32", torch.float32)]:
        trainer, _ = fitted(precision=precision, callbacks=seen)
        assert dtypes.pop() is dtype
        assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}


class Interrupted(Callback):
    """Ctrl-C, or an error, in the second batch; notes what is closed."""

    def __init__(self, error: type[BaseException] = KeyboardInterrupt, event: str = "after_loss") -> None:
        self.closed, self._error, self._event = 0, error, event

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        if event == self._event and state.timestamp.batch == 1 and not self.closed:
            raise self._error

    def close(self, state: Any, logger: Any) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("error", "event"),
    [
        *((KeyboardInterrupt, event) for event in ("after_dataloader", "after_loss", "after_train_batch")),
        (ValueError, "after_loss"),
    ],
)
def test_an_error_closes_callbacks_and_leaves_a_trainer_that_can_continue(
    error: type[BaseException], event: str
) -> None:
    """After Ctrl-C it trains the batch again; after an error, which may be the batch's, the next one."""
    callback = Interrupted(error, event)
    seen, note = seen_at("batch_end", lambda state: state.batch[0].tolist())
    trainer, log = quiet(callbacks=[callback, note], train_dataloader=(data := loader()))
    with pytest.raises(error):
        trainer.fit(duration="1ep")
    assert callback.closed == 1
    trainer.fit(duration="1ba")
    assert [time.batch for time, _ in log.data["loss/train/total"]] == [1, 2]
    first, second, *_ = [inputs.tolist() for inputs, _ in data]
    assert (seen[0] == first, seen[1] == second) == (True, error is KeyboardInterrupt)
    with quiet(callbacks=(callback := Interrupted()))[0]:
        assert callback.closed == 0
    assert callback.closed == 1  # by leaving the context


@pytest.mark.promise(98)
def test_a_config_prepares_the_model_in_a_world_of_one() -> None:
    model, duration = classifier(), Time.of("2ep")
    trainer, log = fitted(model, parallelism_config="fsdp", max_duration=duration, device="cpu")
    assert trainer.preparation is not None
    assert trainer.preparation.model is model
    close(weights(model), by_hand(2))
    assert len(log.values("loss/train/total")) == 6


@pytest.mark.promise(129)
def test_an_epoch_may_have_fewer_batches_than_the_data() -> None:
    trainer, log = fitted(
        train_dataloader=loader(24),
        eval_dataloader=loader(24),
        max_duration="2ep",
        train_subset_num_batches=2,
        eval_subset_num_batches=1,
    )
    assert (trainer.state.timestamp.batch, trainer.state.timestamp.epoch, trainer.state.train_length) == (
        4,
        2,
        2,
    )
    first = trainer.state.model.loss(trainer.state.model(batch := next(iter(loader(24)))), batch)
    assert log.values("loss/eval/total")[-1] == pytest.approx(first.item())
    whole, _ = fitted(train_dataloader=loader(4), max_duration="2ep", train_subset_num_batches=9)
    assert whole.state.timestamp.batch == 2
    everything, _ = fitted(train_subset_num_batches=-1)
    assert everything.state.timestamp.batch == 3
    with pytest.raises(ParallelismValueError, match="train_subset_num_batches must be a positive number"):
        quiet(train_subset_num_batches=0)
    with pytest.raises(ParallelismValueError, match=r"eval_subset_num_batches must be .*, not True\."):
        quiet(eval_subset_num_batches=True)


def subset() -> tuple[int, float]:
    trainer, log = fitted_on_parts([6, 10], "ddp", train_subset_num_batches=3, max_duration="2ep")
    return trainer.state.timestamp.batch, log.values("loss/train/total")[-1]


@pytest.mark.promise(129)
def test_a_subset_ends_the_epoch_on_all_ranks(world2: World) -> None:
    (batch, loss), (other, same_loss) = world2(subset)
    assert (batch, loss) == (other, same_loss)


@pytest.mark.promise(129)
def test_arguments_and_classes_with_composers_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"save_folder": tmp_path, "save_interval": "2ba", "max_duration": "4ba"}
    first, _ = fitted(**given)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ep0-ba2", "ep1-ba4", "latest"]
    again, _ = fitted(**given | {"autoresume": True, "max_duration": "5ba"})
    assert again.resumed_from == str(tmp_path / "ep1-ba4")
    assert f"Resuming from {again.resumed_from} after batch 4.\n" in capsys.readouterr().err
    loaded, _ = quiet(load_path=tmp_path / "ep1-ba4")
    same_weights = weights(loaded.state.model)
    assert all(torch.equal(same_weights[name], value) for name, value in weights(first.state.model).items())
    with pytest.raises(ParallelismValueError, match="either resume, or load_path and autoresume"):
        quiet(resume=tmp_path, load_path=tmp_path)
    with pytest.raises(ParallelismValueError, match="save_interval='2ba' needs a save_folder"):
        quiet(save_interval="2ba")
    other = CheckpointSaver(tmp_path / "other", None)
    both, _ = quiet(save_folder=tmp_path, autoresume=True, callbacks=other)
    assert both.resumed_from == str(tmp_path / "ep1-ba5")
    assert Time.from_timestring("3ep") == Time.of("3ep")
    stopper = EarlyStopper("score", "eval", torch.greater, patience=2)
    fitted(callbacks=[Scores(1, 2, 1, 1, 1), stopper], eval_dataloader=loader(4), max_duration="9ep")
    assert stopper.best == 2
    assert EarlyStopper("loss/eval/total", "eval")._monitor == "loss/eval/total"
    with pytest.raises(ParallelismValueError, match=r"comp must be torch\.less or torch\.greater"):
        EarlyStopper("score", "eval", max)


@pytest.mark.promise(108)
def test_callbacks_are_guarded_against_hangs_from_their_first_event_on() -> None:
    """So the other ranks report what a callback has raised on one of them."""
    seen = []

    class Looks(Callback):
        def init(self, state: State, logger: Logger) -> None:
            seen.extend(one.section for one in guard._guards)

    quiet(callbacks=Looks())
    assert seen == ["setup"]
