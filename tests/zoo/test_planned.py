"""Plans against real prepared models: a tenth of the cells that `make accuracy` fills."""

import pytest

from tests.kit.world import run
from tests.zoo.planned import ARCHITECTURES, WAYS, held_by_plan_and_rank, sent_by_plan_and_rank


@pytest.mark.promise(111)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_rank_holds_is_what_the_plan_says(way: str) -> None:
    for name in ("llama", "gpt2", "mixtral"):
        assert set(run(held_by_plan_and_rank, max(WAYS[way].worlds), name, way)) == {"equal"}, name


@pytest.mark.promise(112)
@pytest.mark.parametrize("way", ["FSDP2", "HSDP", "DDP", "TP", "FSDP2 x TP", "CP"])
def test_what_a_rank_sends_is_what_the_plan_says(way: str) -> None:
    for name in ("llama", "gpt2", "mixtral"):
        assert set(run(sent_by_plan_and_rank, max(WAYS[way].worlds), name, way)) == {"equal"}, name


def test_a_mode_that_does_not_suit_a_model_is_refused_with_the_reason() -> None:
    refused = run(held_by_plan_and_rank, 2, "bert", "TP")
    assert all(one.startswith("refused: TPConfig(plan='auto') cannot place") for one in refused)
    assert len(ARCHITECTURES) == 30
