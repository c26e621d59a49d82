"""Cross-entropy of logits that are cut over the classes, against torch's of whole ones."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composer_dist.distributed import parallel_cross_entropy
from composer_dist.errors import ParallelismValueError
from tests.kit.world import on_ranks


@pytest.mark.parametrize("classes", [6, 7])
@on_ranks(2)
def test_it_equals_torchs_own(classes: int) -> None:
    """Every reduction, values and gradients, in float32 and bfloat16; 30 is far in the exponent."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    values = torch.randn(2, 3, classes) * 30
    labels = torch.tensor([[0, classes - 1, -1], [classes // 2, 1, -1]])
    for dtype, reduction in ((torch.float32, "mean"), (torch.bfloat16, "sum"), (torch.float32, "none")):
        whole = values.to(dtype, copy=True).requires_grad_()
        rows = whole.float().flatten(0, 1)
        expected = nn.functional.cross_entropy(rows, labels.flatten(), ignore_index=-1, reduction=reduction)
        part = values.to(dtype).chunk(2, -1)[mesh.get_local_rank()].clone().requires_grad_()
        shape, stride = values.shape, values.stride()
        logits = DTensor.from_local(part, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
        found = parallel_cross_entropy(logits, labels, ignore_index=-1, reduction=reduction)  # type: ignore
        torch.testing.assert_close(found.flatten(), expected.flatten())
        for loss in (found, expected):
            (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
        assert part.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad.chunk(2, -1)[mesh.get_local_rank()])
    with pytest.raises(RuntimeError, match=f"neither one of the {classes} classes nor -100"):
        parallel_cross_entropy(logits, labels)
    with pytest.raises(RuntimeError, match=f"neither one of the {classes} classes nor -1"):
        parallel_cross_entropy(logits, labels.where(labels != 1, classes), ignore_index=-1)


def test_whole_logits_are_taken_too() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, 3, 4], [0, -100, 6, 6, 5]])
    expected: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(parallel_cross_entropy(logits, labels), expected)
    assert parallel_cross_entropy(logits, labels, reduction="none").shape == labels.shape
    half = parallel_cross_entropy(logits.bfloat16(), labels)
    torch.testing.assert_close(half, parallel_cross_entropy(logits.bfloat16().float(), labels))
    with pytest.raises(ParallelismValueError, match="'median'"):
        parallel_cross_entropy(logits, labels, reduction="median")  # type: ignore[arg-type]
