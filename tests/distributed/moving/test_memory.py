"""Reading a sibling's memory, and being told when that cannot be."""

import os

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.distributed.moving.memory import Beacon, Range
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.world import run


def read_from_rank_0(numel: int) -> tuple[bool, bool, bool]:
    """Rank 1 reads a tensor of rank 0's, all of it and in thousands of ranges."""
    source = torch.arange(numel, dtype=torch.int32) if dist.get_rank() == 0 else torch.empty(0)
    with peer_memory.readable_by_siblings():
        beacon = Beacon()
        shown = [None, None]
        dist.all_gather_object(shown, {**beacon.describe(), "source": source.data_ptr()})
        readable = peer_memory.can_read(shown[0])
        whole, pieces = torch.zeros(2, numel, dtype=torch.int32)
        if dist.get_rank() == 1:
            pid, address = shown[0]["pid"], shown[0]["source"]
            peer_memory.read(pid, [Range(address, whole.data_ptr(), numel * 4)])
            peer_memory.read(
                pid, [Range(address + 4 * i, pieces.data_ptr() + 4 * i, 4) for i in range(numel)]
            )
        dist.barrier()
    expected = torch.arange(numel, dtype=torch.int32)
    return readable, torch.equal(whole, expected), torch.equal(pieces, expected)


def test_a_sibling_is_read_whole_and_in_pieces():
    assert run(read_from_rank_0, 2, 3001)[1] == (True, True, True)


def test_ranges_are_cut_to_the_kernels_limits(monkeypatch):
    monkeypatch.setattr(peer_memory, "_MAX_BYTES", 10)
    batches = list(peer_memory._batches([Range(0, 100, 25), Range(50, 200, 3)]))
    assert batches == [
        [Range(0, 100, 10)],
        [Range(10, 110, 10)],
        [Range(20, 120, 5), Range(50, 200, 3)],
    ]


def test_a_process_can_read_itself_but_not_a_wrong_beacon():
    beacon = Beacon()
    shown = beacon.describe()
    assert peer_memory.can_read(shown)
    assert not peer_memory.can_read({**shown, "bytes": "00" * 16})


def test_a_process_that_does_not_exist_is_an_error_with_its_number():
    gone = 2**22 - 1  # above the default pid_max
    with pytest.raises(ParallelismRuntimeError, match=f"process {gone} failed: No such process"):
        peer_memory.read(gone, [Range(0, torch.zeros(1).data_ptr(), 4)])


def test_an_address_that_is_not_mapped_is_an_error():
    with pytest.raises(ParallelismRuntimeError, match="Bad address"):
        peer_memory.read(os.getpid(), [Range(8, torch.zeros(1).data_ptr(), 4)])


def test_where_the_system_has_no_such_call_nothing_is_readable(monkeypatch):
    monkeypatch.setattr(peer_memory, "_libc", lambda: None)
    assert not peer_memory.can_read(Beacon().describe())
    with pytest.raises(ParallelismRuntimeError, match="no process_vm_readv"):
        peer_memory.read(os.getpid(), [])


def test_only_contiguous_host_memory_has_an_address():
    tensor = torch.zeros(2, 3)
    assert peer_memory.address_of(tensor, tensor.dtype) == tensor.data_ptr()
    assert peer_memory.address_of(tensor.t(), tensor.dtype) is None
    assert peer_memory.address_of(tensor, torch.bfloat16) is None
    assert peer_memory.address_of(torch.zeros(2, device="meta"), torch.float32) is None
