"""Fine-tuning in phases gives what a plain loop that freezes and thaws gives, however it is parallel."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.names import canonical_name
from composer_dist.trainer import FineTuningPhases, Phase
from tests.kit.compare import close, equal
from tests.kit.grids import slow
from tests.kit.phases import (
    BATCHES,
    DDP,
    DOWN,
    FSDP,
    HEAD,
    PHASES,
    TP,
    UP,
    Recorder,
    by_hand,
    everywhere,
    mine,
    net,
    phased,
    recorded,
)
from tests.kit.training import seen_at
from tests.kit.world import World

MICROBATCHES = {"device_train_microbatch_size": 1}


def check(found: Recorder) -> None:
    head, down, up = set(HEAD), set(DOWN), set(UP)
    expected = by_hand()
    assert len(found.weights) == len(expected) == BATCHES
    for batch in range(BATCHES):
        assert found.moved(batch) == (head if batch < 3 else head | down if batch < 5 else head | down | up)
        close(found.weights[batch], expected[batch])
        # The last phase has no rate of its own: its parameter goes back to the group that it left.
        assert found.rates[batch] == ([0.05] if batch < 3 else [0.05, 0.02])


@pytest.mark.promise(69, 70)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, {}),
        slow(FSDP, {}),
        (FSDP, MICROBATCHES),
        (FSDP, MICROBATCHES | {"accumulate": "unsharded"}),
        slow(DDP, {}),
        (DDP, MICROBATCHES),
        (TP, {}),
    ],
)
def test_phases_train_as_a_plain_loop_does(world2: World, config: Any, options: dict[str, Any]) -> None:
    results = everywhere(world2, config, recorded, **options)
    for found in results:
        assert found.sharded is (config in (FSDP, TP))
        check(found)
    equal(results[-1].weights, results[0].weights)


def mixed_precision() -> None:
    """A unit that was all frozen reduces, and steps, in the right dtypes after its thaw."""
    policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    config = {"fsdp2": {"mixed_precision": policy}, "rules": [{"match": "module.down", "shard": True}]}
    found, expected = recorded(config=config), by_hand()[-1]
    assert found.moved(5) == {*HEAD, *DOWN, *UP}
    assert {value.dtype for value in found.weights[-1].values()} == {torch.float32}
    close(found.weights[-1], expected, rtol=0.1, atol=0.05)


@pytest.mark.promise(69)
def test_thawed_units_keep_their_mixed_precision(world2: World) -> None:
    world2(mixed_precision)


@pytest.mark.promise(72)
def test_everything_but_phase_0_is_frozen_and_out_of_the_optimizer_at_the_start() -> None:
    trainer, phases, _, _ = phased()
    names = {parameter: name for name, parameter in trainer.state.model.named_parameters()}
    (group,) = trainer.state.optimizers[0].param_groups
    assert [names[p] for p in group["params"]] == phases.parameters[0] == list(HEAD)
    assert [name for p, name in names.items() if p.requires_grad] == list(HEAD)
    assert [*phases.parameters[1], *phases.parameters[2]] == [*DOWN, *UP]


@pytest.mark.promise(72)
def test_without_enforcement_groups_stay_and_a_warning_says_what_that_means() -> None:
    with pytest.warns(UserWarning, match=r"module\.up\.weight stay in .* lr of phase 0, 1 has no effect"):
        found = recorded(FineTuningPhases(PHASES, reduce_optimizers=False))
    assert found.moved(0) == set(HEAD)
    assert found.moved(7) == {*HEAD, *DOWN, *UP}
    assert set(map(len, found.rates)) == {1}


@pytest.mark.promise(72)
def test_no_decay_takes_names_and_patterns() -> None:
    trainer, _, _, _ = phased(FineTuningPhases(PHASES, no_decay="re:.*bias"))
    trainer.fit()
    groups = trainer.state.optimizers[0].param_groups
    assert [(g["weight_decay"], len(g["params"])) for g in groups] == [(0.1, 2), (0.0, 1), (0.1, 1)]
    with pytest.raises(ParallelismValueError, match="'biases' matches no parameter"):
        phased(FineTuningPhases(PHASES, no_decay=["biases"]))


@pytest.mark.promise(71)
def test_a_schedule_that_does_not_match_is_refused_when_the_trainer_is_built() -> None:
    model = net()
    with pytest.raises(ParallelismValueError, match="'head' matches no parameter"):
        phased([Phase("head", until="1ba"), Phase("rest")], model=model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def different_schedules() -> None:
    rank = dist.get_rank()
    with pytest.raises(ParallelismValueError, match="Ranks 0 and 1 have different phases"):
        phased([Phase("module.head", until="1ba"), Phase("rest" if rank else "module.up")], FSDP)
    with pytest.raises(ParallelismValueError, match="'nowhere' matches no parameter"):
        phased([Phase("nowhere" if rank else "module.head")], FSDP)


@pytest.mark.promise(71)
def test_ranks_with_different_schedules_raise_alike(world2: World) -> None:
    world2(different_schedules)


def reports(*rules: Rule) -> list[str]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composer_dist").addHandler(handler)
    try:
        schedule = [Phase("module.head", until="1ba"), Phase(["module.up", "module.down"], lr=0.1)]
        phased(schedule, ParallelismConfig(fsdp2=FSDP2Config(), rules=rules), train_dataloader=None)
    finally:
        logging.getLogger("composer_dist").removeHandler(handler)
    return found


@pytest.mark.promise(74)
def test_groups_that_mix_sharded_and_plain_parameters_are_reported_by_phase(world2: World) -> None:
    (line,), other = world2(reports, Rule("module.down", shard=False))
    assert line.startswith("Phase 1: module.down.weight: plain among the sharded parameters")
    assert "without Rule(shard=False)" in line
    assert other == []  # rank 0 reports for all
    assert world2(reports) == [[], []]  # the root is sharded


def running_means(policy: Any, config: Any) -> list[torch.Tensor]:
    """The batch norm's running mean after each batch."""
    phases = [Phase("module.head", until="3ba"), Phase(["module.norm", "rest"])]
    model = net(norm=True)
    means, seen = seen_at("batch_end", lambda _: model.get_buffer("module.norm.running_mean").clone())
    options = {"eval_dataloader": mine(config), "eval_interval": "2ba", "callbacks": [seen]}
    recorded(FineTuningPhases(phases, frozen_batch_norm=policy), config, model, **options)
    return means


@pytest.mark.promise(77)
@pytest.mark.parametrize("config", [None, slow(FSDP), DDP])
def test_frozen_batch_norms_track_or_are_fixed(world2: World, config: Any) -> None:
    for tracked in everywhere(world2, config, running_means, "track"):
        assert len({float(mean.sum()) for mean in tracked}) == BATCHES
    for fixed in everywhere(world2, config, running_means, "fixed"):
        assert [float(mean.abs().sum()) for mean in fixed[:3]] == [0, 0, 0]
        assert len({float(mean.sum()) for mean in fixed[2:]}) == BATCHES - 2


@pytest.mark.promise(77)
@pytest.mark.parametrize(("apply", "rate"), [(False, 0.02), (True, 0.01)])
def test_a_lambda_scheduler_warns_unless_it_is_to_be_applied(apply: bool, rate: float) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = recorded(
            FineTuningPhases(PHASES, apply_lambdas=apply),
            schedulers=lambda optimizer: LambdaLR(optimizer, lambda batch: 0.5 if batch else 1.0),
            step_schedulers_every_batch=True,
        )
    assert [str(w.message)[:19] for w in caught] == ([] if apply else ["Phase 1: LambdaLR c"])
    assert found.rates[-1] == pytest.approx([0.025, rate])


def wrapped() -> dict[str, torch.Tensor]:
    config = {"fsdp2": {}, "rules": [{"match": "module.down", "act_ckpt": "wrapped"}]}
    trainer, phases, recorder, _ = phased(config=config)
    assert any("_checkpoint_wrapped_module" in name for name, _ in trainer.state.model.named_parameters())
    assert phases.parameters == [list(HEAD), list(DOWN), list(UP)]
    trainer.fit()
    return {canonical_name(name): value for name, value in recorder.weights[-1].items()}


@pytest.mark.promise(78)
def test_clean_names_match_modules_that_checkpointing_has_wrapped(world2: World) -> None:
    for found in world2(wrapped):
        close(found, by_hand()[-1])


@pytest.mark.promise(76)
def test_without_a_schedule_the_default_one_is_used_and_written(tmp_path: Path) -> None:
    path = tmp_path / "phases.yaml"
    trainer, phases, _, _ = phased(FineTuningPhases(write_to=path))
    assert phases.parameters == [list(HEAD), [*UP, *DOWN]]
    again = FineTuningPhases(path)
    phased(again)
    assert again.phases == phases.phases
    trainer.fit()
    assert phases.phase == 0  # the last phase would begin with the second epoch
