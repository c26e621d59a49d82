"""Streams that are split by rank and worker, and that continue where they were."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_dist.distributed.ranks import process_group
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import DistributedDataLoader, PackedStream, StreamingDataLoader
from composer_dist.trainer.data import packing, streaming
from composer_dist.trainer.data.feed import Feed, Size
from tests.kit.compare import fails, fails_alike
from tests.kit.grids import crossed
from tests.kit.world import World

pytestmark = pytest.mark.promise(124)
datasets = pytest.importorskip("datasets", reason="an extra")


def files(folder: Path, count: int = 4, rows: int = 6) -> Any:
    """A stream of `count` files of documents, each with its own tokens."""
    for number in range(count):
        lines = [json.dumps({"input_ids": [100 * number + row] * (row + 1)}) for row in range(rows)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return read(folder)


def read(folder: Path) -> Any:
    names = sorted(map(str, folder.glob("*.jsonl")))
    return datasets.load_dataset("json", data_files=names, streaming=True, split="train")


def tokens_of_files(count: int) -> list[int]:
    return [token for file in range(count) for row in range(6) for token in [100 * file + row] * (row + 1)]


def tokens(batches: Any) -> list[int]:
    return [int(token) for batch in batches for token in batch["input_ids"].flatten() if token]


def collate(rows: list[Any]) -> Any:
    return {"input_ids": torch.tensor([token for row in rows for token in row["input_ids"]])}


class Counted:
    """A tokenizer that notes what it tokenized."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, row: Any) -> Any:
        self.seen.append(row["input_ids"][0])
        return row


@crossed({"how": [None, "cut", "whole"], "ranks": [1, 2, 3]})
def test_ranks_read_their_own_part_and_resume_without_reading_again(
    how: Any, ranks: int, tmp_path: Path
) -> None:
    def opened(rank: int) -> tuple[Any, Counted]:
        counted = Counted()
        stream = files(tmp_path).map(counted)
        packed = stream if how is None else PackedStream(stream, 7, how=how, window=4)
        made = StreamingDataLoader(packed, 1, collate_fn=collate if how is None else None)
        return made.placed(ranks, rank), counted

    everything: Counter[int] = Counter()
    for rank in range(ranks):
        whole = tokens(opened(rank)[0])
        everything.update(whole)
        for stop in (0, 1, 3):
            first, _ = opened(rank)
            first.set_epoch(0)
            batches = iter(first)
            before = tokens(next(batches) for _ in range(stop))
            state = first.state_dict()
            second, counted = opened(rank)
            second.load_state_dict(state)
            assert before + tokens(second) == whole
            if stop == 3 and how is None:
                assert set(counted.seen).isdisjoint(before)
            assert tokens(second) == whole  # the next pass begins at the start
    assert everything == Counter(token for token in tokens_of_files(4) if token)


@pytest.mark.parametrize("how", [None, "cut", "whole"])
def test_the_position_before_the_first_batch_of_an_epoch_is_its_start(how: Any, tmp_path: Path) -> None:
    def opened() -> Any:
        stream = files(tmp_path)
        packed = stream if how is None else PackedStream(stream, 7, how=how, window=4)
        return StreamingDataLoader(packed, 1, collate_fn=collate if how is None else None)

    first = opened()
    whole = tokens(first)
    first.set_epoch(1)
    iter(first)
    second = opened()
    second.load_state_dict(first.state_dict())
    assert tokens(second) == whole


def test_workers_divide_the_files_and_resume(tmp_path: Path) -> None:
    def opened(workers: int = 2) -> Any:
        packed = PackedStream(files(tmp_path), 7, how="whole")
        return StreamingDataLoader(packed, global_batch_size=4, num_workers=workers).placed(2, 1)

    whole = tokens(opened())
    first = opened()
    batches = iter(first)
    before = tokens([next(batches), next(batches)])
    second = opened()
    second.load_state_dict(first.state_dict())
    assert before + tokens(second) == whole
    assert sorted(whole) == sorted(tokens(opened(0)))
    with pytest.raises(ParallelismValueError, match="position is that of 2 workers, but num_workers is 0"):
        opened(0).load_state_dict(first.state_dict())


@pytest.mark.promise(100)
@crossed({"workers": [2, 0], "how": [None, "cut", "whole"]})
def test_a_position_is_kept_until_each_worker_has_read_something(
    workers: int, how: Any, tmp_path: Path
) -> None:
    def opened(state: Any = None) -> StreamingDataLoader:
        stream = files(tmp_path).map(dict)
        packed = stream if how is None else PackedStream(stream, 7, how=how, window=4)
        made = StreamingDataLoader(packed, 1, collate_fn=None if how else collate, num_workers=workers)
        if state is not None:
            made.load_state_dict(state)
        return made

    whole, found, state = tokens(opened()), [], None
    for count in (1, 1, 0, 2, 1):
        loader = opened(state)
        batches = iter(loader)
        found += tokens(next(batches) for _ in range(count))
        state = loader.state_dict()
    assert found + tokens(opened(state)) == whole


def shuffled(folder: Path, how: Any = None, workers: int = 0, state: Any = None) -> Any:
    """Epoch 1 of a stream with a shuffle buffer, or what is left of it."""
    stream = files(folder).shuffle(seed=3, buffer_size=5).map(dict)
    packed = stream if how is None else PackedStream(stream, 7, how=how, window=4)
    options = {"num_workers": workers, "collate_fn": collate if how is None else None}
    loader = StreamingDataLoader(packed, 1, **options)
    loader.set_epoch(1)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def beginning(loader: Any, batches: int = 5) -> tuple[list[int], Any]:
    """What the first batches hold, and the position after them."""
    iterator = iter(loader)
    return tokens(next(iterator) for _ in range(batches)), loader.state_dict()


@crossed({"workers": [0, 2], "how": [None, "cut", "whole"]})
def test_what_a_shuffle_buffer_holds_is_not_lost(how: Any, workers: int, tmp_path: Path) -> None:
    whole = tokens(shuffled(tmp_path, how, workers))
    first, state = beginning(shuffled(tmp_path, how, workers))
    second, state = beginning(shuffled(tmp_path, how, workers, state))
    last = shuffled(tmp_path, how, workers, state)
    assert first + second + tokens(last) == whole
    assert tokens(last) == whole  # the next pass begins at the start


@pytest.mark.parametrize("how", [None, "cut"])
def test_positions_of_shuffled_streams_in_older_checkpoints_are_read(
    how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        for module in (streaming, packing):
            older.setattr(module, "with_position", lambda stream: stream)
        _, state = beginning(shuffled(tmp_path, how))
        second, later = beginning(shuffled(tmp_path, how, state=state))
        rest = tokens(shuffled(tmp_path, how, state=later))
    assert beginning(shuffled(tmp_path, how, state=state)) == (second, later)
    assert tokens(shuffled(tmp_path, how, state=later)) == rest


@pytest.mark.promise(98)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_among_blocks_that_are_packed_otherwise_is_refused(workers: int, tmp_path: Path) -> None:
    def opened(length: int, how: Any, window: int = 4) -> StreamingDataLoader:
        packed = PackedStream(files(tmp_path), length, how=how, window=window)
        return StreamingDataLoader(packed, 1, num_workers=workers)

    before, state = beginning(opened(7, "whole"))
    for other in (opened(9, "whole"), opened(7, "whole", 5), opened(7, "cut")):
        with fails(ParallelismValueError, "position is in another stream (packing was {'length': 7, 'how'"):
            other.load_state_dict(state)
    del state["packing"]  # as in older checkpoints
    second = opened(7, "whole")
    second.load_state_dict(state)
    assert before + tokens(second) == tokens(opened(7, "whole"))
    whole = tokens(opened(7, "cut"))
    before, state = beginning(opened(7, "cut"))
    second = opened(9, "cut")  # a document may begin and end anywhere in its blocks
    second.load_state_dict(state)
    assert sorted(before + tokens(second)) == sorted(whole)


@pytest.mark.promise(98)
@crossed({"mapped": [False, True], "how": [None, "cut", "whole"]})
def test_another_stream_of_the_same_files_leaves_the_position_alone(
    mapped: bool, how: Any, tmp_path: Path
) -> None:
    def opened() -> list[Any]:
        stream = files(tmp_path)
        stream = stream.map(dict) if mapped else stream
        both = [
            one if how is None else PackedStream(one, 7, how=how) for one in (stream.skip(3), stream.take(3))
        ]
        collated = collate if how is None else None
        return [StreamingDataLoader(one, 1, collate_fn=collated).placed(1, 0) for one in (*both, both[0])]

    whole = tokens(opened()[0])
    first, taken, again = opened()
    batches = iter(first)
    before = tokens(next(batches) for _ in range(2))
    tokens(taken), tokens(again)
    before += tokens(next(batches) for _ in range(2))
    tokens(taken), tokens(again)
    second = opened()[0]
    second.load_state_dict(first.state_dict())
    assert before + tokens(second) == whole


@pytest.mark.promise(98)
@pytest.mark.parametrize("kind", [StreamingDataLoader, DistributedDataLoader])
def test_a_position_in_a_stream_that_is_shuffled_without_a_seed_is_refused(kind: Any, tmp_path: Path) -> None:
    def opened(seed: int | None) -> Any:
        return kind(files(tmp_path).shuffle(seed=seed, buffer_size=5).map(dict), 2, collate_fn=collate)

    _, state = beginning(opened(None).placed(1, 0), 1)
    with fails(ParallelismValueError, "stream_order was ", "shuffle() needs a seed"):
        opened(None).load_state_dict(state)
    _, state = beginning(opened(3).placed(1, 0), 1)
    opened(3).load_state_dict(state)


def fed_in_different_orders(folder: Path, kind: Any, seed: int | None) -> list[int]:
    world, rank = process_group.world_and_rank()
    stream = read(folder).shuffle(seed=seed, buffer_size=5)
    loader = kind(stream, 2, collate_fn=collate).placed(world, rank)
    feed = Feed(loader, "train", lambda batch: Size(1, 1, 1.0))
    if seed is None:
        with fails_alike(ParallelismValueError, "shuffle the train stream in different orders", "same seed"):
            feed.next()
        return []
    found = []
    while (fed := feed.next()) is not None:
        found += [] if fed.filler else fed.batch["input_ids"].tolist()
    return found


@pytest.mark.promise(118)
@crossed({"kind": [StreamingDataLoader, DistributedDataLoader], "seed": [None, 3]})
def test_ranks_that_shuffle_a_stream_in_different_orders_are_told(
    world2: World, kind: Any, seed: int | None, tmp_path: Path
) -> None:
    files(tmp_path, 3)
    found = [*chain(*world2(fed_in_different_orders, tmp_path, kind, seed))]
    assert sorted(found) == ([] if seed is None else sorted(tokens_of_files(3)))


class Plain:
    """A stream that is no IterableDataset."""

    def __init__(self, replicas: int = 1, rank: int = 0) -> None:
        self.replicas, self.rank = replicas, rank

    def split(self, num_replicas: int, rank: int) -> "Plain":
        return Plain(num_replicas, rank)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 10, self.replicas))


class Stateful(Plain):
    """Knows its position, which it calls as ours."""

    began, given = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": 1000 + self.given}

    def load_state_dict(self, state: Any) -> None:
        self.began = self.given = state["samples"] - 1000

    def __iter__(self) -> Iterator[int]:
        for number in list(super().__iter__())[self.began :]:
            self.given += 1
            yield number


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_any_iterable_that_can_be_split_is_read_and_resumed(kind: Any) -> None:
    def opened() -> StreamingDataLoader:
        return StreamingDataLoader(kind(), 2, num_workers=0).placed(2, 1)

    assert [batch.tolist() for batch in opened()] == [[1, 3], [5, 7], [9]]
    first = opened()
    next(iter(first))
    second = opened()
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[5, 7], [9]]


@pytest.mark.promise(118)
def test_streams_that_each_worker_would_read_as_a_whole_are_refused() -> None:
    for stream in (Plain(), PackedStream([[1, 2, 3]], 2)):
        StreamingDataLoader(stream, 2, num_workers=1)
        with pytest.raises(ParallelismTypeError, match=r"Nothing says which of 2 workers .*num_workers=0"):
            StreamingDataLoader(stream, 2, num_workers=2)


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch(tmp_path: Path) -> None:
    def drawn(rank: int, epoch: int) -> list[float]:
        stream = files(tmp_path).map(lambda row: {"drawn": random.random()})
        options: dict[str, Any] = {"num_workers": 1, "collate_fn": lambda rows: rows[0]["drawn"]}
        one = StreamingDataLoader(stream, 1, **options).placed(2, rank)
        one.set_epoch(epoch)
        return list(one)

    torch.manual_seed(3)
    found = [drawn(0, 0), drawn(1, 0), drawn(0, 1)]
    assert len({number for numbers in found for number in numbers}) == 36
    assert drawn(0, 1) == found[2]


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    stream = files(tmp_path)
    with pytest.raises(ParallelismTypeError, match="A list is not a stream of `datasets`"):
        StreamingDataLoader([1], 2)
    with pytest.raises(ParallelismTypeError, match="A list is not a stream"):
        StreamingDataLoader(PackedStream([[1, 2]], 2), 2).placed(2, 0)
    with pytest.raises(ParallelismValueError, match="must be a multiple of the 2"):
        StreamingDataLoader(stream, global_batch_size=3).placed(2, 0)
    with pytest.raises(ParallelismValueError, match="Pass either"):
        StreamingDataLoader(stream)
    with pytest.raises(ParallelismValueError, match="batch_size must be a positive number of samples, not 0"):
        StreamingDataLoader(stream, 0)
    with pytest.raises(ParallelismValueError, match="already split by split_dataset_by_node.*StreamingDataL"):
        DistributedDataLoader(StreamingDataLoader(stream, 2).placed(2, 0).dataset, 2)
