"""A second Trainer resumes where the first one stopped: bit-equal, whatever the dataloader."""

import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from composer_dist import MeshConfig, ParallelismConfig, TPConfig
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import Callback, DistributedDataLoader, StreamingDataLoader, Trainer
from composer_dist.trainer.data.feed import Feed, Size
from composer_dist.trainer.data.position import Reading
from composer_dist.trainer.data.randomness import generator_states, set_generator_states
from tests.kit.compare import equal, fails, fails_alike
from tests.kit.grids import crossed, slow
from tests.kit.training import At, Result, classifier, on_parts, points, result_of, seen_at
from tests.kit.world import World


class Jittered(Dataset[Any]):
    """Points whose inputs are moved at random, by all generators."""

    def __init__(self, samples: int = 14) -> None:
        self.points = points(samples)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.points[index]
        return inputs + random.random() + np.random.rand() + torch.rand(()), label


def sampler() -> DistributedSampler[Any]:
    world, rank = process_group.world_and_rank()
    return DistributedSampler(Jittered(), world, rank, seed=4)


def plain(workers: int = 0) -> Any:
    return DataLoader(Jittered(), 2, sampler=sampler(), num_workers=workers)


def listed() -> list[Any]:
    """Four batches."""
    return list(plain())


def random_order(workers: int = 0) -> Any:
    return DataLoader(Jittered(), 2, shuffle=True, num_workers=workers)


def own(workers: int = 0) -> Any:
    return DistributedDataLoader(Jittered(), 2, shuffle=True, seed=4, num_workers=workers)


def torchdata(workers: int = 0) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Jittered(), 2, sampler=sampler(), num_workers=workers)


def trainer(loader: Any, *callbacks: Callback, **options: Any) -> tuple[Trainer, Any]:
    config = "fsdp" if dist.is_initialized() else None
    options |= {"train_dataloader": loader, "max_duration": "3ep", "seed": 11}
    return on_parts([], config, classifier(), callbacks=callbacks, **options)


def resumed(make: Any, batches: int, stop: bool, workers: int) -> tuple[Result, int]:
    def ask(state: Any) -> None:
        """Asks the last rank to stop after some batch; the next one has been read by then."""
        if state.timestamp.batch == batches and state.rank == state.world_size - 1:
            state.stop_training()

    first, log = trainer(make(workers), *[At(batch_end=ask)] * stop)
    first.fit(duration=None if stop else f"{batches}ba")
    saved, parameters = first.state_dict(), first.state.model.state_dict()
    first._loop.go_to(None)  # ends the workers, for which the garbage collector would wait 5 s
    torch.rand(5), random.random(), np.random.rand()  # another process has other generators
    second, rest = trainer(make(workers))
    second.state.model.load_state_dict(parameters)
    second.load_state_dict(saved)
    second.fit()
    losses, parameters = result_of(second, rest)
    return (log.values("loss/train/total") + losses, parameters), second.state.timestamp.sample


def uninterrupted(make: Any, workers: int = 0) -> tuple[Result, int]:
    whole, log = trainer(make(workers))
    whole.fit()
    return result_of(whole, log), whole.state.timestamp.sample


def both_ways(make: Any, batches: int, stop: bool, workers: int = 0) -> None:
    equal(resumed(make, batches, stop, workers), uninterrupted(make, workers))


LOADERS = [
    own,
    plain,
    random_order,
    pytest.param(torchdata, marks=pytest.mark.filterwarnings("ignore:'set_vital'")),
]


@pytest.mark.promise(100)
@crossed({"make": LOADERS, "batches": [3, 7, 9], "stop": [False, True]})
def test_resumes_bit_equal_with_any_dataloader(make: Any, batches: int, stop: bool) -> None:
    both_ways(make, batches, stop)


@pytest.mark.promise(100)
@pytest.mark.parametrize(
    "make", [own, slow(plain), slow(random_order)]
)  # torchdata's does not keep its workers' generators
def test_resumes_bit_equal_with_workers(make: Any) -> None:
    both_ways(make, 2, False, workers=1)


@pytest.mark.promise(100)
@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize(
    ("make", "stop"),
    [(own, False), slow(own, True), slow(plain, False), (plain, True), slow(torchdata, True)],
)
def test_resumes_bit_equal_on_two_ranks(world2: World, make: Any, stop: bool) -> None:
    world2(both_ways, make, 5, stop)


def test_training_goes_on_where_it_was_though_its_loader_is_evaluated() -> None:
    positions, losses = [], []
    for evaluated in (False, True):
        loader = own().placed(1, 0)
        made, log = trainer(loader, eval_dataloader=loader if evaluated else None, eval_interval="3ba")
        made.fit(duration="4ba")
        positions.append(made.state_dict()["data"])
        losses.append(log.values("loss/train/total"))
    assert positions[0] == positions[1]
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize(
    "make",
    [
        torchdata,
        lambda: DataLoader(points(6), 2, num_workers=1, persistent_workers=True),
        lambda: DistributedDataLoader(Numbers(), 2).placed(1, 0),
    ],
)
def test_a_loader_with_one_pass_at_a_time_is_not_evaluated_too(make: Any) -> None:
    loader = make()
    with pytest.raises(ParallelismValueError, match=f"The {type(loader).__name__} to evaluate on is the one"):
        trainer(loader, eval_dataloader=loader)


def short_list() -> Any:
    return list(DataLoader(range(7 - 5 * dist.get_rank()), 2))


def short_torchdata() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(range(7 - 5 * dist.get_rank()), 2, shuffle=True)


def short_streaming() -> Any:
    from datasets import Dataset

    stream = Dataset.from_dict({"number": list(range(5))}).to_iterable_dataset(num_shards=5)
    return StreamingDataLoader(stream, 1, collate_fn=lambda rows: torch.tensor([rows[0]["number"]])).placed(
        2, dist.get_rank()
    )


def short_own() -> Any:
    """Three batches; rank 0 has no share of the last one."""
    return DistributedDataLoader(range(9), 2, shuffle=True).placed(2, dist.get_rank())


def short_stream() -> Any:
    return DistributedDataLoader(Numbers(), 2).placed(2, dist.get_rank())


class Numbers(IterableDataset[int]):
    """A stream that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def fed(feed: Feed, batches: int = 100) -> list[list[int]]:
    """The next batches of all ranks that count."""
    found = []
    while len(found) < batches and (one := feed.next()):
        assert len(one.batch)
        found.append([] if one.filler else one.batch.tolist())
    return found


def rests(make: Any, batches: int, held: bool) -> tuple[Any, ...]:
    """What a pass gives after some batches; what one that resumes there gives; and the pass after that."""

    def opened(loader: Any, place: Any = None) -> Feed:
        return Feed(loader, "train", lambda batch: Size(len(batch), 1, 1.0), place=place)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the other rank has more batches
        torch.manual_seed(dist.get_rank())
        first = opened(make())
        fed(first, batches)
        assert not held or first.next(stop=True) is None
        place = first.place()
        loader = make()
        second = opened(loader, place)
        generator = torch.get_rng_state()
        again = second.place()
        found = fed(second)
        assert torch.equal(generator, torch.get_rng_state())
        return fed(first), found, fed(opened(make(), again)), len(list(loader))


@pytest.mark.promise(98, 100)
@pytest.mark.filterwarnings("ignore:'set_vital'")
@crossed(
    {
        "make": [short_list, short_torchdata, short_streaming, short_own, short_stream],
        "batches, held": [(1, False), (2, False), (2, True), (3, False)],
    }
)
def test_a_pass_resumes_where_one_rank_has_run_out(
    world2: World, make: Any, batches: int, held: bool
) -> None:
    lengths = {short_list: (4, 1), short_torchdata: (4, 1), short_streaming: (3, 2)}.get(make, (2, 3))
    for (expected, found, again, length), full in zip(
        world2(rests, make, batches, held), lengths, strict=True
    ):
        assert found == again == expected
        assert length == full


def save_after_three(make: Any) -> Mapping[str, Any]:
    first, _ = trainer(make())
    first.fit(duration="3ba")
    return first.state_dict()


def go_on_alone(make: Any, saved: Mapping[str, Any]) -> None:
    second, _ = trainer(make())
    second.load_state_dict(saved)
    second.fit(duration="1ba")


def test_places_of_another_number_of_ranks_are_refused_or_understood(world2: World) -> None:
    go_on_alone(own, world2(save_after_three, own)[0])
    saved = world2(save_after_three, plain)[0]
    with fails(ParallelismValueError, "positions of 2 ranks in their DataLoader, but there are 1"):
        go_on_alone(plain, saved)
    with fails(ParallelismValueError, "no meaning in a DistributedDataLoader: another"):
        go_on_alone(own, saved)


def short_on_one_rank(saved: Mapping[str, Any]) -> None:
    second, _ = trainer(listed()[: 4 - 2 * dist.get_rank()])
    second.load_state_dict(saved)
    with fails_alike(ParallelismValueError, "Rank 1: The list has 2 batches, but 3 were read"):
        second.fit(duration="1ba")


def test_a_dataloader_that_became_shorter_is_named_on_all_ranks(world2: World) -> None:
    world2(short_on_one_rank, world2(save_after_three, listed)[0])


def test_a_place_before_the_last_batch() -> None:
    reading = Reading(range(5))
    assert [next(reading), next(reading)] == [0, 1]
    before, after = reading.place_of_all(True), reading.place_of_all(False)
    assert [next(Reading(range(5), place)) for place in (before, after)] == [1, 2]


def test_batches_of_another_size_have_another_position() -> None:
    reading = Reading(DataLoader(points(14), 2))
    next(reading)
    place, other = reading.place_of_all(False), DataLoader(points(14), 3)
    with fails(
        ParallelismValueError,
        "DataLoader's batch_size is 3, but the checkpoint",
        "with 2",
        "load_ignore_keys",
    ):
        Reading(other, place)
    Reading(other, Reading(DataLoader(points(14), 2)).place_of_all(False))  # nothing has been read
    old = {**place, "ranks": [{"batches": 1, "state": place["ranks"][0]["state"]}]}
    assert Reading(other, old).batches == 1


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataLoader(points(14), batch_sampler=BatchSampler(range(14), 3, False)), "batch_size is 3, "),
        (DataLoader(points(16), 2), "length is 8, "),
        (DataLoader(points(13), 2), "samples is 13, "),
    ],
)
def test_batches_of_other_data_have_another_position(other: Any, message: str) -> None:
    def make() -> Any:
        return DataLoader(points(14), batch_sampler=BatchSampler(range(14), 2, False))

    reading = Reading(make())
    next(reading)
    place = reading.place_of_all(False)
    assert Reading(make(), place).batches == 1
    with fails(
        ParallelismValueError, f"The DataLoader's {message}", "whose position counts batches", "data'"
    ):
        Reading(other, place)


class Endless(Dataset[int]):
    """Of as many samples as its sampler asks for."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.promise(100)
def test_a_dataset_may_have_no_length() -> None:
    loader = DataLoader(Endless(), batch_sampler=[[1, 2], [3]])
    reading = Reading(loader)
    next(reading)
    assert next(Reading(loader, reading.place_of_all(False))).tolist() == [3]


def of_other_replicas(make: Any) -> None:
    """A checkpoint of two ranks with different data, and a run of two ranks with the same data."""
    saved = save_after_three(make)
    config = ParallelismConfig(
        mesh=MeshConfig(dp_shard=1, tp=2), tp=TPConfig(plan={"re:.*0": "colwise_gather"})
    )
    second, _ = on_parts([], config, classifier(), train_dataloader=make(), check_sampler=False)
    second.load_state_dict(saved)
    with fails_alike(ParallelismValueError, "positions of 2 ranks with different data in their", "has 1 now"):
        second.fit(duration="1ba")


@pytest.mark.promise(98)
@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("make", [plain, torchdata])
def test_places_of_another_number_of_parts_are_refused(world2: World, make: Any) -> None:
    world2(of_other_replicas, make)


def test_generators_continue() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), np.random.randn(), float(torch.rand(())), random.gauss()]

    draw()
    saved = generator_states(torch.device("cpu"))
    expected = draw()
    draw()
    set_generator_states(saved, torch.device("cpu"))
    assert draw() == expected


def test_a_dataloader_given_to_fit_begins_at_the_place() -> None:
    saved = save_after_three(own)
    second, _ = trainer(None)
    second.load_state_dict(saved)
    second.fit(train_dataloader=own(), duration="1ep")
    assert second.state.timestamp.sample == 14


def times(trainer: Trainer) -> tuple[int, int, int]:
    at = trainer.state.timestamp
    return at.epoch, at.batch, at.batch_in_epoch


def test_a_dataloader_given_to_fit_in_an_epoch_is_read_to_its_end() -> None:
    one, _ = trainer(own())
    one.fit(duration="5ba")
    one.fit(train_dataloader=own(), duration="6ba")
    assert times(one) == (0, 11, 6)
    one.fit(duration="1ba")
    assert times(one) == (1, 12, 0)


def test_an_epoch_that_is_resumed_without_its_position_starts_over() -> None:
    saved = dict(save_after_three(own))
    del saved["data"]
    second, _ = trainer(own())
    second.load_state_dict(saved)
    second.fit(duration="6ba")
    assert times(second) == (0, 9, 6)


@pytest.mark.parametrize("make", [own, plain])
def test_a_resumed_epoch_has_no_more_batches_than_the_subset(make: Any) -> None:
    saved = save_after_three(make)
    second, _ = on_parts([], None, classifier(), train_dataloader=make(), train_subset_num_batches=2)
    second.load_state_dict(saved)
    second.fit(duration="1ba")
    assert times(second) == (1, 4, 1)


def shuffled_torchdata() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(5)  # the sampler's generator, which it keeps, is seeded from this one
    return StatefulDataLoader(points(14), 2, shuffle=True)


def shuffled() -> Any:
    torch.manual_seed(5)
    return DataLoader(points(14), 2, shuffle=True, generator=torch.Generator().manual_seed(3))


def orders(make: Any, *durations: str, subset: int | None = None) -> list[list[float]]:
    """The batches of a run that is resumed after each duration."""
    seen, note = seen_at("batch_end", lambda state: state.batch[0][:, 0].tolist())
    saved = None
    for duration in durations:
        one, _ = trainer(make(), note, train_subset_num_batches=subset)
        if saved:
            one.load_state_dict(saved)
        one.fit(duration=duration)
        saved = one.state_dict()
    return seen


@pytest.mark.promise(100)
@pytest.mark.filterwarnings("ignore:'set_vital'")
@crossed({"subset": [None, 3], "make": [shuffled_torchdata, shuffled]})
def test_an_order_that_a_dataloader_keeps_continues_in_the_next_epoch(make: Any, subset: int | None) -> None:
    expected = orders(make, "3ep", subset=subset)
    assert orders(make, "1ep", "1ep", "1ep", subset=subset) == expected
    epoch = subset or 7
    assert orders(make, f"{epoch - 1}ba", "1ba", f"{2 * epoch}ba", subset=subset) == expected
    assert orders(make, f"{epoch}ba", "2ba", f"{2 * epoch - 2}ba", subset=subset) == expected
    assert sorted(expected[:epoch]) != sorted(expected[epoch : 2 * epoch])


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_the_end_of_an_epoch_in_another_dataloader_is_the_start_of_the_next_one() -> None:
    first, _ = trainer(shuffled_torchdata())
    first.fit(duration="1ep")
    saved = first.state_dict()
    for make in (own, plain):
        second, _ = trainer(make())
        second.load_state_dict(saved)
        second.fit(duration="1ep")
        assert times(second) == (2, 14, 0)
