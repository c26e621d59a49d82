"""Blocks from documents: no token lost, no label or attention across a border."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import DistributedDataLoader, PackedDataset, PackedStream
from tests.kit.training import language_model, loaders

DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7, 8], [], [9], [10, 11, 12, 13]]


def rows(found: Any) -> list[list[list[int]]]:
    return [[part.tolist() for part in one.values()] for one in found]


@pytest.mark.parametrize("pack", [PackedDataset, PackedStream])
def test_documents_are_cut_where_a_block_is_full(pack: Any) -> None:
    packed = pack(DOCUMENTS, 4, pad_token_id=99)
    found = rows(packed[index] for index in range(4)) if pack is PackedDataset else rows(packed)
    assert found == [
        [[1, 2, 3, 4], [-100, 2, 3, -100], [0, 1, 2, 0]],
        [[5, 6, 7, 8], [-100, 6, 7, 8], [0, 1, 2, 3]],
        [[9, 10, 11, 12], [-100, -100, 11, 12], [0, 0, 1, 2]],
        [[13, 99, 99, 99], [-100, -100, -100, -100], [0, 0, 1, 2]],
    ]
    dropped = pack(DOCUMENTS, 4, drop_last=True)
    count = len(dropped) if pack is PackedDataset else len(list(dropped))
    assert count == 3


@pytest.mark.promise(118)
@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_a_window_has_documents(window: Any) -> None:
    with pytest.raises(
        ParallelismValueError, match=f"window must be a positive number of documents, not {window}"
    ):
        PackedStream(DOCUMENTS, 4, how="whole", window=window)


def test_documents_stay_whole_where_they_fit() -> None:
    packed = PackedDataset(DOCUMENTS, 4, how="whole", pad_token_id=99)
    found = [packed[index]["input_ids"].tolist() for index in range(len(packed))]
    assert found == [[4, 5, 6, 7], [10, 11, 12, 13], [1, 2, 3, 8], [9, 99, 99, 99]]
    many = [[number] * (number * 7 % 13 + 1) for number in range(100)]
    packed = PackedDataset(many, 16, how="whole")
    assert all(len({piece[0] for piece in pieces}) == len(pieces) for pieces in packed.blocks)
    assert len(packed) <= 1.05 * sum(map(len, many)) / 16 + 1
    assert sorted(piece[0] for pieces in packed.blocks for piece in pieces) == list(range(100))


def test_no_token_is_lost_on_any_number_of_ranks() -> None:
    documents = [list(range(start, start + start % 5)) for start in range(100, 140)]
    every = [token for document in documents for token in document]
    for how in ("cut", "whole"):
        packed = PackedDataset(documents, 6, how=how, pad_token_id=0)  # type: ignore[arg-type]
        found = [
            int(token)
            for loader in loaders(3, packed, shuffle=True, batch_size=2)
            for batch in loader
            for token in batch["input_ids"].flatten()
            if token
        ]
        assert sorted(found) == sorted(every)


def test_hugging_face_datasets() -> None:
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": DOCUMENTS, "other": list("abcde")})
    for source in (data, data.with_format("torch")):
        assert rows(PackedDataset(source, 4)[index] for index in range(4)) == rows(PackedStream(DOCUMENTS, 4))
        assert rows(PackedStream(source.to_iterable_dataset(), 4)) == rows(PackedStream(DOCUMENTS, 4))
    with pytest.raises(ParallelismValueError, match="no column 'tokens'; it has input_ids, other"):
        PackedDataset(data, 4, key="tokens")


def test_documents_do_not_attend_to_each_other() -> None:
    from composer_dist import HuggingFaceModel

    model = language_model().model.eval()
    packed = PackedDataset(DOCUMENTS, 7, pad_token_id=31)
    batch = next(iter(DistributedDataLoader(packed, 2)))
    with torch.no_grad():
        together = HuggingFaceModel(model)(batch).logits
        for row, pieces in enumerate(packed.blocks[:2]):
            start = 0
            for number, first, end in pieces:
                alone = model(input_ids=torch.tensor([DOCUMENTS[number][first:end]])).logits[0]
                torch.testing.assert_close(together[row, start : start + end - first], alone)
                start += end - first


def test_the_loss_of_a_block_is_that_of_its_documents() -> None:
    model = language_model().model.eval().requires_grad_(False)
    batch = next(iter(DistributedDataLoader(PackedDataset(DOCUMENTS, 13), 1)))
    loss = float(model(**batch, use_cache=False).loss)
    losses: list[tuple[float, int]] = []
    for document in DOCUMENTS:
        if len(document) > 1:
            ids = torch.tensor([document])
            losses.append((float(model(input_ids=ids, labels=ids).loss), len(document) - 1))
    count = sum(terms for _, terms in losses)
    assert loss == pytest.approx(sum(one * terms for one, terms in losses) / count, rel=1e-5)


class Documents:
    """Starts over each time."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.arange(5) + self.epoch])


def test_a_stream_is_given_the_epoch() -> None:
    loader = DistributedDataLoader(PackedStream(Documents(), 5), 1)
    loader.set_epoch(3)
    assert next(iter(loader))["input_ids"].tolist() == [[3, 4, 5, 6, 7]]


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ParallelismValueError, match="all documents are empty"):
        PackedDataset([[], []], 4)
    with pytest.raises(ParallelismValueError, match="length must be a number of tokens, at least 2, not 1"):
        PackedStream(DOCUMENTS, 1)
    with pytest.raises(ParallelismValueError, match="how must be one of 'cut', 'whole', not 'bins'"):
        PackedDataset(DOCUMENTS, 4, how="bins")  # type: ignore[arg-type]
    with pytest.raises(ParallelismTypeError, match="Document 1 is not a sequence of tokens but a str"):
        PackedDataset([[1], "text"], 4)
    with pytest.raises(ParallelismValueError, match="Document 0 has no 'input_ids'; it has text"):
        list(PackedStream([{"text": "a"}], 4))
