"""Filling a sharded model: who initializes what, in which rounds, and how much memory it takes."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.rule import Rule
from composer_dist.distributed import init_context, meta_init, parallelize_model
from composer_dist.distributed.weights.fill import deal_out
from composer_dist.distributed.weights.initialize import Component
from composer_dist.distributed.weights.trace import Initializer
from tests.kit.compare import same, values
from tests.kit.grids import crossed
from tests.kit.measure import profiled
from tests.kit.meshes import config
from tests.kit.toy import built
from tests.kit.world import on_ranks

MIB = 1 << 20


def component(name: str, nbytes: int) -> Component:
    return Component((Initializer(name, "test", lambda: None),), (name,), nbytes)


def test_components_are_dealt_out_by_size() -> None:
    components = [component(name, size) for name, size in zip("abcdef", (1, 5, 3, 3, 2, 4), strict=True)]
    dealt = deal_out(components, (4, 7), {})
    assert {rank: "".join(c.tensors[0] for c in mine) for rank, mine in dealt.items()} == {4: "bda", 7: "fce"}
    dealt = deal_out(components, (4, 7), {"f": torch.ones(1)})  # a value that only the first rank may have
    assert "f" in {c.tensors[0] for c in dealt[4]}


@crossed({"on_meta": [False, True], "bucket_bytes": [1, 300, 1 << 20]})
@on_ranks(2)
def test_the_size_of_the_buckets_does_not_show(bucket_bytes: int, on_meta: bool) -> None:
    model = built(device="meta" if on_meta or dist.get_rank() else "cpu")
    single = built(device="meta" if on_meta else "cpu")
    torch.manual_seed(3)
    meta_init(single)
    torch.manual_seed(3)
    parallelize_model(model, config(bucket_bytes=bucket_bytes))
    same(values(model), values(single))


class Big(nn.Module):
    """64 MiB of parameters in eight matrices, one of them turned, and 8 MiB of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(8))
        self.register_buffer("table", torch.zeros(2048, 1024), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


SHARD, WHOLE, BUFFERS, BUCKET = 32 * MIB, 64 * MIB, 8 * MIB, 4 * MIB


@pytest.mark.promise(80)
@pytest.mark.parametrize(("sync", "others"), [("auto", "meta"), ("rank0", "cpu"), ("auto", "cpu")])
@on_ranks(2)
def test_memory_is_the_shard_and_two_buckets(sync: str, others: str) -> None:
    rank = dist.get_rank()
    model = built(Big, device="cpu" if rank == 0 else others)
    for layer in model.layers[:1]:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    peak = profiled(lambda: parallelize_model(model, config(sync=sync, bucket_bytes=BUCKET)))
    new_buffers = BUFFERS if rank and others == "meta" else 0
    assert SHARD <= peak <= SHARD + new_buffers + 2 * BUCKET + 16 * MIB


@pytest.mark.promise(36)
@on_ranks(2)
def test_initialization_needs_a_component_and_its_buckets() -> None:
    component = 8 * MIB
    with init_context():
        model, other = Big(), Big()

    def init(module: nn.Module) -> None:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.fill_(1)

    def init_whole(module: nn.Module) -> None:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.copy_(torch.ones(1))

    def prepare(model: nn.Module, init: Callable[[nn.Module], None]) -> int:
        return profiled(lambda: parallelize_model(model, config(bucket_bytes=BUCKET), param_init_fn=init))

    assert prepare(model, init) <= SHARD + BUFFERS + 2 * BUCKET
    assert prepare(other, init_whole) <= SHARD + BUFFERS + component + 3 * BUCKET + 16 * MIB
    same(values(model), values(other))


@on_ranks(2)
def test_full_tensors_are_not_kept() -> None:
    """What the caller no longer holds is gone once the model is sharded."""
    model = built()
    storages = [weakref.ref(p) for n, p in model.named_parameters() if n != "scale"]
    done = parallelize_model(model, config(), torch.optim.AdamW(model.parameters()))
    gc.collect()
    assert done.model is model
    assert not any(ref() is not None for ref in storages)


@pytest.mark.parametrize("sync", ["auto", "rank0"])
@on_ranks(2)
def test_buffers_and_plain_parameters_stay_the_objects_that_they_were(sync: str) -> None:
    model = built(seed=dist.get_rank() if sync == "rank0" else 0)
    shift, scale, up = model.shift, model.scale, model.layers[0].up.weight
    parallelize_model(model, config(sync=sync, rules=[Rule("layers.0.up", shard=False)]))
    same({"shift": model.shift}, {"shift": built().shift})
    assert model.shift is shift
    assert model.scale is scale
    assert model.layers[0].up.weight is up


@on_ranks(2)
def test_a_frozen_random_state_is_left_alone() -> None:
    model = built(device="meta")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    parallelize_model(model, config())
    assert torch.equal(torch.get_rng_state(), before)
