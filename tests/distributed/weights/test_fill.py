"""Filling a sharded model: who initializes what, in which rounds, and how much memory it takes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer_dist.config.rule import Rule
from composer_dist.distributed import init_context, parallelize_model
from composer_dist.distributed.weights.fill import deal_out
from composer_dist.distributed.weights.initialize import Component
from composer_dist.distributed.weights.trace import Initializer
from tests.kit.compare import same, values
from tests.kit.measure import profiled
from tests.kit.meshes import config
from tests.kit.toy import Toy, built
from tests.kit.world import run

MIB = 1 << 20


def component(name: str, nbytes: int) -> Component:
    return Component((Initializer(name, "test", lambda: None),), (name,), nbytes)


def test_components_are_dealt_out_by_size() -> None:
    components = [component(name, size) for name, size in zip("abcdef", (1, 5, 3, 3, 2, 4), strict=True)]
    dealt = deal_out(components, (4, 7), {})
    assert {rank: "".join(c.tensors[0] for c in mine) for rank, mine in dealt.items()} == {4: "bda", 7: "fce"}
    dealt = deal_out(components, (4, 7), {"f": torch.ones(1)})  # a value that only the first rank may have
    assert "f" in {c.tensors[0] for c in dealt[4]}


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_the_size_of_the_buckets_does_not_show(bucket_bytes: int) -> None:
    expected = values(built())
    for found in run(delivered, 2, bucket_bytes):
        same(found, expected)
    expected = run(initialized, 1, 1 << 20)[0]
    for found in run(initialized, 2, bucket_bytes):
        same(found, expected)


def delivered(bucket_bytes: int) -> dict[str, torch.Tensor]:
    model = built(device="cpu" if dist.get_rank() == 0 else "meta")
    parallelize_model(model, config(bucket_bytes=bucket_bytes))
    return values(model)


def initialized(bucket_bytes: int) -> dict[str, torch.Tensor]:
    model = built(device="meta")
    torch.manual_seed(3)
    parallelize_model(model, config(bucket_bytes=bucket_bytes))
    return values(model)


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
def test_memory_is_the_shard_and_two_buckets(sync: str, others: str) -> None:
    for rank, peak in enumerate(run(memory, 2, sync, others)):
        new_buffers = BUFFERS if rank and others == "meta" else 0
        assert peak <= SHARD + new_buffers + 2 * BUCKET + 16 * MIB
        assert peak >= SHARD


def memory(sync: str, others: str) -> int:
    model = built(Big, device="cpu" if dist.get_rank() == 0 else others)
    for layer in model.layers[:1]:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return profiled(lambda: parallelize_model(model, config(sync=sync, bucket_bytes=BUCKET)))


@pytest.mark.promise(36)
def test_initialization_needs_a_component_and_its_buckets() -> None:
    component = 8 * MIB
    for peak in run(memory_of_initialization, 2):
        assert peak <= SHARD + BUFFERS + component + 3 * BUCKET + 16 * MIB


def memory_of_initialization() -> int:
    with init_context():
        model = Big()

    def init(module: nn.Module) -> None:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.fill_(1)

    return profiled(lambda: parallelize_model(model, config(bucket_bytes=BUCKET), param_init_fn=init))


def test_full_tensors_are_not_kept() -> None:
    """What the caller no longer holds is gone once the model is sharded."""
    assert run(kept, 2) == [0, 0]


def kept() -> int:
    import gc
    import weakref

    model = built()
    storages = [weakref.ref(p) for n, p in model.named_parameters() if n != "scale"]
    done = parallelize_model(model, config(), torch.optim.AdamW(model.parameters()))
    gc.collect()
    assert done.model is model
    return sum(ref() is not None for ref in storages)


def test_buffers_and_plain_parameters_stay_the_objects_that_they_were() -> None:
    for found in run(objects, 2, "auto") + run(objects, 2, "rank0"):
        assert found == [True, True, True]


def objects(sync: str) -> list[bool]:
    model = built(seed=dist.get_rank() if sync == "rank0" else 0)
    shift, scale, up = model.shift, model.scale, model.layers[0].up.weight
    parallelize_model(model, config(sync=sync, rules=[Rule("layers.0.up", shard=False)]))
    same({"shift": model.shift}, {"shift": built().shift})
    return [model.shift is shift, model.scale is scale, model.layers[0].up.weight is up]


def test_a_frozen_random_state_is_left_alone() -> None:
    assert isinstance(built(), Toy)
    assert run(random_state, 2) == [True, True]


def random_state() -> bool:
    model = built(device="meta")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    parallelize_model(model, config())
    return torch.equal(torch.get_rng_state(), before)
