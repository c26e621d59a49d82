"""One process's feed; several ranks are in test_parallel.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.trainer.data.feed import Feed, Size
from composer_dist.trainer.data.loader import length_of
from tests.kit.compare import fails_alike
from tests.kit.training import At, batches, classifier, fitted_on_parts, points, result_of, same_training
from tests.kit.world import World


def size(batch: list[int]) -> Size:
    return Size(samples=len(batch), tokens=10 * len(batch), weight=sum(batch))


def test_batches_come_with_their_sizes() -> None:
    feed = Feed([[1, 2], [3]], "train", size, clock=lambda: 4.5)
    assert (first := feed.next()) is not None
    assert (first.batch, first.samples, first.tokens, first.most) == ([1, 2], 2, 20, 2)
    assert (first.weight, first.mean_weight, first.seconds) == (3.0, 3.0, 4.5)
    assert not first.filler
    assert feed.length == 2
    assert (second := feed.next()) is not None
    assert second.batch == [3]
    assert not feed.ended
    assert feed.next() is None
    assert feed.ended


def test_a_wish_to_stop_keeps_the_batch() -> None:
    feed = Feed([[1], [2]], "train", size)
    assert feed.next(stop=True) is None
    assert feed.stopped
    assert not feed.ended
    batches = [feed.next(), feed.next()]
    assert [fed.batch for fed in batches if fed] == [[1], [2]]
    assert not feed.stopped


def test_an_empty_dataloader_is_an_error() -> None:
    with pytest.raises(ParallelismValueError, match="eval dataloader is empty on the only rank"):
        Feed([], "eval", size).next()


def lent() -> tuple[Any, ...]:
    """The first rank has a batch, the other none."""
    feed = Feed([] if dist.get_rank() else [[5]], "eval", size)
    found = []
    while (fed := feed.next()) is not None:
        found.append((fed.batch, fed.filler, fed.weight))
    return tuple(found)


def test_a_rank_without_a_batch_to_evaluate_borrows_one_at_weight_0(world2: World) -> None:
    assert world2(lent) == [(([5], False, 5.0),), (([5], True, 0.0),)]


class Failing:
    """Fails at the second batch."""

    def __iter__(self) -> Any:
        yield batches([3, 3], 1)[0]
        raise OSError("gone")


def test_a_dataloaders_error_is_its_own() -> None:
    feed = Feed(Failing(), "train", lambda batch: Size())
    feed.next()
    with pytest.raises(OSError, match="gone"):
        feed.next()


def test_stop_iteration_of_a_measure_is_no_end() -> None:
    with pytest.raises(StopIteration):
        Feed(batches([3, 3], 0), "train", lambda batch: next(iter(()))).next()


class Stops(Dataset[torch.Tensor]):
    """Stops at the second sample."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1) if index == 0 else next(iter(()))


@pytest.mark.parametrize("batch_size", [1, None])
def test_stop_iteration_of_a_dataset_is_no_end(batch_size: int | None) -> None:
    """torch's DataLoader ended the epoch there."""
    feed = Feed(DataLoader(Stops(), batch_size), "train", lambda batch: Size())
    feed.next()
    with pytest.raises(RuntimeError, match=r"The train dataset \(Stops\) or its collate_fn raised StopIt"):
        feed.next()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, None])
def test_the_end_of_a_dataset_is_one(workers: int, batch_size: int | None) -> None:
    for dataset in (Stream(), [torch.ones(1)]):
        feed = Feed(DataLoader(dataset, batch_size, num_workers=workers), "train", lambda batch: Size())
        assert feed.next()
        assert feed.next() is None


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.ones(1)


def test_length_where_it_is_known() -> None:
    assert length_of([1, 2]) == 2
    assert length_of(iter([1, 2])) is None
    assert length_of(DataLoader(Stream())) is None
    feed = Feed(DataLoader(Stream()), "train", lambda batch: Size())
    feed.next()
    assert feed.length is None


def uneven(mine: list[list[int]], config: Any = None) -> tuple[Any, dict[str, float], list[float]]:
    """Trains and evaluates on batches of the given points."""
    batches = [points()[indices] for indices in mine]
    if config:
        with pytest.warns(UserWarning, match="train dataloader of rank 1 ended after 1 batches"):
            trainer, log = fitted_on_parts([], config, classifier(), train_dataloader=batches)
        with pytest.warns(UserWarning, match="eval dataloader of rank 1 ended after 1 batches"):
            results = trainer.eval(batches)
    else:
        trainer, log = fitted_on_parts([], None, classifier(), train_dataloader=batches)
        results = trainer.eval(batches)
    results |= {"samples": trainer.state.timestamp.sample}
    return result_of(trainer, log), results, log.values("metrics/train/MulticlassAccuracy")


def uneven_on_two_ranks() -> Any:
    return uneven([[[0, 1, 2], [3, 4], [5, 6]], [[7, 8]]][dist.get_rank()], "fsdp")


@pytest.mark.promise(98)
def test_a_rank_with_fewer_batches_takes_part_until_all_have_ended(world2: World) -> None:
    expected, results, accuracies = uneven([[0, 1, 2, 7, 8], [3, 4], [5, 6]])
    assert results["samples"] == 9
    for found in world2(uneven_on_two_ranks):
        same_training(found[0], expected)
        assert found[1] == pytest.approx(results, rel=1e-5)
        assert found[2] == pytest.approx(accuracies)


def bad_on_rank_1(bad: Any, error: type[Exception], text: str) -> None:
    with fails_alike(error, text):
        fitted_on_parts([], "fsdp", train_dataloader=[batches([3, 3], 0), bad][dist.get_rank()])


@pytest.mark.promise(98)
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ([], ParallelismValueError, "train dataloader is empty on rank 1"),
        (Failing(), ParallelismRuntimeError, "Rank 1: OSError: gone"),
    ],
)
def test_a_bad_dataloader_of_one_rank_raises_on_all(world2: World, bad: Any, error: Any, text: str) -> None:
    world2(bad_on_rank_1, bad, error, text)


def stopped_after(batch: int) -> tuple[int, list[float]]:
    """Where rank 1 stops the fit of four batches, and the losses of all batches, after a second fit."""

    def stop(state: Any) -> None:
        if (state.rank, state.timestamp.batch) == (1, batch):
            state.stop_training()

    trainer, log = fitted_on_parts([3, 3], "fsdp", callbacks=At(batch_end=stop))
    stopped_at = trainer.state.timestamp.batch
    if stopped_at < 4:
        trainer.fit()
    return stopped_at, log.values("loss/train/total")


def test_one_rank_stops_all_and_no_batch_is_lost(world2: World) -> None:
    (_, expected), _ = world2(stopped_after, 4)
    assert world2(stopped_after, 2) == [(2, expected)] * 2
