"""Agreement through the store: one verdict everywhere, also where ranks err, differ, leave or die."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composer_dist._torch import get_default_store
from composer_dist.distributed.ranks import agreement as module
from composer_dist.distributed.ranks import line, process_group, waiting
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import (
    CheckpointKeyError,
    ParallelismError,
    ParallelismKeyError,
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)
from tests.kit.compare import fails_alike
from tests.kit.grids import crossed
from tests.kit.world import WorkerError, on_ranks, run

pytestmark = pytest.mark.promise(108)

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


def test_one_rank_needs_no_process_group() -> None:
    decide = {"sum": sum, "first": min}
    verdict = Agreement().reach("x", 3, lambda findings: {n: f(findings) for n, f in decide.items()})
    assert verdict == {"sum": 3, "first": 3}
    assert caught(body, Agreement(), {0: ValueError("bad")}) == (ParallelismValueError, "ValueError: bad")


@on_ranks(4)
def test_findings_reach_the_first_rank_in_order_and_its_verdict_reaches_all() -> None:
    agreement = Agreement()
    for _ in range(3):
        verdict = agreement.reach("x", dist.get_rank() * 10, lambda all_: {"order": all_})
        assert verdict == {"order": [0, 10, 20, 30]}


@on_ranks(2)
def test_a_rank_that_comes_first_asks_once() -> None:
    reads, answer = [], line.Line.read_all

    def counted(self: line.Line, keys: Sequence[str], there: bool) -> Any:
        reads.append(there)
        return answer(self, keys, there)

    for first in (0, 1):
        with mock.patch.multiple(line, _MOMENT=SHORT * 60), mock.patch.object(line.Line, "read_all", counted):
            time.sleep(0.05 * (dist.get_rank() != first))
            Agreement().reach("x", None)
        assert reads == [True]
        reads.clear()


def test_a_store_whose_wait_looks_at_intervals_is_polled(tmp_path: Path) -> None:
    file, tcp = dist.FileStore(str(tmp_path / "store"), 1), dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert [line.wakes(dist.PrefixStore("a", store)) for store in (file, tcp)] == [False, True]


BAD = ValueError("bad")
NO_MEMORY = "Rank 1: MemoryError: no memory was left for it on this host (at 'a step')"


@pytest.mark.parametrize(
    ("ranks", "errors", "kind", "text"),
    [
        (2, {1: BAD}, ParallelismValueError, "Rank 1: ValueError: bad (at 'a step')"),
        (2, {1: TypeError("bad")}, ParallelismTypeError, "Rank 1: TypeError: bad (at 'a step')"),
        (2, {1: KeyError("bad")}, ParallelismKeyError, "Rank 1: KeyError: 'bad' (at 'a step')"),
        (2, {1: MemoryError()}, ParallelismRuntimeError, NO_MEMORY),
        (2, {1: ParallelismValueError("ours")}, ParallelismValueError, "Rank 1: ours (at 'a step')"),
        (2, {1: CheckpointKeyError("ours")}, CheckpointKeyError, "Rank 1: ours (at 'a step')"),
        (4, dict.fromkeys(range(4), BAD), ParallelismValueError, "ValueError: bad"),
        (
            4,
            {1: BAD, 2: TypeError("worse"), 3: BAD},
            ParallelismValueError,
            "Ranks 1, 3: ValueError: bad\nRank 2: TypeError: worse (at 'a step')",
        ),
    ],
)
@on_ranks("ranks")
def test_errors_are_merged_and_raised_on_all_ranks_with_kind_and_text(
    ranks: int, errors: dict[int, BaseException], kind: type, text: str
) -> None:
    assert caught(body, Agreement(), errors) == (kind, text)


@pytest.mark.parametrize("users", [True, False])
@on_ranks(2)
def test_all_ranks_know_whether_the_users_code_raised_an_error(users: bool) -> None:
    lookups: dict[bool, Callable[[], int]] = {True: lambda: {}["a"], False: partial({}.__getitem__, "a")}
    with pytest.raises(ParallelismKeyError, match="^Rank 1: KeyError: 'a' \\(at 'a step'\\)$") as error:
        Agreement().each("a step", lookups[users] if dist.get_rank() == 1 else int)
    assert (error.type, error.value.of_users_code) == (ParallelismKeyError, users)


@on_ranks(4)
def test_an_error_does_not_wait_for_the_ranks_that_are_still_on_their_way() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 2:  # comes only when the others have the verdict
        store.wait(["over"], timedelta(seconds=30))
    with mock.patch.object(module, "GRACE", timedelta(seconds=0.1)):
        result = caught(body, Agreement(), {1: BAD})
    store.set("over", "")
    assert result == (ParallelismValueError, "Rank 1: ValueError: bad (at 'a step')")


@on_ranks(2)
def test_the_first_ranks_decision_may_raise_for_all() -> None:
    def decide(findings: list[Any]) -> None:
        raise ValueError("no")

    assert caught(Agreement().reach, "x", 1, decide) == (ParallelismValueError, "ValueError: no")


def again() -> None:
    agreement = Agreement()
    caught(body, agreement, {1: BAD})
    caught(body, Agreement(), {0: BAD})
    assert agreement.reach("x", dist.get_rank(), lambda all_: all_) == [0, 1]


def test_agreements_go_on_after_a_failure_and_after_a_new_process_group() -> None:
    run(again, 2)
    run(again, 2)


@on_ranks(2)
def test_ranks_at_different_steps_are_told_who_is_where() -> None:
    with fails_alike(ParallelismRuntimeError, "Rank 1 is at 'step 1' while rank 0 is at 'step 0'"):
        Agreement().reach(f"step {dist.get_rank()}", None)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named_on_all_others(absent: int) -> None:
    results = run(without, 4, absent)
    present = [result for rank, result in enumerate(results) if rank != absent]
    assert len(set(present)) == 1
    kind, text = present[0]
    assert issubclass(kind, ParallelismRuntimeError)
    assert text.startswith(f"Rank {absent} did not answer within")
    assert "'a step'" in text


def without(absent: int) -> tuple[type, str]:
    if dist.get_rank() == absent:
        return type(None), ""
    with mock.patch.object(line, "MARGIN", SHORT):
        return caught(body, Agreement(timeout=SHORT), {})


@on_ranks(2, timeout=45)
def test_the_limit_is_that_of_the_process_group() -> None:
    assert Agreement().timeout.total_seconds() == 45


@crossed({"interrupted": [0, 1], "where": ["body", "wait", "collective", "outside"]})
def test_ctrl_c_on_one_rank_leaves_nobody_waiting(interrupted: int, where: str) -> None:
    results = run(interrupting, 2, interrupted, where)
    assert results[interrupted] == (KeyboardInterrupt, "")
    kind, text = results[1 - interrupted]
    step = (
        "" if where == "outside" else " (at 'work')" if where in ("collective", "wait") else " (at 'a step')"
    )
    assert (kind, text) == (ParallelismRuntimeError, f"Rank {interrupted}: KeyboardInterrupt{step}")
    run(again, 2)


def interrupting(interrupted: int, where: str) -> tuple[type, str]:
    agreement = Agreement()
    mine = dist.get_rank() == interrupted

    def interrupt(seconds: float = 0) -> None:
        get_default_store().set("interrupted", "")
        raise KeyboardInterrupt

    def work() -> None:
        if where == "collective":
            agreement.collectively("work", interrupt if mine else dist.barrier)
        elif where == "wait":
            if not mine:
                get_default_store().wait(["interrupted"])
            with mock.patch.object(waiting.time, "sleep", interrupt if mine else waiting.time.sleep):
                agreement.reach("work", None)
        elif where == "outside" and mine:
            agreement.leave(KeyboardInterrupt())
            interrupt()
        body(agreement, {interrupted: KeyboardInterrupt()} if where == "body" else {})

    return caught(work)


@on_ranks(4)
def test_a_failure_among_collectives_is_raised_on_all() -> None:
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

    assert caught(both) == (ParallelismRuntimeError, "Rank 2: MemoryError: no room (at 'work')")


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_dies_is_reported_by_all_survivors_alike(victim: int) -> None:
    with pytest.raises(WorkerError) as failure:
        run(dying, 4, victim)
    assert list(failure.value.errors) == [victim]
    assert "exit code 17" in failure.value.errors[victim]
    survivors = list(failure.value.results.values())
    assert len(survivors) == 3
    assert len(set(survivors)) == 1
    kind, text = survivors[0]
    assert issubclass(kind, ParallelismError)
    assert f"Rank {victim}" in text
    assert "'work'" in text


def dying(victim: int) -> tuple[type, str]:
    def work() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == victim:
            os._exit(17)
        dist.all_reduce(torch.ones(1))

    with mock.patch.multiple(module, GRACE=timedelta(seconds=1), MARGIN=timedelta(seconds=1)):
        return caught(Agreement().collectively, "work", work)


@on_ranks(2)
def test_the_store_does_not_grow() -> None:
    agreement = Agreement()
    agreement.reach("warm up", None)
    before = keys()
    for number in range(20):
        assert agreement.reach("a step", number, sum) == 2 * number
    assert keys() <= before + 2


@on_ranks(2)
def test_findings_and_verdicts_may_be_longer_than_what_the_store_takes() -> None:
    agreement, long = Agreement(), 9 << 20
    agreement.reach("warm up", None)
    before = keys()
    mine = str(dist.get_rank()) * long
    found = agreement.reach("a step", mine, lambda texts: [len(texts[0]), texts[1]])
    assert found == [long, "1" * long]
    assert agreement.reach("the next step", 1, sum) == 2
    assert keys() <= before + 2


def keys() -> int:
    """How many there are in the store."""
    dist.barrier()
    count: int = Agreement().place()[0].num_keys()
    dist.barrier()
    return count


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_rank_0_does_not_end_before_the_others_have_read_its_verdict(fails: bool) -> None:
    read, key = Agreement._await_verdict, "rank 1 has read"
    store = get_default_store()

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        verdict = read(*args)
        store.set(key, "")
        return verdict

    with mock.patch.object(Agreement, "_await_verdict", slow):
        found, text = caught(
            Agreement().reach, "a step", 7, error=ParallelismValueError("no") if fails else None
        )
        assert (found, text) == ((ParallelismValueError, "no") if fails else (type(None), ""))
    if dist.get_rank() == 0:
        process_group.destroy()  # a store that rank 0 hosts would end soon after
        assert store.check([key])


@on_ranks(2)
def test_rank_0_does_not_wait_long_for_readers_that_do_not_come() -> None:
    Agreement().reach("a step", None)
    if dist.get_rank() == 0:
        line.judged["", (0, 1)].judged += 1
        start = time.monotonic()
        with mock.patch.object(line, "MARGIN", SHORT):
            line.await_readers()
        assert 0.4 < time.monotonic() - start < 4
        line.await_readers()  # of nothing
