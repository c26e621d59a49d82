"""Batch norms become synchronized ones and come back, in place."""

import copy

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.replication.batch_norm import (
    BatchNorm,
    convert_sync_batch_norm,
    revert_sync_batch_norm,
)
from composer_dist.errors import ParallelismTypeError, ParallelismValueError

pytestmark = pytest.mark.promise(67)


class Named(nn.BatchNorm2d):
    """A subclass that only has a name of its own."""


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.BatchNorm1d(3), Named(3, affine=False), nn.BatchNorm3d(3)
        self.inner = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.one(x)[..., None].expand(-1, -1, 2))
        x = self.two(x[..., None])
        out: Tensor = self.three(x[..., None])
        return out


def test_convert_and_revert_keep_everything() -> None:
    model = Norms()
    model(torch.randn(4, 3))  # moves the statistics
    model.two.eval()
    model.one.qconfig = "mine"  # type: ignore[assignment]
    seen: list[str] = []
    model.three.register_forward_hook(lambda *_: seen.append("hook"))
    before = copy.deepcopy(model)
    x = torch.randn(4, 3)
    expected = before(x)
    modules, classes = list(model.modules()), [type(module) for module in model.modules()]
    tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
    assert convert_sync_batch_norm(model) == ["one", "two", "three", "inner.0"]
    kinds = [type(module) for module in (model.one, model.two, model.three, model.inner[0])]
    assert kinds == [nn.SyncBatchNorm] * 4
    assert list(model.modules()) == modules
    assert [module.training for module in (model.one, model.two)] == [True, False]
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == tensors
    assert revert_sync_batch_norm(model) == ["one", "two", "three", "inner.0"]
    assert [type(module) for module in model.modules()] == classes
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == tensors
    assert model.one.qconfig == "mine"
    assert not any("_composer_dist" in key or key == "process_group" for m in modules for key in vars(m))
    assert torch.equal(model(x), expected)
    assert seen == ["hook", "hook"]  # of the copy, too
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))


def test_the_root_may_be_one() -> None:
    model = nn.BatchNorm2d(3)
    assert convert_sync_batch_norm(model) == [""]
    assert type(model) is nn.SyncBatchNorm
    assert revert_sync_batch_norm(model) == [""]
    assert type(model) is nn.BatchNorm2d


def test_one_that_torch_has_converted_takes_inputs_of_any_shape() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3)).eval()
    x = torch.randn(4, 3, 5)
    expected = model[0](x), model[1](x[..., None])
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    revert_sync_batch_norm(converted)
    assert [type(module) for module in converted] == [BatchNorm, BatchNorm]
    assert torch.equal(converted[0](x), expected[0])
    assert torch.equal(converted[1](x[..., None]), expected[1])


def test_a_forward_of_its_own_is_not_lost() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(nn.BatchNorm1d(3), Own(3))
    with pytest.raises(ParallelismTypeError, match=r"1 \(Own\) would lose the forward"):
        convert_sync_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_preparing_on_cpu_names_what_cannot_run_there() -> None:
    for model, config in (
        (Norms(), DDPConfig(sync_batch_norm=True)),
        (nn.SyncBatchNorm.convert_sync_batchnorm(Norms()), DDPConfig()),
    ):
        with pytest.raises(ParallelismValueError, match=r"SyncBatchNorm \(one, two.* on accelerators only"):
            parallelize_model(model, config)
