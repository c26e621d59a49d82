"""Rates over a window of batches."""

from composer_dist.trainer.clock import Timestamp
from composer_dist.trainer.speed.throughput import Rates, Throughput
from tests.kit.training import Clock


def test_rates_are_those_of_the_window() -> None:
    clock = Clock()
    throughput = Throughput(window=2, clock=clock)
    at = Timestamp()
    throughput.start(at)
    assert throughput.rates() is None
    found = []
    for seconds in (1.0, 2.0, 4.0):
        clock.now += seconds
        at = at.next_batch(samples=6, tokens=60)
        throughput.update(at)
        found.append(throughput.rates())
    assert found == [Rates(1, 6, 60), Rates(2 / 3, 4, 40), Rates(1 / 3, 2, 20)]


def test_pauses_do_not_count_and_start_forgets_what_was_before() -> None:
    clock = Clock()
    throughput = Throughput(clock=clock)
    throughput.start(Timestamp())
    clock.now = 1.0
    with throughput.pause():
        clock.now = 100.0
    clock.now = 101.0
    throughput.update(Timestamp(batch=1, sample=8))
    assert throughput.rates() == Rates(0.5, 4, 0)
    throughput.start(Timestamp(batch=1))
    assert throughput.rates() is None
