"""Speed and utilization."""

from typing import Any

import pytest
import torch

from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import SpeedMonitor
from composer_dist.trainer.speed.peak_flops import peak_flops, peak_of
from tests.kit.training import At, Clock, classifier, fitted, fitted_on_parts, on_sentences, quiet, raising
from tests.kit.world import World

TOKEN = 2 * (8 * 8 + 8 * 8 + 8 * 4)
"""FLOPs of the tagger's forward for a token; there is no product behind an embedding."""


def measured(parts: list[int], config: Any = None, size: int | None = None) -> tuple[Any, Any]:
    """Two epochs of four batches of six samples of five tokens, each of which takes two seconds."""
    monitor = SpeedMonitor(peak_flops=1e6, window_size=2)
    clock = At(init=lambda state: setattr(state.throughput, "clock", Clock(step=2)))
    options = {"max_duration": "2ep", "device_train_microbatch_size": size, "callbacks": [clock, monitor]}
    _, log = fitted_on_parts(parts, config, **options)
    return {name: log.values(name)[-1] for name in log.data if "throughput" in name}, monitor.state_dict()


@pytest.mark.parametrize("size", [None, 2])
def test_rates_flops_and_mfu_of_one_process(size: int | None) -> None:
    speed, remembered = measured([6], size=size)
    # The first layer's input needs a gradient too, because the embedding is trained.
    needed = 3.0 * TOKEN
    assert remembered == {"flops": [5 * needed, needed]}
    whole = {"batches_per_sec": 0.5, "samples_per_sec": 3, "tokens_per_sec": 15, "flops_per_sec": 15 * needed}
    assert speed == pytest.approx(
        {f"throughput/{name}": value for name, value in whole.items()}
        | {f"throughput/device/{name}": value for name, value in whole.items()}
        | {"throughput/device/mfu": 15 * needed / 1e6}
    )


CHECKPOINTED = ParallelismConfig.from_dict({"fsdp2": {}, "activation_checkpointing": True})


@pytest.mark.parametrize("config", ["fsdp", "ddp", CHECKPOINTED])
def test_two_ranks_share_the_flops_and_recomputing_is_none(world2: World, config: Any) -> None:
    expected, _ = measured([6])
    for speed, remembered in world2(measured, [3, 3], config):
        assert remembered == {"flops": [15.0 * TOKEN, 3.0 * TOKEN]}
        assert speed["throughput/flops_per_sec"] == pytest.approx(expected["throughput/flops_per_sec"])
        assert speed["throughput/device/samples_per_sec"] == pytest.approx(1.5)
        assert speed["throughput/device/mfu"] == pytest.approx(expected["throughput/device/mfu"] / 2)


def of_a_language_model(config: Any = None) -> list[float]:
    on_sentences([4], config, peers=2, callbacks=(own := SpeedMonitor(peak_flops=1e6)), max_duration="1ba")
    counted: list[float] = own.state_dict()["flops"]
    return counted


def test_ranks_that_share_a_matrix_count_it_once(world2: World) -> None:
    expected = of_a_language_model()
    linear = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48) + 32 * 50  # two layers and the head
    attention = 2 * 2 * 32 * 8
    assert expected[1] == pytest.approx(6 * linear + 2 * 3 * 2 * attention / 2, rel=0.1)
    for found in world2(of_a_language_model, {"mesh": {"dp_shard": 1, "tp": 2}, "tp": {}}):
        assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.promise(98)
def test_peaks_are_known_by_name_and_without_one_nothing_is_counted() -> None:
    _, log = fitted()
    assert not any("flops" in name or "mfu" in name for name in log.data)
    assert peak_flops(torch.device("cpu")) is None
    known = {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12}
    known |= {"NVIDIA L40S": 362e12, "Abacus 3": None, "NVIDIA RTX A1000": None}
    known |= {"NVIDIA A100-SXM4-40GB MIG 1g.5gb": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None}
    known |= {"NVIDIA GH200 480GB": 989e12, "Tesla T4": 65e12, "NVIDIA A10G": 70e12, "NVIDIA T400 4GB": None}
    assert {name: peak_of(name) for name in known} == known


def test_a_model_may_say_what_it_needs() -> None:
    model: Any = classifier()
    model.flops_per_batch = lambda batch: 100.0 * len(batch[0])
    fitted(model, callbacks=[own := SpeedMonitor(peak_flops=1e6)])
    assert own.state_dict() == {"flops": [100.0, 0.0]}
    later = SpeedMonitor()
    later.load_state_dict(own.state_dict())
    assert later.state_dict() == own.state_dict()


def test_a_compiled_model_is_not_counted_and_stays_compiled() -> None:
    model, calls = classifier(), list[Any]()
    model.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    with pytest.warns(UserWarning, match="flops_per_batch"):
        _, log = fitted(model, callbacks=SpeedMonitor(peak_flops=1e6))
    assert calls
    assert "throughput/device/mfu" not in log.data


def test_an_error_ends_the_counting() -> None:
    callbacks = [own := SpeedMonitor(peak_flops=1e6), At(before_loss=raising(ZeroDivisionError()))]
    with pytest.raises(ZeroDivisionError):
        fitted(callbacks=callbacks)
    assert own._count is None


def test_sizes_must_be_positive() -> None:
    for name in ("window_size", "peak_flops"):
        with pytest.raises(ParallelismValueError, match=name):
            SpeedMonitor(**{name: 0})


class Mine(SpeedMonitor):
    """The user's own."""


@pytest.mark.promise(98)
def test_a_subclass_stands_for_the_monitor() -> None:
    trainer, _ = quiet(callbacks=[Mine()])
    assert [type(one) for one in trainer.callbacks if isinstance(one, SpeedMonitor)] == [Mine]
