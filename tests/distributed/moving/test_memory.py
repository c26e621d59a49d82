"""Reading a sibling's memory, directly and by way of two host buffers, and errors where that cannot be."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.moving import memory as peer_memory
from composer_dist.distributed.moving import transport
from composer_dist.distributed.moving.memory import Beacon, Range, Staging
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import same, values
from tests.kit.measure import profiled
from tests.kit.meshes import config
from tests.kit.toy import built
from tests.kit.world import on_ranks

MIB = 1 << 20


@on_ranks(2)
def test_a_sibling_is_read_whole_and_in_pieces() -> None:
    """Rank 1 reads a tensor of rank 0's, all of it and in thousands of ranges."""
    numel = 3001
    expected = torch.arange(numel, dtype=torch.int32)
    with peer_memory.readable_by_siblings():
        beacon = Beacon()
        shown: list[Any] = [None, None]
        dist.all_gather_object(shown, {**beacon.describe(), "source": expected.data_ptr()})
        if dist.get_rank() == 1:
            assert peer_memory.can_read(shown[0])
            whole, pieces = torch.zeros(2, numel, dtype=torch.int32)
            pid, source = shown[0]["pid"], shown[0]["source"]
            peer_memory.read(pid, [Range(source, whole.data_ptr(), numel * 4)])
            each = [Range(source + 4 * i, pieces.data_ptr() + 4 * i, 4) for i in range(numel)]
            peer_memory.read(pid, each)
            assert torch.equal(whole, expected)
            assert torch.equal(pieces, expected)
        dist.barrier()


def test_ranges_are_cut_to_the_kernels_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_MAX_BYTES", 10)
    batches = list(peer_memory._batches([Range(0, 100, 25), Range(50, 200, 3)]))
    assert batches == [[Range(0, 100, 10)], [Range(10, 110, 10)], [Range(20, 120, 5), Range(50, 200, 3)]]


def test_a_process_can_read_itself_but_not_a_wrong_beacon() -> None:
    beacon = Beacon()
    shown = beacon.describe()
    assert peer_memory.can_read(shown)
    assert not peer_memory.can_read({**shown, "bytes": "00" * 16})


def test_a_process_that_does_not_exist_is_an_error_with_its_number() -> None:
    gone = 2**22 - 1  # above the default pid_max
    with pytest.raises(ParallelismRuntimeError, match=f"process {gone} failed: No such process"):
        peer_memory.read(gone, [Range(0, torch.zeros(1).data_ptr(), 4)])


def test_an_address_that_is_not_mapped_is_an_error() -> None:
    with pytest.raises(ParallelismRuntimeError, match="Bad address"):
        peer_memory.read(os.getpid(), [Range(8, torch.zeros(1).data_ptr(), 4)])
    with pytest.raises(ParallelismRuntimeError, match="Bad address"):
        Staging(torch.device("cpu"), 64).read(os.getpid(), [(torch.zeros(1, dtype=torch.uint8), [(8, 1)])])


def test_where_the_system_has_no_such_call_nothing_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_libc", lambda: None)
    assert not peer_memory.can_read(Beacon().describe())
    with pytest.raises(ParallelismRuntimeError, match="no process_vm_readv"):
        peer_memory.read(os.getpid(), [])


def test_only_contiguous_host_memory_has_an_address() -> None:
    tensor = torch.zeros(2, 3)
    assert peer_memory.address_of(tensor, tensor.dtype) == tensor.data_ptr()
    assert peer_memory.address_of(tensor.t(), tensor.dtype) is None
    assert peer_memory.address_of(tensor, torch.bfloat16) is None
    assert peer_memory.address_of(torch.zeros(2, device="meta"), torch.float32) is None


def bytes_of(numel: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + numel) % 251).to(torch.uint8)


GPU = [pytest.param("cuda", nbytes, marks=pytest.mark.gpu) for nbytes in (14, 10000, 1 << 30)]


@pytest.mark.parametrize(
    ("device", "nbytes"), [*(("cpu", nbytes) for nbytes in (1, 2, 14, 128, 10000, 1 << 30)), *GPU]
)
def test_every_byte_arrives_whatever_the_buffers_size(device: str, nbytes: int) -> None:
    """Targets of one run, of many, of none, all in one reading."""
    source = bytes_of(5000)
    runs = [[(0, 5000)], [(3, 1)], [], [(10 * i, 7) for i in range(100)], [(0, 64), (4000, 1000)]]
    targets = [torch.zeros(sum(n for _, n in each), dtype=torch.uint8, device=device) for each in runs]
    there = [[(source.data_ptr() + start, n) for start, n in each] for each in runs]
    Staging(torch.device(device), nbytes).read(os.getpid(), zip(targets, there, strict=True))
    for target, each in zip(targets, runs, strict=True):
        expected = torch.cat([source[:0], *(source[start : start + n] for start, n in each)])
        assert torch.equal(target.cpu(), expected)


@pytest.mark.gpu
def test_a_gpu_is_filled_while_the_next_read_runs() -> None:
    source = bytes_of(256 * MIB)
    target = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    staging = Staging(target.device, 8 * MIB)
    assert all(buffer.is_pinned() for buffer in staging._buffers)
    staging.read(os.getpid(), [(target, [(source.data_ptr(), source.numel())])])
    assert torch.equal(target.cpu(), source)


def test_the_buffers_together_are_as_large_as_a_bucket() -> None:
    source, target = bytes_of(64 * MIB), torch.zeros(64 * MIB, dtype=torch.uint8)

    def read() -> None:
        staging = Staging(target.device, 8 * MIB)
        staging.read(os.getpid(), [(target, [(source.data_ptr(), source.numel())])])

    assert 8 * MIB <= profiled(read) <= 8 * MIB + 1000
    assert torch.equal(target, source)


@on_ranks(2)
def test_a_model_is_the_same_with_buffers_as_without() -> None:
    for staged in (False, True):
        model = built(device="meta" if dist.get_rank() else "cpu")
        with mock.patch.object(transport, "_needs_upload", lambda target, staged=staged: staged):
            done = parallelize_model(model, config(transport="memory", bucket_bytes=100))
        assert done.transport == "memory"
        assert done.bytes_moved > 0
        same(values(model), values(built()))
