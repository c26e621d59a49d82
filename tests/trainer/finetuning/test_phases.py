"""Fine-tuning in phases gives what a plain loop that freezes and thaws gives, however it is parallel."""

import copy
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, StepLR

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.errors import CheckpointValueError, ParallelismKeyError, ParallelismValueError
from composer_dist.structure.names import canonical_name
from composer_dist.trainer import Callback, CheckpointSaver, FineTuningPhases, NoImprovement, Phase
from tests.kit.compare import close, weights
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
    adamw,
    by_hand,
    data,
    mine,
    net,
    phased,
)
from tests.kit.training import At, Scores, quiet
from tests.kit.world import World

Weights = dict[str, torch.Tensor]


def moved(history: list[Weights], batch: int) -> set[str]:
    """The parameters that batch number `batch` changed, by any bit."""
    before = history[batch - 1] if batch else weights(net())
    return {name for name in before if not torch.equal(before[name], history[batch][name])}


def run(config: Any, **options: Any) -> tuple[list[Weights], list[list[float]], bool]:
    trainer, _, recorder, _ = phased(config=config, **options)
    sharded = any(isinstance(p, DTensor) for p in trainer.state.model.parameters())
    trainer.fit()
    trainer.close()
    return recorder.weights, recorder.rates, sharded


def check(found: list[Weights], rates: list[list[float]]) -> None:
    head, down, up = set(HEAD), set(DOWN), set(UP)
    expected = by_hand()
    assert len(found) == len(expected) == BATCHES
    for batch in range(BATCHES):
        trained = head if batch < 3 else head | down if batch < 5 else head | down | up
        assert moved(found, batch) == trained, batch
        close(found[batch], expected[batch])
        # The last phase has no rate of its own: its parameter goes back to the group that it left.
        assert rates[batch] == ([0.05] if batch < 3 else [0.05, 0.02])


MICROBATCHES = {"device_train_microbatch_size": 1}


@pytest.mark.promise(69, 70)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, {}),
        (FSDP, {}),
        (FSDP, MICROBATCHES),
        (FSDP, MICROBATCHES | {"accumulate": "unsharded"}),
        (DDP, {}),
        (DDP, MICROBATCHES),
        (TP, {}),
    ],
)
def test_phases_train_as_a_plain_loop_does(world2: World, config: Any, options: dict[str, Any]) -> None:
    results = [run(None)] if config is None else world2(run, config, **options)
    for found, rates, sharded in results:
        assert sharded is (config in (FSDP, TP))
        check(found, rates)
    for one, other in zip(results[0][0], results[-1][0], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def mixed_precision() -> None:
    """A unit that was all frozen reduces, and steps, in the right dtypes after its thaw."""
    policy = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    config = {"fsdp2": {"mixed_precision": policy}, "rules": [{"match": "module.down", "shard": True}]}
    trainer, _, recorder, _ = phased(config=config)
    trainer.fit()
    assert moved(recorder.weights, 5) == {*HEAD, *DOWN, *UP}
    expected = by_hand()[-1]
    for name, value in recorder.weights[-1].items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, expected[name], rtol=0.1, atol=0.05)


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
        trainer, _, recorder, _ = phased(FineTuningPhases(PHASES, reduce_optimizers=False))
    trainer.fit()
    assert moved(recorder.weights, 0) == set(HEAD)
    assert moved(recorder.weights, 7) == {*HEAD, *DOWN, *UP}
    assert set(map(len, recorder.rates)) == {1}


@pytest.mark.promise(72)
def test_no_decay_takes_names_and_patterns() -> None:
    trainer, _, _, _ = phased(FineTuningPhases(PHASES, no_decay="re:.*bias"))
    trainer.fit()
    groups = trainer.state.optimizers[0].param_groups
    assert [(g["weight_decay"], len(g["params"])) for g in groups] == [(0.1, 2), (0.0, 1), (0.1, 1)]
    with pytest.raises(ParallelismValueError, match="'biases' matches no parameter"):
        phased(FineTuningPhases(PHASES, no_decay=["biases"]))


@pytest.mark.promise(71)
def test_a_schedule_that_does_not_fit_is_refused_when_the_trainer_is_built() -> None:
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


def by_score(patience: int = 2, **options: Any) -> NoImprovement:
    return NoImprovement(metric="metrics/eval/score", mode="max", patience=patience, **options)


def watched(config: Any, scores: Scores, phases: Any, **options: Any) -> Any:
    """A Trainer that evaluates after each batch."""
    return phased(
        phases, config, callbacks=[scores], eval_interval="1ba", eval_dataloader=mine(config)[:1], **options
    )


def diverging() -> tuple[list[set[str]], list[str]]:
    scores = Scores(*([1, 2, 3, 4, 5, 6, 7, 8] if dist.get_rank() else [8, 7, 6, 5, 4, 3, 2, 1]))
    schedule = [Phase("module.head", until=by_score()), Phase("module.down", until=by_score()), Phase("rest")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _, recorder, _ = watched(FSDP, scores, FineTuningPhases(schedule, restore_best=False))
        trainer.fit()
    return [moved(recorder.weights, batch) for batch in range(BATCHES)], [str(w.message) for w in caught]


@pytest.mark.promise(73)
def test_where_ranks_decide_differently_all_go_on_and_are_warned_once(world2: World) -> None:
    for trained, messages in world2(diverging):
        assert trained[:3] == [set(HEAD)] * 3
        assert trained[3:6] == [{*HEAD, *DOWN}] * 3
        assert trained[6:] == [{*HEAD, *DOWN, *UP}] * 2
        assert len([m for m in messages if "Ranks have different values of metrics/eval/score" in m]) == 1


def reports(rules: tuple[Rule, ...]) -> list[str]:
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
    mixed = (Rule("module.down", shard=False),)
    report, other = world2(reports, mixed)
    (line,) = report
    assert line.startswith("Phase 1: module.down.weight: plain among the sharded parameters")
    assert "without Rule(shard=False)" in line
    assert other == []  # rank 0 speaks for all


@pytest.mark.promise(74)
def test_nothing_is_reported_where_the_root_is_sharded(world2: World) -> None:
    assert world2(reports, ()) == [[], []]


def restored(config: Any) -> tuple[list[Weights], list[Weights], list[float]]:
    schedule = [Phase("module.head", lr=0.05, until=by_score()), Phase("module.down", lr=0.02)]
    trainer, _, recorder, log = watched(config, Scores(1, 3, 2, 2, 1, 1, 1, 1), schedule)
    trainer.fit()
    return recorder.before, recorder.weights, log.values("phases/phase")


@pytest.mark.promise(75)
@pytest.mark.parametrize("config", [None, FSDP, DDP, TP])
def test_a_phase_ends_with_its_best_weights(world2: World, config: Any) -> None:
    """The second batch was the best; two later, the next phase goes on from there, moments included."""
    expected = by_hand([(HEAD, 0.05, 2), (DOWN, 0.02, 4)], skipped=[2, 3])
    results = [restored(None)] if config is None else world2(restored, config)
    for before, after, phases in results:
        assert phases == [0, 1]
        for name, best in after[1].items():
            assert torch.equal(before[4][name], best)
        assert not torch.equal(before[4][HEAD[0]], after[3][HEAD[0]])
        for found, want in zip(after[4:], expected[2:], strict=True):
            close(found, want)


def lent() -> At:
    """Gives the model other weights while it is evaluated, as an average of them does."""

    def head(state: Any) -> torch.Tensor:
        return state.model.get_parameter(HEAD[0]).detach()

    return At(
        eval_before_all=lambda state: head(state).add_(1), eval_after_all=lambda state: head(state).sub_(1)
    )


@pytest.mark.promise(75)
@pytest.mark.parametrize("first", [False, True])
def test_the_best_weights_are_those_that_were_trained(first: bool) -> None:
    phases = FineTuningPhases([Phase("module.head", until=by_score()), Phase("rest")])
    scores, recorder, model = Scores(1, 3, 2, 2, 1, 1, 1, 1), Recorder(), net()
    trainer, _ = quiet(
        model,
        optimizers=adamw(model),
        callbacks=[scores, *([phases, lent()] if first else [lent(), phases]), recorder],
        train_dataloader=data(),
        max_duration="1ep",
        eval_interval="1ba",
        eval_dataloader=data()[:1],
    )
    trainer.fit()
    close(recorder.before[4], recorder.weights[1])


@pytest.mark.promise(75)
def test_without_restore_best_a_phase_goes_on_from_its_last_weights() -> None:
    schedule = FineTuningPhases([Phase("module.head", until=by_score()), Phase("rest")], restore_best=False)
    trainer, _, recorder, _ = watched(None, Scores(1, 3, 2, 2, 1, 1, 1, 1), schedule)
    trainer.fit()
    close(recorder.before[4], recorder.weights[3])


def test_the_last_phase_ends_the_training_with_the_best_weights_of_all() -> None:
    schedule = [Phase("module.head", until=by_score(1)), Phase("rest", lr=0.01, until=by_score(2))]
    trainer, _, recorder, _ = watched(None, Scores(3, 5, 2, 4, 1), schedule)
    trainer.fit()
    assert len(recorder.weights) == 5
    close(weights(trainer.state.model), recorder.weights[1])  # nothing after it was better
    with pytest.warns(UserWarning, match="last phase has already ended"):
        trainer.fit()
    assert len(recorder.weights) == 5


def test_at_most_bounds_a_phase_that_improves_on() -> None:
    schedule = [Phase("module.head", until=by_score(at_most="3ba")), Phase("rest")]
    trainer, _, recorder, _ = watched(None, Scores(*range(8)), schedule)
    trainer.fit()
    assert [len(moved(recorder.weights, batch)) for batch in (2, 3)] == [2, 4]


def test_a_metric_that_is_not_logged_is_an_error_that_names_what_is() -> None:
    until = NoImprovement(metric="metrics/eval/scores", mode="max")
    trainer, _, _, _ = watched(None, Scores(*range(8)), [Phase("module.head", until=until), Phase("rest")])
    with pytest.raises(ParallelismKeyError, match=r"no metric 'metrics/eval/scores'.*Did you mean 'metri"):
        trainer.fit()


RESUMED = (
    Phase("module.head", lr=0.05, until="2ba"),
    Phase("module.down", lr=0.02, until=by_score()),
    Phase("rest", lr=0.01),
)
SCORES = (0, 0, 3, 2, 1, 9, 9, 9)
"""Phase 1 is best after its first batch, the third of all, and over after the fifth."""


def make_resumable(config: Any, first: int = 0, others: Sequence[Callback] = (), **options: Any) -> Any:
    """A Trainer that will go on with batch number `first`."""
    model = net()
    optimizer = adamw(model)
    return phased(
        RESUMED,
        config,
        lambda _: optimizer,
        model,
        callbacks=[*others, Scores(*SCORES[first:])],
        max_duration="8ba",
        eval_interval="1ba",
        eval_dataloader=mine(config)[:1],
        schedulers=StepLR(optimizer, 3, 0.5),
        step_schedulers_every_batch=True,
        **options,
    )


def interrupted(folder: Path) -> list[Weights]:
    saver = CheckpointSaver(folder, "2ba", filename="ba{batch}", keep=None, asynchronous=False)
    trainer, _, recorder, _ = make_resumable(FSDP, 0, [saver])
    trainer.fit()
    trainer.close()
    return recorder.weights


def goes_on(config: Any, folder: Path, at: int) -> list[Weights]:
    trainer, phases, recorder, _ = make_resumable(config, at, resume=folder / f"ba{at}")
    assert phases.phase == (1 if at == 4 else 2)
    trainer.fit()
    return recorder.weights


@pytest.mark.promise(75)
def test_a_checkpoint_in_the_middle_of_a_phase_goes_on_bit_for_bit(world2: World, tmp_path: Path) -> None:
    """Batch 4 is in phase 1, after its best weights and before they return."""
    expected = world2(interrupted, tmp_path, timeout=120)[0]
    for at in (4, 6):
        for found in world2(goes_on, FSDP, tmp_path, at):
            for mine_, want in zip(found, expected[at:], strict=True):
                assert all(torch.equal(mine_[name], want[name]) for name in want)


def resumed(config: Any, at: int) -> None:
    whole, _, expected, _ = make_resumable(config)
    whole.fit()
    first, _, _, _ = make_resumable(config)
    first.fit(duration=f"{at}ba")
    saved = copy.deepcopy(
        [first.state_dict(), first.state.model.state_dict(), first.state.optimizers[0].state_dict()]
    )
    second, phases, found, _ = make_resumable(config, at)
    second.load_state_dict(saved[0])
    second.state.model.load_state_dict(saved[1])
    second.state.optimizers[0].load_state_dict(saved[2])
    assert phases.phase == (0 if at < 3 else 1 if at < 6 else 2)
    second.fit()
    assert phases.phase == 2
    assert found.rates == expected.rates[at:]
    for mine_, want in zip(found.weights, expected.weights[at:], strict=True):
        assert all(torch.equal(mine_[name], want[name]) for name in want)
    state, other = (t.state.optimizers[0].state_dict() for t in (second, whole))
    assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in other["param_groups"]]
    torch.testing.assert_close(state["state"], other["state"], rtol=0, atol=0)


@pytest.mark.promise(75)
@pytest.mark.parametrize("at", range(1, 8))
def test_resuming_anywhere_is_bit_equal(at: int) -> None:
    """In phase 1 (4), with its best weights in the past; and just before (5) and after (6) a thaw."""
    resumed(None, at)


@pytest.mark.promise(75)
@pytest.mark.parametrize("config", [FSDP, DDP, TP])
def test_resuming_in_a_phase_is_bit_equal_when_parallel(world2: World, config: Any) -> None:
    world2(resumed, config, 4)


@pytest.mark.promise(75)
def test_a_checkpoint_of_other_phases_is_refused() -> None:
    trainer, _, _, _ = make_resumable(None)
    trainer.fit(duration="4ba")
    saved = trainer.state_dict()
    with pytest.raises(CheckpointValueError, match="training is in phase 1"):
        trainer.load_state_dict({**saved, "callbacks": phase_0_of(saved)})
    other, _, _, _ = phased([Phase("module.up", until="2ba"), Phase("rest")], schedulers=[])
    with pytest.raises(CheckpointValueError, match="another schedule"):
        other.load_state_dict({**saved, "schedulers": []})


def phase_0_of(saved: Any) -> Any:
    name = "FineTuningPhases/0"
    state = saved["callbacks"][name]
    return {**saved["callbacks"], name: {**state, "phase": 0, "parameters": state["parameters"][:1]}}


NORM = ("module.norm.weight", "module.norm.bias")


def batch_norms(config: Any, policy: str) -> list[torch.Tensor]:
    schedule = [Phase("module.head", until="3ba"), Phase(["module.norm", "rest"])]
    phases = FineTuningPhases(schedule, frozen_batch_norm=policy)  # type: ignore[arg-type]
    means: list[torch.Tensor] = []
    seen = At(
        batch_end=lambda state: means.append(state.model.get_buffer("module.norm.running_mean").clone())
    )
    options = {"eval_dataloader": mine(config), "eval_interval": "2ba"}
    trainer, _, _, _ = phased(phases, config, model=net(norm=True), callbacks=[seen], **options)
    trainer.fit()
    return means


@pytest.mark.promise(77)
@pytest.mark.parametrize("config", [None, FSDP, DDP])
def test_frozen_batch_norms_track_or_are_fixed(world2: World, config: Any) -> None:
    for tracked in [batch_norms(None, "track")] if config is None else world2(batch_norms, config, "track"):
        assert len({float(mean.sum()) for mean in tracked}) == BATCHES
    for fixed in [batch_norms(None, "fixed")] if config is None else world2(batch_norms, config, "fixed"):
        assert [float(mean.abs().sum()) for mean in fixed[:3]] == [0, 0, 0]
        assert len({float(mean.sum()) for mean in fixed[2:]}) == BATCHES - 2


@pytest.mark.promise(77)
def test_a_lambda_scheduler_warns_unless_it_is_to_be_applied() -> None:
    for apply, rate in ((False, 0.02), (True, 0.01)):
        model = net()
        optimizer = adamw(model)
        trainer, _, recorder, _ = phased(
            FineTuningPhases(PHASES, apply_lambdas=apply),
            None,
            lambda _, optimizer=optimizer: optimizer,
            model,
            schedulers=LambdaLR(optimizer, lambda batch: 0.5 if batch else 1.0),
            step_schedulers_every_batch=True,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit()
        assert [str(w.message)[:19] for w in caught] == ([] if apply else ["Phase 1: LambdaLR c"])
        assert recorder.rates[-1] == pytest.approx([0.025, rate])


def wrapped() -> list[Weights]:
    config = {"fsdp2": {}, "rules": [{"match": "module.down", "act_ckpt": "wrapped"}]}
    trainer, phases, recorder, _ = phased(config=config)
    assert any("_checkpoint_wrapped_module" in name for name, _ in trainer.state.model.named_parameters())
    assert phases.parameters == [list(HEAD), list(DOWN), list(UP)]
    trainer.fit()
    return [{canonical_name(name): value for name, value in one.items()} for one in recorder.weights]


@pytest.mark.promise(78)
def test_clean_names_match_modules_that_checkpointing_has_wrapped(world2: World) -> None:
    expected = by_hand()
    for found in world2(wrapped):
        close(found[-1], expected[-1])


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
