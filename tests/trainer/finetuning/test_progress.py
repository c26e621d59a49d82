"""Phases that end when a metric stops improving: the best weights return, and a resumed run is the same."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

from composer_dist.errors import CheckpointValueError, ParallelismKeyError
from composer_dist.trainer import Callback, CheckpointSaver, FineTuningPhases, NoImprovement, Phase, Resume
from tests.kit.compare import close, equal, full, same, weights
from tests.kit.grids import slow
from tests.kit.phases import DDP, DOWN, FSDP, HEAD, TP, UP, by_hand, everywhere, mine, phased, recorded
from tests.kit.training import At, Scores
from tests.kit.world import World

SCORES = (1, 3, 2, 2, 1, 1, 1, 1)
"""The second batch is the best."""


def by_score(patience: int = 2, **options: Any) -> NoImprovement:
    return NoImprovement(metric="metrics/eval/score", mode="max", patience=patience, **options)


BY_SCORE = (Phase("module.head", until=by_score()), Phase("rest"))


def watched(scores: Sequence[float], config: Any = None, *others: Callback) -> dict[str, Any]:
    """Options of a Trainer that evaluates after each batch."""
    callbacks = [Scores(*scores), *others]
    return {"callbacks": callbacks, "eval_interval": "1ba", "eval_dataloader": mine(config)[:1]}


def diverging() -> tuple[list[set[str]], list[str]]:
    scores = range(1, 9) if dist.get_rank() else range(8, 0, -1)
    phases = [Phase("module.head", until=by_score()), Phase("module.down", until=by_score()), Phase("rest")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = recorded(FineTuningPhases(phases, restore_best=False), FSDP, **watched(scores, FSDP))
    return [found.moved(batch) for batch in range(8)], [str(w.message) for w in caught]


@pytest.mark.promise(73)
def test_where_ranks_decide_differently_all_continue_and_are_warned_once(world2: World) -> None:
    for trained, messages in world2(diverging):
        assert trained == [{*HEAD}] * 3 + [{*HEAD, *DOWN}] * 3 + [{*HEAD, *DOWN, *UP}] * 2
        assert len([m for m in messages if "Ranks have different values of metrics/eval/score" in m]) == 1


def restored(config: Any) -> tuple[Any, list[float]]:
    schedule = [Phase("module.head", lr=0.05, until=by_score()), Phase("module.down", lr=0.02)]
    trainer, _, recorder, log = phased(schedule, config, **watched(SCORES, config))
    trainer.fit()
    return recorder, log.values("phases/phase")


@pytest.mark.promise(75)
@pytest.mark.parametrize("config", [None, FSDP, DDP, TP])
def test_a_phase_ends_with_its_best_weights(world2: World, config: Any) -> None:
    """Two batches after the best, the next phase continues from there, moments included."""
    expected = by_hand([(HEAD, 0.05, 2), (DOWN, 0.02, 4)], skipped=[2, 3])
    for found, phases in everywhere(world2, config, restored):
        assert phases == [0, 1]
        same(found.before[4], found.weights[1])
        assert not torch.equal(found.before[4][HEAD[0]], found.weights[3][HEAD[0]])
        for one, want in zip(found.weights[4:], expected[2:], strict=True):
            close(one, want)


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
    trainer, _, recorder, _ = phased(BY_SCORE, **watched(SCORES, None, *([] if first else [lent()])))
    trainer.callbacks += [lent()] if first else []
    trainer.fit()
    close(recorder.before[4], recorder.weights[1])


@pytest.mark.promise(75)
def test_without_restore_best_a_phase_continues_from_its_last_weights() -> None:
    found = recorded(FineTuningPhases(BY_SCORE, restore_best=False), **watched(SCORES))
    close(found.before[4], found.weights[3])


def test_the_last_phase_ends_the_training_with_the_best_weights_of_all() -> None:
    schedule = [Phase("module.head", until=by_score(1)), Phase("rest", lr=0.01, until=by_score(2))]
    trainer, _, recorder, _ = phased(schedule, **watched([3, 5, 2, 4, 1]))
    trainer.fit()
    assert len(recorder.weights) == 5
    close(weights(trainer.state.model), recorder.weights[1])  # nothing after it was better
    with pytest.warns(UserWarning, match="last phase has already ended"):
        trainer.fit()
    assert len(recorder.weights) == 5


@pytest.mark.promise(75)
def test_the_last_checkpoint_has_the_weights_with_which_the_training_ends(tmp_path: Path) -> None:
    """The fit ends after the fourth batch, which has been saved, with the weights of the second."""
    trainer, _, recorder, _ = phased([Phase("rest", until=by_score(2))], **watched(SCORES))
    trainer.callbacks.append(CheckpointSaver(tmp_path, "1ba"))
    trainer.fit()
    trainer.close()
    last = Resume(load_path=tmp_path / "latest", load_weights_only=True)
    again, _, _, _ = phased([Phase("rest")], resume=last)
    equal([weights(again.state.model), weights(trainer.state.model)], [recorder.weights[1]] * 2)


def test_at_most_bounds_a_phase_that_keeps_improving() -> None:
    schedule = [Phase("module.head", until=by_score(at_most="3ba")), Phase("rest")]
    found = recorded(schedule, **watched(range(8)))
    assert [len(found.moved(batch)) for batch in (2, 3)] == [2, 4]


def test_a_metric_that_is_not_logged_is_an_error_that_names_what_is() -> None:
    until = NoImprovement(metric="metrics/eval/scores", mode="max")
    with pytest.raises(ParallelismKeyError, match=r"no metric 'metrics/eval/scores'.*Did you mean 'metri"):
        recorded([Phase("module.head", until=until), Phase("rest")], **watched(range(8)))


RESUMED = (
    Phase("module.head", lr=0.05, until="2ba"),
    Phase("module.down", lr=0.02, until=by_score()),
    Phase("rest", lr=0.01),
)


def resumable(config: Any, first: int = 0, *others: Callback, **options: Any) -> Any:
    """A Trainer that will continue with batch number `first`.

    Phase 1 is best after its first batch, the third of all, and over after the fifth.
    """
    options |= watched((0, 0, 3, 2, 1, 9, 9, 9)[first:], config, *others)
    options |= {"max_duration": "8ba", "step_schedulers_every_batch": True}
    return phased(RESUMED, config, schedulers=lambda optimizer: StepLR(optimizer, 3, 0.5), **options)


def resumed(folder: Path, *batches: int, config: Any) -> None:
    saver = CheckpointSaver(folder, "1ba", filename="ba{batch}", keep=None, asynchronous=False)
    whole, _, expected, _ = resumable(config, 0, saver)
    whole.fit()
    for at, in_memory in [*((at, False) for at in batches), *([] if config else [(4, True)])]:
        second, phases, found, _ = resumable(config, at, resume=None if in_memory else folder / f"ba{at}")
        if in_memory:
            first, _, _, _ = resumable(config)
            first.fit(duration=f"{at}ba")
            second.load_state_dict(first.state_dict())
            second.state.model.load_state_dict(first.state.model.state_dict())
            second.state.optimizers[0].load_state_dict(first.state.optimizers[0].state_dict())
        assert phases.phase == (0 if at < 3 else 1 if at < 6 else 2)
        second.fit()
        assert phases.phase == 2
        assert found.rates == expected.rates[at:]
        equal(found.weights, expected.weights[at:])
        state, other = (t.state.optimizers[0].state_dict() for t in (second, whole))
        assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in other["param_groups"]]
        for number, values in other["state"].items():
            same(
                {key: full(torch.as_tensor(value)) for key, value in state["state"][number].items()},
                {key: full(torch.as_tensor(value)) for key, value in values.items()},
            )


@pytest.mark.promise(75)
@pytest.mark.parametrize("config", [slow(None), FSDP, slow(DDP), slow(TP)])
def test_resuming_in_any_phase_is_bit_equal(world2: World, tmp_path: Path, config: Any) -> None:
    """In phase 1 (4), with its best weights in the past; and just before (5) and after (6) a thaw."""
    everywhere(world2, config, resumed, tmp_path, *((4, 6) if config else range(1, 8)))


@pytest.mark.promise(75)
def test_a_checkpoint_of_other_phases_is_refused() -> None:
    trainer, _, _, _ = resumable(None)
    trainer.fit(duration="4ba")
    saved = trainer.state_dict()
    name = "FineTuningPhases/0"
    state = saved["callbacks"][name]
    phase_0 = {**state, "phase": 0, "parameters": state["parameters"][:1]}
    with pytest.raises(CheckpointValueError, match="training is in phase 1"):
        trainer.load_state_dict({**saved, "callbacks": {**saved["callbacks"], name: phase_0}})
    other, _, _, _ = phased([Phase("module.up", until="2ba"), Phase("rest")], schedulers=[])
    with pytest.raises(CheckpointValueError, match="another schedule"):
        other.load_state_dict({**saved, "schedulers": []})
