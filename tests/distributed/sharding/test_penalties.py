"""Terms of a loss on sharded parameters have the value and the gradients of those on whole ones."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from composer_dist import FSDP2Config
from composer_dist.distributed import parallelize_model
from tests.kit.compare import close, grads, weights
from tests.kit.grids import crossed, slow
from tests.kit.meshes import config
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)
PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": functional.mse_loss,
    "mse_loss of each": lambda p, q: functional.mse_loss(p, q, reduction="none").square().sum(),
    "mse_loss, summed": lambda p, q: functional.mse_loss(p, q, reduction="sum"),
    "smooth_l1_loss": lambda p, q: functional.smooth_l1_loss(p, q, beta=0.3),
    "huber_loss": functional.huber_loss,
    "soft_margin_loss": lambda p, q: functional.soft_margin_loss(p, q.detach().sign()),
    "cross entropy": lambda p, q: functional.binary_cross_entropy(p.sigmoid(), q.detach().sigmoid()),
    "of logits": lambda p, q: functional.binary_cross_entropy_with_logits(p, q.detach().sigmoid()),
    "norms of columns": lambda p, q: p.norm(dim=0).sum(),
    "norms of rows": lambda p, q: p.norm(dim=1).sum(),
    "sum of norms": lambda p, q: torch.stack([p.norm(), q.norm()]).sum(),
    "norm of norms": lambda p, q: torch.stack([p.norm(), q.norm()]).norm(),
    "largest": lambda p, q: p.abs().amax() * 2,
    "smallest": lambda p, q: p.square().amin(),
    "largest of columns": lambda p, q: p.amax(0).sum(),
    "mean and variance": lambda p, q: p.mean() + q.var(),
}


class _Rows(nn.Module):
    """Parameters whose rows the ranks share evenly, unevenly, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(rows, 3) for rows in (4, 5, 1))


@on_ranks(2)
def test_penalties() -> None:
    alone, anchor = _Rows(), _Rows()
    pairs = [(one, copy.deepcopy(one)) for one in (alone, anchor)]
    model, sharded_anchor = (parallelize_model(one, FSDP2Config()).model for _, one in pairs)
    for name, penalty in PENALTIES.items():
        values = []
        for mine, other in ((alone, anchor), (model, sharded_anchor)):
            mine.zero_grad()
            losses = [penalty(p, q) for p, q in zip(mine.parameters(), other.parameters(), strict=True)]
            whole = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]
            sum(whole).backward()
            values.append(torch.stack(whole))
        torch.testing.assert_close(values[1], values[0], msg=f"{name}: {values}", equal_nan=True)
        close(grads(model), grads(alone))


@crossed({"foreach": [False, True], "penalty_first": [False, True]})
@on_ranks(2)
def test_they_add_to_gradients_of_parameters_with_fewer_rows_than_ranks(
    penalty_first: bool, foreach: bool
) -> None:
    """Such a penalty has a whole gradient, which torch cannot add to the sharded one in place."""
    alone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model = copy.deepcopy(alone)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, foreach=foreach) for one in (alone, model)]
    parallelize_model(model, FSDP2Config(), optimizers[1])
    for _ in range(2):
        for one, optimizer in zip((alone, model), optimizers, strict=True):
            losses = [one(torch.ones(2, 3)).sum(), *map(_square, one.parameters())]
            if penalty_first:
                losses[-1].backward()
            sum(losses[:-1] if penalty_first else losses).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5, foreach=foreach)
            optimizer.step()
            optimizer.zero_grad()
    close(weights(model), weights(alone))


def _square(parameter: Tensor) -> Tensor:
    penalty = parameter.square().sum()
    return penalty.full_tensor() if isinstance(penalty, DTensor) else penalty


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), slow(4, 2)])
@on_ranks("ranks")
def test_losses_of_each_rank_that_read_whole_parameters(ranks: int, replicas: int) -> None:
    """The loss of a head that the script computes, and a penalty with another weight on each rank."""
    alone = _Rows()
    model = parallelize_model(copy.deepcopy(alone), config(replicas=replicas)).model
    batch = torch.randn(ranks, 2, 3)

    def loss(rows: list[Tensor], x: Tensor) -> Tensor:
        return sum(functional.linear(x, one).exp().mean() + x.mean() * one.norm() for one in rows)  # type: ignore[no-any-return]

    torch.stack([loss([*alone.parameters()], x) for x in batch]).mean().backward()
    loss([p.full_tensor() for p in model.parameters()], batch[dist.get_rank()]).backward()  # type: ignore[attr-defined]
    close(grads(model), grads(alone))
