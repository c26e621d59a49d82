"""DistributedDataLoader: every sample once, on any number of ranks, before and after a resume."""

import random
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import DistributedDataLoader, PackedDataset, PackedStream
from tests.kit.compare import fails
from tests.kit.training import classifier, fitted_on_parts, loaders, points, result_of, same_training
from tests.kit.world import World

LENGTH = 23


def read(ranks: list[Any], epoch: int, count: int | None = None) -> list[list[list[int]]]:
    """For each rank the batches it reads, at most `count`."""
    found = []
    for loader in ranks:
        if count is None or loader._epoch != epoch:
            loader.set_epoch(epoch)
        batches = iter(loader)
        found.append([batch.tolist() for _, batch in zip(range(count or LENGTH), batches, strict=False)])
    return found


def in_order(found: list[list[list[int]]]) -> list[int]:
    """The samples of all ranks in the order in which training as a whole sees them."""
    return [sample for parts in zip_longest(*found, fillvalue=()) for batch in parts for sample in batch]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_once_in_one_order_on_any_number_of_ranks(replicas: int, shuffle: bool) -> None:
    alone = loaders(1, shuffle=shuffle)
    several = loaders(replicas, shuffle=shuffle)
    orders = []
    for epoch in range(3):
        orders.append(in_order(read(several, epoch)))
        assert orders[-1] == in_order(read(alone, epoch))
        assert sorted(orders[-1]) == list(range(LENGTH))
    assert (orders[0] == orders[1]) is not shuffle


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_are_those_of_the_global_order(workers: int) -> None:
    assert read(loaders(2, num_workers=workers), 0) == [
        [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19]],
        [[3, 4, 5], [9, 10, 11], [15, 16, 17], [20, 21, 22]],
    ]


def test_drop_last_drops_what_fills_no_global_batch() -> None:
    ranks = loaders(2, drop_last=True)
    assert in_order(read(ranks, 0)) == list(range(18))
    assert [len(loader) for loader in ranks] == [3, 3]
    assert [len(loader) for loader in loaders(2)] == [4, 4]


@pytest.mark.promise(100)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_resume_on_other_ranks_loses_nothing(before: int, after: int, stream: bool, batches: int) -> None:
    data: Any = Stream() if stream else list(range(LENGTH))
    first = loaders(before, data, shuffle=not stream, seed=5)
    seen = in_order(read(first, 1, batches))
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    assert states[0]["samples"] == len(seen)
    second = loaders(after, data, shuffle=not stream, seed=5)
    for loader in second:
        loader.load_state_dict(states[0])
        if not stream:
            assert len(loader) == batches + -(-(LENGTH - len(seen)) // (3 * after))
    rest = in_order(read(second, 1, LENGTH))
    assert seen + rest == in_order(read(loaders(1, data, shuffle=not stream, seed=5), 1))
    assert sorted(seen + rest) == list(range(LENGTH))
    again = in_order(read(second, 2))
    assert sorted(again) == list(range(LENGTH))  # the next epoch is whole


@pytest.mark.promise(100)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_counts_what_was_given_and_not_what_workers_fetched(workers: int) -> None:
    [loader] = loaders(1, shuffle=True, num_workers=workers, seed=1)
    loader.set_epoch(4)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    state = loader.state_dict()
    [other] = loaders(1, shuffle=True, num_workers=workers, seed=1)
    other.load_state_dict(state)
    rest = [batch.tolist() for batch in other]
    assert rest == [batch.tolist() for batch in batches]
    assert sorted(chain(*seen, *rest)) == list(range(LENGTH))
    assert other.state_dict()["samples"] == LENGTH
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest


def test_a_place_at_the_end_of_an_epoch_has_nothing_left() -> None:
    ranks = loaders(2)
    read(ranks, 0)
    state = ranks[0].state_dict()
    assert state["samples"] == LENGTH
    for loader in loaders(3):
        loader.load_state_dict(state)
        assert list(loader) == []
        assert len(loader) == state["batches"]


def test_a_global_batch_stays_whatever_the_number_of_ranks() -> None:
    def batches(replicas: int) -> list[list[int]]:
        found = read(loaders(replicas, batch_size=None, global_batch_size=6, shuffle=True), 0)
        return [sorted(chain(*parts)) for parts in zip(*found, strict=True)]

    assert batches(1) == batches(2) == batches(4)
    with pytest.raises(ParallelismValueError, match="global_batch_size=6 .* leaves some of the 7"):
        loaders(7, batch_size=None, global_batch_size=6)


def stops(samples: list[Any]) -> Any:
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_of_a_dataset_is_no_end(workers: int) -> None:
    [loader] = loaders(1, collate_fn=stops, num_workers=workers)
    with pytest.raises(RuntimeError, match="raised StopIteration for the samples 0, 1, 2"):
        list(loader)


def test_data_that_changed_are_refused() -> None:
    [loader], [other] = loaders(1), loaders(1, list(range(9)), shuffle=True, seed=2)
    message = "length was 23, is now 9; shuffle was False, is now True; seed was 0, is now 2"
    with pytest.raises(ParallelismValueError, match=message):
        other.load_state_dict(loader.state_dict())


DOCUMENTS = [[number] * (number % 7 + 1) for number in range(1, 30)]


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PackedStream(DOCUMENTS, 8), PackedStream(DOCUMENTS, 6)),
        (PackedStream(DOCUMENTS, 8, how="whole"), PackedStream(DOCUMENTS, 8, how="whole", window=5)),
        (PackedDataset(DOCUMENTS, 8), PackedDataset(DOCUMENTS, 8, how="whole")),
    ],
)
def test_a_position_in_blocks_that_are_packed_otherwise_is_refused(before: Any, after: Any) -> None:
    [loader] = loaders(1, before)
    next(iter(loader))
    state = loader.state_dict()
    with fails(
        ParallelismValueError, "The data differ from the checkpoint's (", "packing was {'length': 8, '"
    ):
        loaders(1, after)[0].load_state_dict(state)
    del state["data"]["packing"]  # as in older checkpoints
    loaders(1, before)[0].load_state_dict(state)


class Noisy:
    """Samples that draw from every generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))])


class NoisyStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Noisy()[index] for index in range(8))


@pytest.mark.parametrize("kind", [Noisy, NoisyStream])
def test_randomness_is_a_function_of_the_place_and_not_of_the_process(kind: Any) -> None:
    def drawn(workers: int, epoch: int = 0) -> torch.Tensor:
        loader = DistributedDataLoader(kind(), 2, num_workers=workers)
        loader.set_epoch(epoch)
        found = []
        for batch in loader:
            found.append(batch)
            torch.rand(3), random.random(), np.random.rand()  # what training draws changes nothing
        return torch.cat(found)

    assert torch.equal(drawn(0), drawn(1))
    assert not torch.equal(drawn(0), drawn(0, epoch=1))
    assert drawn(0)[:, 1:].unique().numel() == 24
    loader = DistributedDataLoader(kind(), 2)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert torch.equal(torch.cat(list(loader)), drawn(0)[2:])


def test_reading_leaves_the_processs_generators_alone() -> None:
    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    before = state()
    for loader in (DistributedDataLoader(Noisy(), 2, shuffle=True), DistributedDataLoader(NoisyStream(), 2)):
        list(loader)
    assert state() == before


class Stream(IterableDataset[int]):
    """Numbers; tells which epoch it heard of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


@pytest.mark.promise(118)
def test_the_length_of_a_loader_that_is_placed_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(DistributedDataLoader(range(LENGTH), 3)) == 8
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(DistributedDataLoader(range(LENGTH), global_batch_size=6)) == 4
    assert len(loaders(2)[0]) == 4
    with fails(ParallelismTypeError, "How many of the 2 ranks have different data?", "global_batch_size"):
        len(DistributedDataLoader(range(LENGTH), 3))


class ShuffledStream(IterableDataset[int]):
    """Numbers in an order that Python's generator gives."""

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for number in range(LENGTH):
            held.append(number)
            if len(held) == 5:
                yield held.pop(random.randrange(5))
        yield from held


def collate_at_random(samples: list[int]) -> torch.Tensor:
    """Draws once for each odd sample."""
    return torch.tensor([sample + 100 * random.randrange(9) if sample % 2 else sample for sample in samples])


@pytest.mark.promise(100)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_collating_draws_leaves_the_order_of_a_stream_alone(workers: int) -> None:
    def opened(replicas: int, state: Any = None) -> list[Any]:
        options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate_at_random}
        ranks = loaders(replicas, ShuffledStream(), None, global_batch_size=5, **options)
        for loader in ranks:
            loader.set_epoch(1) if state is None else loader.load_state_dict(state)
        return ranks

    def samples(ranks: list[Any], count: int | None = None) -> list[int]:
        return [sample % 100 for sample in in_order(read(ranks, 1, count or LENGTH))]

    whole = read(opened(1), 1, LENGTH)
    assert sorted(samples(opened(1))) == list(range(LENGTH))
    assert samples(opened(2)) == samples(opened(1))
    first = opened(1)
    before = read(first, 1, 2)
    assert before[0] + read(opened(1, first[0].state_dict()), 1, LENGTH)[0] == whole[0]
    assert samples(opened(2, first[0].state_dict())) == samples(opened(1))[10:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_shared_without_loss(workers: int) -> None:
    ranks = loaders(2, Stream(), num_workers=workers)
    assert in_order(read(ranks, 0)) == list(range(LENGTH))
    with pytest.raises(TypeError, match="Stream has no length"):
        len(ranks[0])
    dropped = loaders(2, Stream(), num_workers=workers, drop_last=True)
    assert in_order(read(dropped, 0)) == list(range(18))


def test_the_dataset_is_given_the_epoch() -> None:
    [loader] = loaders(1, stream := Stream())
    loader.set_epoch(3)
    assert stream.epoch == 3
    loader.load_state_dict({**loader.state_dict(), "epoch": 5})
    assert stream.epoch == 5


def test_hugging_face_datasets() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"x": list(range(LENGTH))}).with_format("torch")
    found = [[batch["x"] for batch in loader] for loader in loaders(2, rows, shuffle=True, seed=1)]
    assert sorted(torch.cat(list(chain(*found))).tolist()) == list(range(LENGTH))
    stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=10)
    first = loaders(2, stream, num_workers=1)
    for loader in first:
        loader.set_epoch(2)
    seen = [next(iter(loader))["x"] for loader in first]
    [rest] = loaders(1, stream, num_workers=1)
    rest.load_state_dict(first[0].state_dict())
    seen += [batch["x"] for batch in rest]
    assert sorted(torch.cat(seen).tolist()) == list(range(LENGTH))
    with pytest.raises(ParallelismValueError, match="num_workers was 1, is now 0"):
        loaders(1, stream)[0].load_state_dict(first[0].state_dict())


@pytest.mark.promise(118)
def test_a_stream_that_is_split_already_is_refused() -> None:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict({"input_ids": [[n] for n in range(8)]}).to_iterable_dataset()
    for one in (stream.map(dict), split_dataset_by_node(stream, rank=0, world_size=1)):
        DistributedDataLoader(one, 2)
    split = split_dataset_by_node(stream, rank=1, world_size=2)
    for one in (split, split.map(dict), PackedStream(split, 2)):
        with pytest.raises(ParallelismValueError, match="already split by split_dataset_by_node"):
            DistributedDataLoader(one, 2)


def test_persistent_workers_follow_the_epochs() -> None:
    [loader] = loaders(1, shuffle=True, num_workers=1, persistent_workers=True)
    [plain] = loaders(1, shuffle=True)
    for epoch in range(2):
        assert read([loader], epoch) == read([plain], epoch)


class ByEpoch:
    """Samples that are others in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


def test_the_dataset_of_persistent_workers_is_given_the_epoch() -> None:
    [loader] = loaders(1, ByEpoch(), batch_size=2, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        first = 100 * epoch
        assert read([loader], epoch) == [[[first, first + 1], [first + 2, first + 3]]]


@pytest.mark.promise(98)
def test_another_loader_of_the_dataset_leaves_it_in_its_epoch() -> None:
    data = ByEpoch()
    [training], [other] = loaders(1, data, batch_size=2), loaders(1, data, batch_size=2)
    training.set_epoch(1)
    batches = iter(training)
    assert next(batches).tolist() == [100, 101]
    assert len(list(other)) == len(list(other)) == 2
    assert next(batches).tolist() == [102, 103]


@pytest.mark.promise(91)
@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([1], {}, ValueError, "either batch_size or global_batch_size"),
        ([1], {"batch_size": 2, "global_batch_size": 4}, ValueError, "either batch_size or global"),
        ([1], {"batch_size": 0}, ValueError, "batch_size must be a positive number of samples, not 0"),
        ([1], {"batch_size": 2, "sampler": [1]}, ValueError, "sampler: a .* makes its own order"),
        ([1], {"batch_size": 1, "num_wrokers": 2}, TypeError, "num_wrokers"),
        (3, {"batch_size": 1}, ParallelismTypeError, "int is not a dataset: it has neither"),
        (iter([1]), {"batch_size": 1}, ParallelismTypeError, "A list_iterator can be read only once"),
        (Stream(), {"batch_size": 1, "shuffle": True}, ValueError, "A Stream has no length, so .* shuffled"),
        (Stream(), {"batch_size": 1, "num_workers": 2}, ValueError, "one worker reads it"),
    ],
)
def test_what_cannot_work_is_refused(data: Any, options: Any, error: type[Exception], message: str) -> None:
    kind = ParallelismValueError if error is ValueError else error
    with pytest.raises(kind, match=message):
        list(DistributedDataLoader(data, **options))


def trained(config: Any = None) -> tuple[Any, dict[str, float], int]:
    data = points(14)
    loader = DistributedDataLoader(data, global_batch_size=4, shuffle=True, seed=3)
    trainer, log = fitted_on_parts([], config, classifier(), train_dataloader=loader, max_duration="2ep")
    results = trainer.eval(DistributedDataLoader(data, global_batch_size=6))
    return result_of(trainer, log), results, trainer.state.timestamp.sample


@pytest.mark.promise(98)
def test_the_trainer_places_its_loaders_and_any_number_of_ranks_trains_alike(world2: World) -> None:
    expected, results, samples = trained()
    assert samples == 28  # the last batch has 2 of 4 samples: none is repeated to fill it
    for found in world2(trained, "fsdp"):
        same_training(found[0], expected)
        assert found[1] == pytest.approx(results, rel=1e-5)
        assert found[2] == samples


def a_rank_without_samples_in_the_last_batch() -> int:
    loader = DistributedDataLoader(points(5), batch_size=2)  # 4 samples, then 1: rank 0 has none
    trainer, _ = fitted_on_parts([], "fsdp", classifier(), train_dataloader=loader)
    return trainer.state.timestamp.sample


def test_a_last_batch_that_is_smaller_than_the_world_is_no_reason_to_warn(world2: World) -> None:
    assert world2(a_rank_without_samples_in_the_last_batch) == [5, 5]


def iterated_without_a_place() -> None:
    with fails(ParallelismValueError, "Which of the 2 ranks have the same data? Pass mesh="):
        iter(DistributedDataLoader(points(4), 2))


def test_a_loader_without_a_place_is_refused_on_several_ranks(world2: World) -> None:
    world2(iterated_without_a_place)
