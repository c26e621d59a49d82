"""Reading by way of two host buffers: the same values, in bounded memory, on a device as well."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed import parallelize_model
from composer_dist.distributed.moving import way
from composer_dist.distributed.moving.memory import Staging
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import same, values
from tests.kit.measure import profiled
from tests.kit.meshes import config
from tests.kit.toy import built
from tests.kit.world import run

MIB = 1 << 20


def bytes_of(numel: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + numel) % 251).to(torch.uint8)


def read_back(device: str, nbytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Targets with what should be in them: of one run, of many, of none, all in one reading."""
    source = bytes_of(5000)
    runs = [[(0, 5000)], [(3, 1)], [], [(10 * i, 7) for i in range(100)], [(0, 64), (4000, 1000)]]
    targets = [torch.zeros(sum(n for _, n in each), dtype=torch.uint8, device=device) for each in runs]
    expected = [torch.cat([source[:0], *(source[start : start + n] for start, n in each)]) for each in runs]
    there = [[(source.data_ptr() + start, n) for start, n in each] for each in runs]
    Staging(torch.device(device), nbytes).read(os.getpid(), zip(targets, there, strict=True))
    return list(zip(targets, expected, strict=True))


@pytest.mark.parametrize("nbytes", [1, 2, 14, 128, 10000, 1 << 30])
def test_every_byte_arrives_whatever_the_buffers_size(nbytes: int) -> None:
    for target, expected in read_back("cpu", nbytes):
        assert torch.equal(target, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [14, 10000, 1 << 30])
def test_every_byte_arrives_on_a_gpu(nbytes: int) -> None:
    for target, expected in read_back("cuda", nbytes):
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


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ParallelismRuntimeError, match="Bad address"):
        Staging(torch.device("cpu"), 64).read(os.getpid(), [(torch.zeros(1, dtype=torch.uint8), [(8, 1)])])


def prepared(staged: bool) -> dict[str, torch.Tensor]:
    model = built(device="meta" if dist.get_rank() else "cpu")
    original, way._needs_upload = way._needs_upload, lambda target: staged
    try:
        done = parallelize_model(model, config(transport="memory", bucket_bytes=100))
    finally:
        way._needs_upload = original
    assert done.transport == "memory"
    assert done.bytes_moved > 0
    return values(model)


def test_a_model_is_the_same_with_buffers_as_without() -> None:
    expected = run(prepared, 2, False)[0]
    for found in run(prepared, 2, True):
        same(found, expected)
