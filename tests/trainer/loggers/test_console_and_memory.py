"""The logger and its destinations."""

import io

import pytest
import torch

from composer_dist.errors import ParallelismKeyError
from composer_dist.trainer import ConsoleLogger, InMemoryLogger, Logger, State
from composer_dist.trainer.clock import Time, Timestamp
from tests.kit.training import At, classifier, fitted


def test_the_logger_reaches_every_destination_and_the_state() -> None:
    now = State(model=classifier(), device=torch.device("cpu"))
    destinations = [InMemoryLogger(), InMemoryLogger()]
    logger = Logger(now, destinations)
    logger.log_metrics({"loss": torch.tensor(0.5)})
    now.timestamp = now.timestamp.next_batch()
    logger.log_metrics({"loss": 0.25})
    logger.log_hyperparameters({"seed": 3})
    for destination in destinations:
        assert destination.data == {"loss": [(Timestamp(), 0.5), (now.timestamp, 0.25)]}
        assert destination.values("loss") == [0.5, 0.25]
        assert destination.hyperparameters == {"seed": 3}
    assert now.metric_values == {"loss": 0.25}
    with pytest.raises(ParallelismKeyError, match="'loss' was never logged. Logged metrics: none"):
        InMemoryLogger().values("loss")


def test_the_console_prints_every_interval() -> None:
    stream = io.StringIO()
    now = State(model=classifier(), device=torch.device("cpu"))
    console = ConsoleLogger("2ba", stream=stream)
    logger = Logger(now, [console])
    for batch in range(1, 5):
        now.timestamp = Timestamp(batch=batch)
        logger.log_metrics({"loss": torch.tensor(1.0 / batch), "lr": 0.1})
        console.batch_end(now, logger)
    first, second = ["[epoch 1, batch 2]", "  loss  0.5"], ["[epoch 1, batch 4]", "  loss  0.25"]
    assert stream.getvalue().splitlines() == [*first, "  lr    0.1", *second, "  lr    0.1"]


def test_the_console_prints_once_per_epoch_and_on_rank_0_only() -> None:
    for rank, lines in ((0, 3), (1, 0)):
        stream = io.StringIO()
        on_rank = At(init=lambda state, rank=rank: setattr(state, "rank", rank))
        fitted(loggers=ConsoleLogger("1ep", stream=stream), callbacks=on_rank, max_duration="3ep")
        assert stream.getvalue().count("loss/train/total") == lines
        heads = [line.split(",")[0] for line in stream.getvalue().splitlines() if line.startswith("[epoch")]
        assert heads[-lines:] == ["[epoch 1", "[epoch 2", "[epoch 3"][:lines]


@pytest.mark.promise(98)
def test_loss_rate_and_speed_are_logged() -> None:
    _, log = fitted()
    assert log.values("lr-SGD/group0") == [0.1] * 3
    rates = "batches_per_sec", "samples_per_sec", "device/batches_per_sec", "device/samples_per_sec"
    assert {name for name in log.data if "throughput" in name} == {f"throughput/{rate}" for rate in rates}
    times = [time for time, _ in log.data["loss/train/total"]]
    assert [time.get("sp") for time in times] == [Time.of(f"{n}sp") for n in (4, 8, 12)]
    assert log.hyperparameters["max_duration"] == "1ep"
