"""Streams that are split by rank and worker, and that continue where they were."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import DistributedDataLoader, PackedStream, StreamingDataLoader
from composer_dist.trainer.data import packing, streaming
from tests.kit.grids import crossed

pytestmark = pytest.mark.promise(124)
datasets = pytest.importorskip("datasets", reason="an extra")


def files(folder: Path, count: int = 4, rows: int = 6) -> Any:
    """A stream of `count` files of documents, each with its own tokens."""
    for number in range(count):
        lines = [json.dumps({"input_ids": [100 * number + row] * (row + 1)}) for row in range(rows)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    names = sorted(map(str, folder.glob("*.jsonl")))
    return datasets.load_dataset("json", data_files=names, streaming=True, split="train")


def tokens(batches: Any) -> list[int]:
    return [int(token) for batch in batches for token in batch["input_ids"].flatten() if token]


def collate(rows: list[Any]) -> Any:
    import torch

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
    expected = [token for file in range(4) for row in range(6) for token in [100 * file + row] * (row + 1)]
    assert everything == Counter(token for token in expected if token)


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
