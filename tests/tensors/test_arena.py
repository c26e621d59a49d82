"""Memory for shards: tensors of their own in one mapping, aligned, given back at the end."""

from __future__ import annotations

import io
import mmap

import pytest
import torch

from composer_dist.tensors.arena import Arena, empty, padded_bytes

MIB = 1 << 20


def test_tensors_lie_apart_aligned_and_in_storages_of_their_own() -> None:
    sizes = [((1000, 1001), torch.float32), ((3,), torch.bfloat16), ((), torch.float64), ((7, 9), torch.bool)]
    arena = Arena(sum(padded_bytes(size, dtype) for size, dtype in sizes) + 4 * MIB)
    tensors = [arena.empty(size, dtype) for size, dtype in sizes]
    for number, ((size, dtype), tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (size, dtype)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(number % 2)
    del arena
    assert [float(tensor.float().mean()) for tensor in tensors] == [0, 1, 0, 1]
    file = io.BytesIO()
    torch.save(tensors[1], file)
    assert file.tell() < 4096  # nothing of its neighbors


def test_small_and_empty_tensors_are_ordinary_ones() -> None:
    assert Arena(100).empty((5, 5), torch.float32).shape == (5, 5)
    assert Arena(8 * MIB).empty((0, 5), torch.float32).shape == (0, 5)
    assert empty((3,), torch.int32, torch.device("meta")).is_meta
    assert empty((1024, 1024, 2), torch.float32, torch.device("cpu")).fill_(2).sum() == 1024 * 1024 * 4


def test_a_kernel_without_huge_pages_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # which madvise refuses
    assert Arena(8 * MIB).empty((1024, 1024), torch.float32).fill_(1).sum() == MIB


def mapped() -> int:
    """KiB of address space of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmSize"))


def test_memory_is_given_back_with_the_last_tensor() -> None:
    before = mapped()
    arena = Arena(256 * MIB)
    kept = arena.empty((1024, 1024), torch.float32)
    del arena
    assert mapped() - before >= 200 * 1024
    del kept
    assert mapped() - before < 100 * 1024
