"""Forwards that only look leave modules as they were."""

from typing import Self

import torch
from torch import Tensor, nn

from composer_dist.structure.kept import evaluating, values_kept


class Merging(nn.Module):
    """Adds its adapter to its weight in evaluation, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.adapter = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.merged = False

    def train(self, mode: bool = True) -> Self:
        if self.merged is mode:
            self.weight.data += -self.adapter if mode else self.adapter
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight if self.merged else self.weight + self.adapter)


def test_adapters_that_are_merged_for_evaluation_are_taken_out_again() -> None:
    model = nn.Sequential(Merging(), Merging().eval(), nn.Dropout())
    with evaluating(model):
        assert [model[0].merged, model[1].merged] == [True, True]
        assert model(torch.ones(2)).tolist() == [4.0, 4.0]
    assert [module.training for module in model] == [True, False, True]
    assert [model[0].merged, model[1].merged] == [False, True]
    assert [model[0].weight.tolist(), model[1].weight.tolist()] == [[1.0, 1.0], [2.0, 2.0]]


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.cache, self.known = 0, dict[str, Tensor](), [torch.zeros(1)]
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache["x"] = self.table = x
        self.known.append(x)
        self.total += x
        self.register_buffer("late", x)
        return x


def test_what_a_forward_keeps_is_dropped() -> None:
    model = Filling()
    cache, total = model.cache, model.total
    with values_kept(model):
        model(torch.ones(1))
        assert (model.calls, model.total.item(), len(model.known)) == (1, 1.0, 2)
    assert (model.calls, model.cache, len(model.known)) == (0, {}, 1)
    assert model.cache is cache
    assert model.total is total
    assert total.item() == 0.0
    assert not hasattr(model, "table")
    assert dict(model.named_buffers()).keys() == {"total"}
