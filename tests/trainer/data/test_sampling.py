"""Samplers that match the mesh, and those that do not."""

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from composer_dist.distributed.mesh.mesh import sampler_kwargs
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import PackedStream, StreamingDataLoader
from composer_dist.trainer.data.sampling import check_sampler, placed, set_epoch
from tests.kit.training import fitted, loader, points, quiet
from tests.kit.world import World

ALONE = {"num_replicas": 1, "rank": 0}
SECOND = {"num_replicas": 2, "rank": 1}


def distributed(replicas: int, rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(points(), num_replicas=replicas, rank=rank)


def test_a_distributed_sampler_must_be_for_this_rank() -> None:
    check_sampler(DataLoader(points(), sampler=distributed(2, 1)), SECOND)
    inner = BatchSampler(distributed(2, 1), batch_size=2, drop_last=False)
    check_sampler(DataLoader(points(), batch_sampler=inner), SECOND)
    with pytest.raises(ParallelismValueError, match="num_replicas=2, rank=0, but .* rank=1"):
        check_sampler(DataLoader(points(), sampler=distributed(2, 0)), SECOND)
    with pytest.raises(ParallelismValueError, match="mesh asks for num_replicas=1, rank=0"):
        check_sampler(DataLoader(points(), sampler=distributed(2, 0)), ALONE)


@pytest.mark.promise(118)
def test_a_plain_sampler_is_refused_where_data_differs() -> None:
    check_sampler(loader(), ALONE)
    with pytest.raises(ParallelismValueError, match="All 2 data-parallel ranks .* same samples"):
        check_sampler(loader(), SECOND)
    check_sampler([1, 2], SECOND)  # it has no dataset: the caller is responsible


@pytest.mark.promise(118)
def test_a_whole_stream_is_refused_where_data_differs() -> None:
    datasets = pytest.importorskip("datasets", reason="an extra")
    stream = datasets.Dataset.from_dict({"input_ids": [[n, n] for n in range(8)]}).to_iterable_dataset(4)
    for one in (stream, PackedStream(stream, 2)):
        check_sampler(DataLoader(one, 2), ALONE)
        with pytest.raises(ParallelismValueError, match="All 2 data-parallel .* is not split by .*Streaming"):
            check_sampler(DataLoader(one, 2), SECOND)
        check_sampler(StreamingDataLoader(one, 2).placed(2, 1), SECOND)
    check_sampler(DataLoader(datasets.distributed.split_dataset_by_node(stream, 1, 2), 2), SECOND)


@pytest.mark.promise(118)
def test_a_data_set_in_the_place_of_a_dataloader_is_refused() -> None:
    for give in (lambda one: fitted(train_dataloader=one), lambda one: fitted()[0].eval(one)):
        with pytest.raises(ParallelismTypeError, match=r"TensorDataset is a data set, .* Pass Distributed"):
            give(points())
    assert placed([1, 2], ALONE) == [1, 2]


def test_the_epoch_reaches_the_sampler() -> None:
    sampler = distributed(2, 1)
    set_epoch(DataLoader(points(), sampler=sampler), 3)
    assert sampler.epoch == 3
    set_epoch([1, 2], 3)


def samplers() -> None:
    data = points()
    trainer, _ = quiet(parallelism_config="fsdp")
    assert trainer.preparation is not None
    with pytest.raises(ParallelismValueError, match="All 2 data-parallel ranks .* same samples"):
        trainer.fit(duration="1ba", train_dataloader=loader())
    with pytest.raises(ParallelismValueError, match="DistributedSampler is for num_replicas=4"):
        trainer.fit(duration="1ba", train_dataloader=DataLoader(data, 2, sampler=distributed(4, 0)))
    right = DistributedSampler(data, **sampler_kwargs(trainer.preparation.mesh))
    trainer.fit(duration="1ba", train_dataloader=DataLoader(data, 2, sampler=right))
    assert trainer.state.timestamp.sample == 4
    fitted(parallelism_config="fsdp", check_sampler=False, max_duration="1ba")
    with pytest.raises(ParallelismValueError, match="All 2 data-parallel ranks would evaluate on the same"):
        trainer.eval(loader())
    with pytest.raises(ParallelismValueError, match="All 2 data-parallel ranks would evaluate on the same"):
        quiet(parallelism_config="fsdp", eval_dataloader={"held_out": loader()})  # before it trains


@pytest.mark.promise(3, 118)
def test_samplers_that_do_not_match_the_mesh_are_refused(world2: World) -> None:
    world2(samplers)
