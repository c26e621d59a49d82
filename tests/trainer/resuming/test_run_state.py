"""A Trainer remembers its clock, schedulers and callbacks from one process to the next."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.trainer import Callback, Trainer
from tests.kit.training import loader, quiet


class Counter(Callback):
    """Counts batches, also over processes."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def batch_end(self, state: Any, logger: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def halved(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def trainer(*callbacks: Callback, schedulers: Any = halved) -> Trainer:
    options = {"callbacks": callbacks, "schedulers": schedulers, "step_schedulers_every_batch": True}
    return quiet(train_dataloader=loader(), **options)[0]


@pytest.mark.promise(100)
def test_clock_schedulers_and_callbacks_resume() -> None:
    first = trainer(Counter(), Counter(10))
    first.fit(duration="4ba")
    saved = first.state_dict()
    assert saved["callbacks"] == {"Counter/0": {"count": 4}, "Counter/1": {"count": 14}}
    counters = Counter(), Counter()
    second = trainer(*counters)
    second.load_state_dict(saved)
    assert second.state.timestamp == first.state.timestamp
    assert [counter.count for counter in counters] == [4, 14]
    assert second.state.schedulers[0].state_dict() == first.state.schedulers[0].state_dict()
    names = "state", "schedulers", "callbacks"
    assert [second.state_dict()[name] for name in names] == [saved[name] for name in names]


def test_a_state_that_does_not_match_is_refused() -> None:
    saved = trainer(Counter()).state_dict()
    with pytest.raises(CheckpointValueError, match="had 1 of torch's schedulers, .* has 0: pass"):
        trainer(Counter(), schedulers=None).load_state_dict(saved)
    with pytest.raises(ParallelismValueError, match="a Trainer state: missing or unknown keys: callbacks"):
        trainer().load_state_dict({"state": {}, "schedulers": []})
    with pytest.raises(ParallelismValueError, match="Not a Trainer state: .* timestamp"):
        trainer(Counter()).load_state_dict(saved | {"state": {}})
    with pytest.warns(UserWarning, match="states of Counter/0 are not used"):
        trainer().load_state_dict(saved)
