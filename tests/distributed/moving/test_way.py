"""Weights arrive the same by either way, and the way taken is said."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.errors import ParallelismError
from tests.distributed.moving.test_transfer import profiled
from tests.kit.preparable import built, config, values
from tests.kit.world import run

MIB = 1 << 20


def prepared(way: str, replicas: int, device: str) -> tuple[dict[str, torch.Tensor], str, int]:
    """All tensors, the way taken, and what this rank counts as moved."""
    model = built(device="cpu" if device == "cpu" and dist.get_rank() == 0 else "meta")
    done = parallelize_model(model, config(transport=way, replicas=replicas))
    return values(model), done.transport, done.bytes_moved


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_both_ways_bring_the_same(ranks: int, replicas: int, device: str) -> None:
    by_memory = run(prepared, ranks, "auto", replicas, device)
    by_messages = run(prepared, ranks, "messages", replicas, device)
    assert [way for _, way, _ in by_memory] == ["memory"] * ranks
    assert [way for _, way, _ in by_messages] == ["messages"] * ranks
    expected = by_messages[0][0]
    for found, _, moved in [*by_memory, *by_messages]:
        assert moved > 0
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


class Odd(nn.Module):
    """A weight that is not contiguous, so that it has no plain address, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.arange(35.0).view(5, 7))
        self.turned = nn.Parameter(torch.arange(35.0).view(5, 7).t())


def odd() -> dict[str, torch.Tensor]:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Odd()
    parallelize_model(model, config(transport="memory"))
    return values(model)


def test_what_has_no_address_goes_by_messages() -> None:
    expected = Odd()
    for found in run(odd, 2):
        assert torch.equal(found["plain"], expected.plain)
        assert torch.equal(found["turned"], expected.turned)


def unreadable(way: str) -> str:
    """Rank 1 cannot read rank 0's memory, as if it were on another host."""
    real, peer_memory.can_read = peer_memory.can_read, lambda beacon: dist.get_rank() == 0
    try:
        return prepared(way, 1, "cpu")[1]
    except ParallelismError as error:
        return str(error)
    finally:
        peer_memory.can_read = real


def test_one_rank_elsewhere_means_messages_for_all_unless_memory_was_asked_for() -> None:
    assert run(unreadable, 2, "auto") == ["messages", "messages"]
    refused = run(unreadable, 2, "memory")
    assert refused[0] == refused[1]
    assert refused[0].startswith("transport='memory' was asked for, but ranks [1] cannot read")


def peak_while_reading() -> int:
    """Bytes that rank 1 allocates beyond its shard while 64 MiB are delivered."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Linear(4096, 4096, bias=False)
    way = config(transport="memory", bucket_bytes=1 * MIB)
    return profiled(lambda: parallelize_model(model, way)) - 32 * MIB


def test_reading_takes_no_memory_beyond_the_shard() -> None:
    for extra in run(peak_while_reading, 2):
        assert extra <= 2 * MIB + 16 * MIB


def test_a_way_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="transport"):
        config(transport="pigeon")
