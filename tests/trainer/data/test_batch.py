"""Batches of any structure."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from composer_dist.errors import ParallelismValueError
from composer_dist.tensors.nested import map_tensors
from composer_dist.trainer.data.batch import num_samples, num_tokens, split, to_device

Pair = namedtuple("Pair", ["x", "y"])
FIVE = torch.arange(5)


@dataclass
class Sentence:
    ids: Tensor
    name: str = "a"


@pytest.mark.parametrize(
    "batch",
    [
        FIVE,
        (FIVE, FIVE),
        [FIVE, [FIVE]],
        {"scale": torch.tensor(2.0), "x": FIVE},
        Pair(FIVE, FIVE),
        Sentence(FIVE),
        BatchEncoding({"input_ids": FIVE}),
    ],
)
def test_samples_are_counted_and_cut_in_every_structure(batch: Any) -> None:
    assert num_samples(batch) == 5
    parts = split(batch, 2)
    assert [num_samples(part) for part in parts] == [2, 3]
    assert {type(part) for part in parts} == {type(batch)}
    assert num_samples(batch) == 5


def test_parts_keep_the_order_and_what_is_not_a_sample_and_none_is_empty() -> None:
    batch = {"x": FIVE, "scale": torch.tensor(2.0), "name": "a"}
    first, second = split(batch, 2)
    assert torch.equal(torch.cat([first["x"], second["x"]]), FIVE)
    assert (first["name"], second["scale"].item()) == ("a", 2.0)
    assert [len(part) for part in split(FIVE, 9)] == [1] * 5
    (whole,) = split(batch, 1)
    assert whole is batch


def test_batches_without_samples_are_refused() -> None:
    with pytest.raises(ParallelismValueError, match="batch of type str has no tensor"):
        num_samples("text")
    with pytest.raises(ParallelismValueError, match=r"the samples: \[4, 5\]"):
        split((FIVE, FIVE[:4]), 2)


def test_tokens_are_those_of_the_mask() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    assert num_tokens({"input_ids": ids}) == 8
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert num_tokens({"input_ids": ids, "attention_mask": mask}) == 5
    assert num_tokens({"input_ids": ids, "attention_mask": mask[:, None, None]}) == 8
    assert num_tokens((ids, ids)) == 0


def test_the_batch_itself_stays_where_it_is() -> None:
    batch = {"x": [FIVE], "name": "a"}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"][0].is_meta
    assert not batch["x"][0].is_meta  # type: ignore[attr-defined]
    doubled = map_tensors(lambda _, tensor: tensor * 2, batch)
    assert torch.equal(doubled["x"][0], FIVE * 2)
    assert doubled["name"] == "a"
