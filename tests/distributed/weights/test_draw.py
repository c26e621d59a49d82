"""Parts of tensors, computed as their initializers would: which initializers allow it, and the values."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.distributed import meta_init, parallelize_model
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.weights.draw import Fills, draw
from composer_dist.distributed.weights.initialize import find_components, peak_bytes
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit.compare import fails_alike
from tests.kit.meshes import config
from tests.kit.world import on_ranks

CPU = torch.device("cpu")


def fills_of(init: Callable[[torch.Tensor], object], rows: int = 6, columns: int = 5) -> Fills | None:
    """How the weight of one layer is filled; None if its initializer must run."""
    module = nn.Linear(columns, rows, bias=False, device="meta")
    components = find_components(read_structure(module), {"weight"}, lambda layer: init(layer.weight))
    assert peak_bytes(components, 1 << 20) == (0 if components[0].fills else rows * columns * 4)
    return components[0].fills


def pieces(weight: torch.Tensor) -> None:
    """Two draws, one of them changed, of which the second overwrites a part of the first."""
    weight.normal_(1.0, 0.5).mul_(2).clamp_(-1, 3)
    weight[1:4].uniform_(5, 6)
    weight.data[2].zero_()
    nn.init.trunc_normal_(weight[3], a=2.0, b=3.0)


LAYOUTS = [
    (Layout((301, 230), rows=True), Coordinate(shards=4)),
    (Layout((301, 230), tp_dim=1), Coordinate(tps=3)),
    (Layout((300, 230), rows=True, tp_dim=0, tp_groups=3), Coordinate(shards=2, tps=2)),
    (Layout((301, 230), rows=True, tp_dim=1), Coordinate(shards=2, tps=2)),
]


@pytest.mark.promise(36)
@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_parts_are_those_of_the_whole(layout: Layout, world: Coordinate) -> None:
    fills = fills_of(pieces, *layout.shape)
    assert fills is not None
    whole = torch.full(layout.shape, torch.nan)
    draw(fills["weight"], 7, Layout(layout.shape).part(Coordinate()), whole.view(-1), CPU)
    for shard in range(world.shards):
        for tp in range(world.tps):
            part = layout.part(Coordinate(shard, world.shards, tp, world.tps))
            mine = torch.full((part.numel,), torch.nan)
            draw(fills["weight"], 7, part, mine, CPU)
            assert torch.equal(mine, part.of(whole))
    other = torch.empty_like(whole)
    draw(fills["weight"], 8, Layout(layout.shape).part(Coordinate()), other.view(-1), CPU)
    assert not torch.equal(other, whole)
    assert torch.equal(whole[2], torch.zeros(230))
    assert 5 <= whole[1].min() <= whole[1].max() <= 6
    assert 2 <= whole[3].min() < whole[3].median() < 2.5 < whole[3].max() <= 3
    rest = whole[4:]
    assert abs(rest.median() - 2) < 0.02
    assert rest.max() == 3
    assert whole.flatten().unique().numel() > 50_000  # no block repeats another


def test_the_number_of_threads_does_not_show() -> None:
    fills = fills_of(lambda weight: weight.normal_().erfinv_().exp_(), 301, 230)
    assert fills is not None
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found.append(torch.empty(301 * 230))
        draw(fills["weight"], 7, Layout((301, 230)).part(Coordinate()), found[-1], CPU)
        torch.set_num_threads(before)
    assert torch.equal(*(one.nan_to_num() for one in found))


RUN_WHOLE: dict[str, Callable[[torch.Tensor], object]] = {
    "reads": lambda weight: weight.normal_().div_(weight.norm()),
    "another tensor": lambda weight: weight.copy_(torch.eye(6, 5)),
    "a new tensor": lambda weight: weight.copy_(torch.randn(6, 5)),
    "values": lambda weight: weight.fill_(torch.rand(1, device="cpu").item()),
    "strided": lambda weight: weight.zero_()[:, 0].fill_(1),
    "only a part": lambda weight: weight[:3].normal_(),
    "in parts, then all": lambda weight: (weight[:3].normal_(), weight[3:].normal_(), weight.mul_(2)),
    "its own generator": lambda weight: weight.normal_(generator=torch.Generator()),
    "as integers": lambda weight: weight.zero_().view(torch.int32).random_(),
    "Python's generator": lambda weight: weight.fill_(random.random()),
    "NumPy's generator": lambda weight: weight.fill_(float(numpy.random.rand())),
    "trunc_normal_ with a generator": lambda weight: nn.init.trunc_normal_(
        weight, generator=torch.Generator()
    ),
    "orthogonal_": lambda weight: nn.init.orthogonal_(weight),
}


@pytest.mark.parametrize("init", RUN_WHOLE.values(), ids=RUN_WHOLE)
def test_other_initializers_run_on_the_whole_tensor(init: Callable[[torch.Tensor], object]) -> None:
    assert fills_of(init) is None


def test_only_those_that_draw_elsewhere_run_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))

    def init(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.constant_(parameter, 1 + random.random() if module is model[1] else 3)

    found = find_components(read_structure(model), {name for name, _ in model.named_parameters()}, init)
    assert [one.fills is None for one in found] == [False, True]
    torch.manual_seed(1)
    meta_init(model, init)
    first = model[1].weight.clone()
    model[1].to("meta")
    torch.manual_seed(2)
    meta_init(model, init)
    assert not torch.equal(first, model[1].weight)  # it depends on the seed
    assert model[0].weight.unique().item() == 3


@on_ranks(2)
def test_constants_that_differ_between_ranks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))

    def init(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.normal_(std=0.02 * (1 + dist.get_rank()))

    with fails_alike(ParallelismValueError, "The initializers around"):
        parallelize_model(model, config(), param_init_fn=init)
