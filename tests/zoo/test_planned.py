"""Plans against real prepared models: some of the cells that `make accuracy` fills."""

import itertools

import pytest

from tests.kit.grids import in_the_default_run
from tests.kit.world import run
from tests.zoo.planned import ARCHITECTURES, WAYS, held_by_plan_and_rank, sent_by_plan_and_rank

MODELS = ("llama", "gpt2", "mixtral")
HELD = [("FSDP2", "mixtral"), ("DDP", "gpt2"), ("TP", "llama"), ("CP", "llama")]
SENT = [("DDP", "mixtral"), ("TP", "llama"), ("CP", "gpt2")]


def ranks_of(way: str, name: str, usual: list[tuple[str, str]]) -> int:
    """As few as there are more than one in the default run, and as many as possible in the slow one."""
    worlds = WAYS[way].worlds
    return min(one for one in worlds if one > 1) if (way, name) in usual else max(worlds)


@pytest.mark.promise(111)
@pytest.mark.parametrize(("way", "name"), in_the_default_run(*HELD, among=itertools.product(WAYS, MODELS)))
def test_what_a_rank_holds_is_what_the_plan_says(way: str, name: str) -> None:
    assert set(run(held_by_plan_and_rank, ranks_of(way, name, HELD), name, way)) == {"equal"}


@pytest.mark.promise(112)
@pytest.mark.parametrize(
    ("way", "name"),
    in_the_default_run(*SENT, among=itertools.product(["HSDP", *(way for way, _ in SENT)], MODELS)),
)
def test_what_a_rank_sends_is_what_the_plan_says(way: str, name: str) -> None:
    assert set(run(sent_by_plan_and_rank, ranks_of(way, name, SENT), name, way)) == {"equal"}


def test_a_mode_that_does_not_suit_a_model_is_refused_with_the_reason() -> None:
    refused = run(held_by_plan_and_rank, 2, "bert", "TP")
    assert all(one.startswith("refused: TPConfig(plan='auto') cannot place") for one in refused)
    assert len(ARCHITECTURES) == 30
