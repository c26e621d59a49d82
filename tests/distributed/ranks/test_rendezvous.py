"""Ranks that meet at a store on which earlier ones have left their traces."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from composer_dist.distributed.ranks.launcher_variables import VARIABLES
from composer_dist.distributed.ranks.rendezvous import agreed_name, meeting_place
from composer_dist.errors import ParallelismRuntimeError

pytestmark = pytest.mark.promise(105)


def names(store: HashStore, ranks: Sequence[int], world: int) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: agreed_name(store, rank, world), ranks))


def test_every_meeting_has_a_name_of_its_own_and_the_world_may_shrink_and_grow() -> None:
    store = HashStore()
    attempts = [names(store, range(world), world) for world in (3, 2, 1, 4)]
    assert [len(set(attempt)) for attempt in attempts] == [1, 1, 1, 1]
    assert len({attempt[0] for attempt in attempts}) == 4


def test_ranks_that_come_before_rank_0_believe_no_earlier_one() -> None:
    store = HashStore()
    (old,) = set(names(store, range(3), 3))
    found = names(store, [2, 1, 0], 3)
    assert len(set(found)) == 1
    assert found[0] != old


def test_who_did_not_come_is_named() -> None:
    store = HashStore()
    names(store, range(4), 4)
    store.set_timeout(timedelta(milliseconds=300))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(agreed_name, store, 2, 4)
        with pytest.raises(
            ParallelismRuntimeError, match=r"Of 4 ranks, ranks 1, 3 did not arrive within 0.3 s"
        ):
            agreed_name(store, 0, 4)
    assert len(second.result()) == 32
    with pytest.raises(ParallelismRuntimeError, match="Rank 0 did not answer rank 3 within 0.3 s"):
        agreed_name(store, 3, 4)


def test_a_port_in_use_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks on several hosts; on one, `loopback` says it."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in zip(VARIABLES, ("localhost.invalid", port, "0", "2"), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(ParallelismRuntimeError, match=rf"port {port} of .*set MASTER_PORT to a free one"):
            meeting_place(timedelta(seconds=1))


def test_a_rank_beyond_the_world_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "2",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    text = "RANK is 2, but WORLD_SIZE is 2: ranks have the numbers from 0 to 1"
    with pytest.raises(ParallelismRuntimeError, match=text):
        meeting_place()
