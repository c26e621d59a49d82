"""Agreement through the store: one verdict everywhere, also where ranks err, differ, leave or die."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed.ranks import agreement as module
from composer_dist.distributed.ranks import waiting
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import (
    CheckpointKeyError,
    ParallelismError,
    ParallelismKeyError,
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)
from tests.kit.world import WorkerError, run

SHORT = timedelta(seconds=0.5)


def caught(function: Any, *args: Any, **kwargs: Any) -> tuple[type, str]:
    """What a call raises: type and text."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return type(error), str(error)
    return type(None), ""


def body(agreement: Agreement, errors: dict[int, BaseException], step: str = "a step") -> None:
    with agreement.together(step):
        if error := errors.get(dist.get_rank() if dist.is_initialized() else 0):
            raise error


def test_findings_reach_the_first_rank_in_order_and_its_verdict_reaches_all() -> None:
    def decide(findings: list[int]) -> dict[str, Any]:
        return {"sum": sum(findings), "first": findings[0]}

    assert Agreement().reach("x", 3, decide) == {"sum": 3, "first": 3}  # one rank, no process group
    assert run(summed, 4) == [{"order": [0, 10, 20, 30]}] * 4


def summed() -> Any:
    agreement = Agreement()
    for _ in range(3):
        verdict = agreement.reach("x", dist.get_rank() * 10, lambda all_: {"order": all_})
    return verdict


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("bad"), ParallelismValueError, "Rank 1: ValueError: bad"),
        (TypeError("bad"), ParallelismTypeError, "Rank 1: TypeError: bad"),
        (KeyError("bad"), ParallelismKeyError, "Rank 1: KeyError: 'bad'"),
        (MemoryError(), ParallelismRuntimeError, "Rank 1: MemoryError"),
        (ParallelismValueError("ours"), ParallelismValueError, "Rank 1: ours"),
        (CheckpointKeyError("ours"), CheckpointKeyError, "Rank 1: ours"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_with_its_kind_and_text(
    error: BaseException, kind: type, text: str
) -> None:
    assert run(failing, 2, {1: error}) == [(kind, text)] * 2


def failing(errors: dict[int, BaseException]) -> tuple[type, str]:
    return caught(body, Agreement(), errors)


def test_errors_of_several_ranks_are_merged() -> None:
    same = {rank: ValueError("bad") for rank in range(4)}
    assert run(failing, 4, same) == [(ParallelismValueError, "ValueError: bad")] * 4
    mixed = {1: ValueError("bad"), 2: TypeError("worse"), 3: ValueError("bad")}
    text = "Ranks 1, 3: ValueError: bad\nRank 2: TypeError: worse"
    assert run(failing, 4, mixed) == [(ParallelismValueError, text)] * 4
    assert caught(body, Agreement(), {0: ValueError("bad")}) == (ParallelismValueError, "ValueError: bad")


def test_an_error_does_not_wait_for_the_ranks_that_are_still_on_their_way() -> None:
    expected = (ParallelismValueError, "Rank 1: ValueError: bad")
    assert run(one_late, 4) == [expected] * 4


def one_late() -> tuple[type, str]:
    module.GRACE = timedelta(seconds=0.1)
    if dist.get_rank() == 2:  # comes only when the others have the verdict
        dist.distributed_c10d._get_default_store().wait(["over"], timedelta(seconds=30))
    result = caught(body, Agreement(), {1: ValueError("bad")})
    dist.distributed_c10d._get_default_store().set("over", "")
    module.GRACE = timedelta(seconds=4)
    return result


def test_the_first_ranks_decision_may_raise_for_all() -> None:
    assert run(refusing, 2) == [(ParallelismValueError, "ValueError: no")] * 2


def refusing() -> tuple[type, str]:
    def decide(findings: list[Any]) -> None:
        raise ValueError("no")

    return caught(Agreement().reach, "x", 1, decide)


def test_agreements_go_on_after_a_failure_and_after_a_new_process_group() -> None:
    assert run(again, 2) == [[0, 1]] * 2
    assert run(again, 2) == [[0, 1]] * 2


def again() -> Any:
    agreement = Agreement()
    caught(body, agreement, {1: ValueError("bad")})
    caught(body, Agreement(), {0: ValueError("bad")})
    return agreement.reach("x", dist.get_rank(), lambda all_: all_)


def test_ranks_at_different_steps_are_told_who_is_where() -> None:
    kind, text = run(elsewhere, 2)[0]
    assert kind is ParallelismRuntimeError
    assert text.startswith("Rank 1 is at 'step 1' while rank 0 is at 'step 0'")
    assert len(set(run(elsewhere, 2))) == 1


def elsewhere() -> tuple[type, str]:
    return caught(Agreement().reach, f"step {dist.get_rank()}", None)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named_on_all_others(absent: int) -> None:
    results = run(without, 4, absent)
    present = [result for rank, result in enumerate(results) if rank != absent]
    assert len(set(present)) == 1
    kind, text = present[0]
    assert kind is ParallelismRuntimeError
    assert text.startswith(f"Rank {absent} did not answer within")
    assert "'a step'" in text


def without(absent: int) -> tuple[type, str]:
    module.MARGIN = SHORT
    result = (type(None), "")
    if dist.get_rank() != absent:
        result = caught(body, Agreement(timeout=SHORT), {})
    module.MARGIN = timedelta(seconds=4)
    return result


def test_the_limit_is_that_of_the_process_group() -> None:
    assert run(limit, 2, timeout=45) == [45.0, 45.0]


def limit() -> float:
    return Agreement().timeout.total_seconds()


@pytest.mark.parametrize("interrupted", [0, 1])
@pytest.mark.parametrize("where", ["body", "wait", "collective", "outside"])
def test_ctrl_c_on_one_rank_leaves_nobody_waiting(interrupted: int, where: str) -> None:
    results = run(interrupting, 2, interrupted, where)
    assert results[interrupted] == (KeyboardInterrupt, "")
    assert results[1 - interrupted] == (ParallelismRuntimeError, f"Rank {interrupted}: KeyboardInterrupt")
    assert run(again, 2) == [[0, 1]] * 2


def interrupting(interrupted: int, where: str) -> tuple[type, str]:
    agreement = Agreement()
    mine = dist.get_rank() == interrupted

    def work() -> None:
        if where == "collective":
            agreement.collectively("work", lambda: one_leaves(mine))
        elif where == "wait":
            if mine:
                waiting.time.sleep = interrupt  # type: ignore[assignment]
            agreement.reach("work", None)
        elif where == "outside" and mine:
            agreement.leave(KeyboardInterrupt())
            raise KeyboardInterrupt
        body(agreement, {interrupted: KeyboardInterrupt()} if where == "body" else {})

    def one_leaves(mine: bool) -> None:
        if mine:
            raise KeyboardInterrupt
        dist.barrier()

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    sleep = waiting.time.sleep
    try:
        return caught(work)
    finally:
        waiting.time.sleep = sleep


def test_a_failure_among_collectives_is_raised_on_all() -> None:
    results = run(broken, 4)
    assert set(results) == {(ParallelismRuntimeError, "Rank 2: MemoryError: no room")}


def broken() -> tuple[type, str]:
    """Rank 2 fails between two collectives; rank 3 gets through, and hears of it later."""
    agreement = Agreement()

    def work() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 2:
            raise MemoryError("no room")
        if dist.get_rank() != 3:
            dist.recv(torch.ones(1), src=3)  # never sent: they are called back

    def both() -> None:
        agreement.collectively("work", work)
        body(agreement, {})

    return caught(both)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_dies_is_reported_by_all_survivors_alike(victim: int) -> None:
    with pytest.raises(WorkerError) as failure:
        run(dying, 4, victim)
    assert list(failure.value.errors) == [victim]
    assert f"exit code {17}" in failure.value.errors[victim]
    survivors = list(failure.value.results.values())
    assert len(survivors) == 3
    assert len(set(survivors)) == 1
    kind, text = survivors[0]
    assert issubclass(kind, ParallelismError)
    assert f"Rank {victim}" in text
    assert "'work'" in text


def dying(victim: int) -> tuple[type, str]:
    module.GRACE = module.MARGIN = timedelta(seconds=1)
    agreement = Agreement()

    def work() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == victim:
            os._exit(17)
        dist.all_reduce(torch.ones(1))

    result = caught(agreement.collectively, "work", work)
    module.GRACE = module.MARGIN = timedelta(seconds=4)
    return result
