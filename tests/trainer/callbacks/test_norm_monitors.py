"""OptimizerMonitor and GradientNorm: the norms of whole tensors, however they are sharded."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.trainer import GradientNorm, MemoryMonitor, OptimizerMonitor
from tests.kit.phases import adamw
from tests.kit.training import batches, fitted_on_parts, on_sentences, tagger
from tests.kit.world import World

Logged = dict[str, list[float]]


def monitored(parts: list[int], config: Any = None) -> Logged:
    """The norms of two steps of AdamW, with clipping, of the tagger on this rank's parts."""
    options = {"max_duration": "2ba", "gradient_clipping": 0.01, "optimizers": partial(adamw, lr=0.1)}
    options["callbacks"] = [OptimizerMonitor("1ba"), GradientNorm()]
    return norms(fitted_on_parts(parts, config, **options)[1])


def norms(log: Any) -> Logged:
    return {name: log.values(name) for name in log.data if name.startswith("l2_norm/")}


def by_hand() -> Logged:
    """The same, written down without the Trainer."""
    model = tagger()
    optimizer = adamw(model, lr=0.1)
    found: dict[str, list[Tensor]] = {}

    def note(kind: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            found.setdefault(f"l2_norm/{kind}/{name}", []).append(tensor.norm())
        whole = torch.cat([tensor.flatten() for tensor in tensors.values()])
        found.setdefault(f"l2_norm/{kind}/global", []).append(whole.norm())

    for batch in batches([6], 0)[:2]:
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        named = dict(model.named_parameters())
        before = {name: p.detach().clone() for name, p in named.items()}
        note("grad", {name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        note("param", {name: p.detach().clone() for name, p in named.items()})
        note("update", {name: p.detach() - before[name] for name, p in named.items()})
        note("moment", {name: optimizer.state[p]["exp_avg"] for name, p in named.items()})
        note("second_moment", {name: optimizer.state[p]["exp_avg_sq"] for name, p in named.items()})
    return {name: [float(value) for value in values] for name, values in found.items()}


def assert_same(found: Logged, expected: Logged) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-4, abs=1e-9), name


def test_one_process_logs_the_norms_of_everything() -> None:
    found, expected = monitored([6]), by_hand()
    # Three callbacks know the global norm of the gradient: both monitors, and the clipping.
    assert found.pop("l2_norm/grad/global") == pytest.approx(
        [value for value in expected.pop("l2_norm/grad/global") for _ in range(3)], rel=1e-5
    )
    assert_same(found, expected)


@pytest.mark.parametrize("config", ["fsdp", "ddp"])
def test_shards_and_replicas_have_the_norms_of_the_whole(world2: World, config: str) -> None:
    expected = monitored([6])
    for found in world2(monitored, [4, 2], config):
        assert_same(found, expected)


def of_a_language_model(parts: list[int], config: Any = None, peers: int = 1) -> Logged:
    optimizers = partial(adamw, lr=0.01, eps=1e-3)  # so that rounding stays small
    options = {"optimizers": optimizers, "callbacks": OptimizerMonitor("1ba"), "max_duration": "2ba"}
    return norms(on_sentences(parts, config, peers, **options)[1])


def test_tensor_parallel_parameters_have_the_norms_of_the_whole(world2: World) -> None:
    expected = of_a_language_model([4])
    for found in world2(of_a_language_model, [4], {"mesh": {"dp_shard": 1, "tp": 2}, "tp": {}}, peers=2):
        assert_same(found, expected)


@pytest.mark.slow
def test_parameters_cut_both_ways_have_the_norms_of_the_whole(world4: World) -> None:
    config = {"mesh": {"dp_shard": 2, "tp": 2}, "tp": {}, "fsdp2": {}}
    expected = of_a_language_model([4])
    for found in world4(of_a_language_model, [2, 2], config, peers=2):
        assert_same(found, expected)


def test_global_norms_alone_at_intervals() -> None:
    callbacks = [OptimizerMonitor("2ba", per_parameter=False), GradientNorm("3ba")]
    _, log = fitted_on_parts([6], callbacks=callbacks)
    assert {name: [time.batch for time, _ in log.data[name]] for name in norms(log)} == {
        "l2_norm/grad/global": [2, 3, 4],
        "l2_norm/param/global": [2, 4],
        "l2_norm/update/global": [2, 4],
    }


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("12sp", [2, 4, 6, 8]),
        ("13sp", [3, 5, 7]),
        ("60tok", [2, 4, 6, 8]),
        ("1ep", [4, 8]),
        ("2ep", [8]),
        ("0.5dur", [4, 8]),
    ],
)
def test_an_interval_ends_with_the_batch_that_completes_it(interval: str, batches: list[int]) -> None:
    """Two epochs of four batches of 6 samples and 30 tokens."""
    monitors = [OptimizerMonitor(interval, False), GradientNorm(interval), MemoryMonitor(interval)]
    _, log = fitted_on_parts([6], callbacks=monitors, max_duration="2ep")
    seen = {name: sorted({time.batch for time, _ in values}) for name, values in log.data.items()}
    for name in ("l2_norm/update/global", "l2_norm/grad/global", "memory/host/rss/mean"):
        assert seen[name] == batches, name
