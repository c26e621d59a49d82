"""Ranks that run different units at one time: an error with their names, the same on every rank."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import MeshConfig, ParallelismConfig
from composer_dist.distributed import parallelize_model
from composer_dist.distributed.ranks.board import Board
from composer_dist.distributed.ranks.failures import LostError
from composer_dist.distributed.sharding import check_order
from composer_dist.errors import ParallelismRuntimeError
from tests.kit.compare import fails_alike
from tests.kit.grids import slow
from tests.kit.measure import Collectives, by_messages
from tests.kit.models import WIDTH, Layer, Multimodal
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(105)


def skip(who: list[int], mesh: MeshConfig, expected: str) -> None:
    """Train and evaluate with images everywhere, then without them on some ranks."""
    torch.manual_seed(0)
    model = Multimodal()
    parallelize_model(model, ParallelismConfig(mesh=mesh))
    text, images = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    for rows in ((text, images), (text, None)):
        model(*rows)[0].mean().backward()
        with torch.no_grad():
            model(*rows)
    with fails_alike(ParallelismRuntimeError, expected):
        model(text, None if dist.get_rank() in who else images)[0].mean().backward()


@on_ranks(2)
def test_a_tower_that_one_rank_skips_is_an_error_that_names_it() -> None:
    text = (
        "The ranks run different units: rank 0 is about to gather vision.layers.0, rank 1 to gather layers.0."
        " Every rank must run every unit, in the same order. If some ranks skip a module (an image tower, "
        "for a batch without images), mark it with Rule(its name, skippable='replicate') or 'root'."
    )
    skip([1], MeshConfig(), text)


@on_ranks(4)
def test_replicas_that_differ_are_seen_when_they_reduce() -> None:
    """Ranks 2 and 3 are one replica, which skips as a whole: forward is in order."""
    # Without images the first layer's input has no gradient: FSDP2 reduces it later, after the root.
    text = "rank 0 is about to reduce the gradients of layers.0, rank 2 to reduce the gradients of the root."
    skip([2, 3], MeshConfig(dp_replicate=2), f"The ranks run different units: {text}")


class Experts(nn.Module):
    """A layer of which each rank uses another expert, of equal size or not."""

    def __init__(self, equal: bool = False) -> None:
        super().__init__()
        other = Layer() if equal else nn.Linear(WIDTH, WIDTH)
        self.layer, self.experts = Layer(), nn.ModuleList([Layer(), other])

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.experts[which](self.layer(x))
        return out


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@on_ranks(2)
def test_gradients_that_some_ranks_lack_are_an_error(equal: bool, shared: bool) -> None:
    model = Experts(equal)
    parallelize_model(model, ParallelismConfig(sync="rank0"), fsdp_wrap_policy=lambda module: module is model)
    model(torch.randn(3, WIDTH), 0).mean().backward()
    remedy = "mark such modules with Rule(..., skippable='root')."
    text = "The ranks reduce different gradients of the root: rank 0 "
    other = " of other parameters. Some" if equal else " elements, rank 1 "
    with (
        nullcontext() if shared else by_messages(),
        fails_alike(ParallelismRuntimeError, text, other, remedy),
    ):
        model(torch.randn(3, WIDTH), dist.get_rank()).mean().backward()


@on_ranks(2)
def test_parameters_that_a_rank_has_frozen_are_not_reduced_with_others() -> None:
    model = Experts(equal=True)
    parallelize_model(model, ParallelismConfig(sync="rank0"), fsdp_wrap_policy=lambda module: module is model)
    model.experts[dist.get_rank()].requires_grad_(False)
    with fails_alike(ParallelismRuntimeError, "The ranks reduce different gradients of the root"):
        (model(torch.randn(3, WIDTH), 0) + model(torch.randn(3, WIDTH), 1)).mean().backward()


@on_ranks(2)
def test_models_that_ranks_call_in_another_order_are_an_error() -> None:
    models = [Experts(), Experts()]
    for model in models:
        parallelize_model(model, ParallelismConfig(sync="rank0"))
        model(torch.randn(3, WIDTH), 0).mean().backward()
    text = "The ranks run different models: rank 0 the first that they have prepared, rank 1 the second."
    with fails_alike(ParallelismRuntimeError, text):
        models[dist.get_rank()](torch.randn(3, WIDTH), 0)


@pytest.mark.parametrize(
    ("check", "shared", "made"), [("auto", True, 1), ("auto", False, 13), (False, True, 1), (False, False, 1)]
)
@on_ranks(2)
def test_messages_are_preceded_by_a_comparison_if_it_is_wanted(check: Any, shared: bool, made: int) -> None:
    make = Board.make if shared else lambda group: None
    model = Multimodal()
    parallelize_model(model, ParallelismConfig(sync="rank0", check_order=check))
    with (
        mock.patch.object(Board, "make", make),
        mock.patch.object(check_order, "exchange", wraps=check_order.exchange) as exchange,
    ):
        model(torch.randn(3, WIDTH), torch.randn(3, WIDTH))[0].mean().backward()
    # Forward gathers the root and four layers, backward the three that were freed, and five are reduced.
    assert exchange.call_count == made


@on_ranks(2)
def test_large_units_meet_only_if_their_order_is_to_be_checked() -> None:
    met = []
    for check in (True, False):
        model = Multimodal()
        parallelize_model(model, ParallelismConfig(sync="rank0", check_order=check))
        with (
            by_messages(),
            mock.patch.object(Board, "all_show", autospec=True, return_value=True) as all_show,
        ):
            model(torch.randn(3, WIDTH), torch.randn(3, WIDTH))[0].mean().backward()
        met.append(all_show.call_count)
    assert met == [12, 1]  # the second model's first collective meets on the group's board


@pytest.mark.parametrize("shared", [True, False])
@on_ranks(4)
def test_only_the_first_comparison_of_a_group_is_a_message_where_memory_is_shared(shared: bool) -> None:
    make = Board.make if shared else lambda group: None
    model = Multimodal()
    parallelize_model(model, ParallelismConfig(sync="rank0", mesh=MeshConfig(dp_replicate=2)))
    with (
        mock.patch.object(Board, "make", make),
        mock.patch.object(check_order, "exchange", wraps=check_order.exchange) as exchange,
    ):
        for _ in range(2):
            model(torch.randn(3, WIDTH), torch.randn(3, WIDTH))[0].mean().backward()
    assert exchange.call_count == (2 if shared else 26)


@pytest.mark.parametrize(
    ("dtype", "check"), [slow(torch.float32, "auto"), (torch.bfloat16, "auto"), slow(torch.float32, False)]
)
@on_ranks(4)
def test_small_units_of_one_host_need_no_messages_and_get_the_same_gradients(dtype: Any, check: Any) -> None:
    gradients, counts = [], []
    for make in (Board.make, lambda group: None):
        torch.manual_seed(0)
        model = Multimodal().to(dtype)
        parallelize_model(model, ParallelismConfig(check_order=check))
        text, images = (torch.randn(3, WIDTH) * (1 + dist.get_rank())).to(dtype).split([1, 2])
        with mock.patch.object(Board, "make", make), mock.patch.object(check_order, "_boards", {}):
            for _ in range(3):
                with Collectives() as collectives:
                    model(text, images)[0].mean().backward()
        counts.append([collectives.counts[name] for name in ("_allgather_base_", "_reduce_scatter_base_")])
        gradients.append(
            [one.grad.full_tensor() for one in model.parameters() if isinstance(one.grad, DTensor)]
        )
    assert counts == [[0, 0], [8, 5]]
    assert len(gradients[0]) > 5
    torch.testing.assert_close(*gradients)


@on_ranks(2)
def test_data_of_the_last_two_turns_stays_where_it_is() -> None:
    board = Board.make(dist.group.WORLD)
    assert board is not None
    assert board.places(torch.empty((4 << 20) + 1, dtype=torch.uint8)) is None
    rank, rows = dist.get_rank(), []
    for turn in range(3):
        data = torch.arange(3, dtype=torch.float64) + 10 * rank + 100 * turn
        places = board.places(data)
        assert places is not None
        places[0].copy_(data)
        assert board.all_show(turn, timedelta(seconds=20))
        rows.append(places[1])
        expected = [[100.0 * turn + 10 * one + index for index in range(3)] for one in range(2)]
        assert rows[-1].tolist() == expected
    assert rows[1].tolist() == [[100, 101, 102], [110, 111, 112]]
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_does_not_arrive_at_a_board_is_an_error() -> None:
    board = Board.make(dist.group.WORLD)
    assert board is not None
    assert [board.all_show(number, timedelta(seconds=20)) for number in (7, dist.get_rank())] == [True, False]
    if dist.get_rank() == 0:
        with pytest.raises(LostError, match="another rank did not arrive within 0 s"):
            board.all_show(8, timedelta(seconds=0.05))
    dist.barrier()


@pytest.mark.parametrize("shared", [True, False])
@on_ranks(2)
def test_a_step_that_one_rank_skips_is_an_error_in_the_next_forward(shared: bool) -> None:
    with nullcontext() if shared else by_messages():
        model = Layer()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parallelize_model(model, ParallelismConfig(check_order=True), optimizer)
        for _ in range(2):
            model(torch.randn(3, WIDTH)).mean().backward()
            optimizer.step()
        model(torch.randn(3, WIDTH)).mean().backward()
        if dist.get_rank() == 1:
            optimizer.step()
        with fails_alike(ParallelismRuntimeError, "stepped 2 times on rank 0, but 3 times on rank 1"):
            model(torch.randn(3, WIDTH))
