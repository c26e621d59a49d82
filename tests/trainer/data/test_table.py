"""Rows of tables as tokens with classes or texts, and rows of different lengths as a batch."""

from typing import Any

import pytest
import torch

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import PadRows, TableTokenizer
from tests.kit.chat import chat_tokenizer

pytestmark = pytest.mark.promise(125)


def test_classes_are_numbered_and_texts_are_tokenized() -> None:
    tokenizer = chat_tokenizer()
    make = TableTokenizer(tokenizer, classes=["bad", "good"], max_length=4)
    rows = [{"text": "It is good.", "label": "good"}, {"text": "No.", "label": "bad"}]
    with pytest.warns(UserWarning, match=r"1 of 2 rows is longer than 4 tokens .*data.context"):
        made = make.map(rows)
    assert [row["labels"] for row in made] == [1, 0]
    assert made[0]["input_ids"] == tokenizer("It is good.")["input_ids"][:4]
    assert TableTokenizer(tokenizer)({"text": "a", "label": True})["labels"] == 1
    writes = TableTokenizer(tokenizer, label="answer")({"text": "2 and 3?", "answer": "5"})
    assert writes["labels"] == [*tokenizer("5")["input_ids"], tokenizer.eos_token_id]
    with pytest.raises(
        ParallelismValueError, match="'god' in column 'label' is neither .* Did you mean 'good'"
    ):
        make({"text": "a", "label": "god"})
    with pytest.raises(ParallelismValueError, match="has no column 'label'. Its columns: text"):
        make({"text": "a"})


def test_rows_are_padded_column_by_column() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "labels": [1], "token_type_ids": [0, 1, 1], "name": "a"},
        {"input_ids": [8], "labels": [2, 3], "token_type_ids": [1], "name": "b"},
    ]
    batch = PadRows(9)(rows)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "labels": [[1, -100], [2, 3]],
        "token_type_ids": [[0, 1, 1], [1, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    one = PadRows(0)([{"input_ids": torch.tensor([1, 2]), "label": 1}, {"input_ids": [3], "label": 0}])
    assert one["labels"].tolist() == [1, 0]
    assert PadRows(7)([{"input_ids": []}, {"input_ids": [3]}])["input_ids"].tolist() == [[7], [3]]
    assert PadRows(7)([{"input_ids": []}, {"input_ids": [3]}])["input_ids"].dtype == torch.long
    assert PadRows(0)([{"input_ids": [1, 2]}, {"input_ids": [3]}])["labels"].tolist() == [[1, 2], [3, -100]]
    padded = {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}  # as tokenizers pad
    assert PadRows(0)([padded])["labels"].tolist() == [[1, 2, -100]]
    packed = PadRows(0)([{"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 1]}])
    assert "attention_mask" not in packed
    with pytest.raises(ParallelismValueError, match="Row 1 of a batch has no input_ids; it has text"):
        PadRows(0)([{"input_ids": [1]}, {"text": "a"}])
    for column in ([[1, 2], [3]], [[1]], {"a": 1}):
        with pytest.raises(ParallelismValueError, match=r"Column 'x' does not make one tensor: .*collate_fn"):
            PadRows(0)([{"input_ids": [1], "x": column}])
    with pytest.raises(ParallelismValueError, match="do not all have the same columns"):
        PadRows(0)([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}])


def test_a_column_has_one_type_in_all_rows_of_a_batch() -> None:
    mixed = [
        {"input_ids": [1, 2], "weights": [1, 0], "score": 1, "tools": None, "name": None},
        {"input_ids": [3, 4], "weights": [0.5, 0.25], "score": 0.5, "tools": None, "name": "a"},
    ]
    for rows in (mixed, mixed[::-1]):
        batch = PadRows(0)(rows)
        assert list(batch) == ["input_ids", "weights", "score", "labels", "attention_mask"]
        assert batch["input_ids"].dtype == torch.long
        assert batch["weights"].tolist() == [row["weights"] for row in rows]
        assert batch["score"].tolist() == [row["score"] for row in rows]
    none, some = {"input_ids": [1], "score": None}, {"input_ids": [2], "score": 0.5}
    for number, rows in enumerate([[none, some], [some, none]]):
        with pytest.raises(ParallelismValueError, match=f"Column 'score' is None in row {number} of a batch"):
            PadRows(0)(rows)


def test_a_text_to_write_has_an_end() -> None:
    tokenizer = chat_tokenizer()
    end = tokenizer.eos_token_id
    whole = TableTokenizer(tokenizer)({"text": "a", "label": "Paris"})["labels"]
    assert whole[-1] == end
    assert whole.count(end) == 1
    cut = TableTokenizer(tokenizer, max_length=3)({"text": "a", "label": "Paris Paris Paris Paris"})["labels"]
    assert (len(cut), cut[-1]) == (3, end)


@pytest.mark.parametrize("label", [2, -1, 1.5])
def test_a_label_that_is_no_class_is_named(label: float) -> None:
    make = TableTokenizer(chat_tokenizer(), classes=["bad", "good"])
    with pytest.raises(
        ParallelismValueError,
        match=rf"label {label} in column 'label' is neither.*Known classes, numbered from 0: bad",
    ):
        make({"text": "a", "label": label})
    with pytest.raises(ParallelismValueError, match="Column 'label' is empty. Remove the row"):
        make({"text": "a", "label": None})


def test_numbers_as_names_of_classes_as_labels_and_as_texts() -> None:
    tokenizer = chat_tokenizer()
    from_one = TableTokenizer(tokenizer, classes=["1", "2", "3"])
    assert [from_one({"text": "a", "label": label})["labels"] for label in (1, "2", 3.0)] == [0, 1, 2]
    with pytest.raises(ParallelismValueError, match="label 0 in column 'label' is neither"):
        from_one({"text": "a", "label": 0})
    yes_first = TableTokenizer(tokenizer, classes=["True", "false"])
    assert [yes_first({"text": "a", "label": label})["labels"] for label in (True, False)] == [0, 1]
    assert TableTokenizer(tokenizer)({"text": 7, "label": 0.5})["labels"] == 0.5
    writes = TableTokenizer(tokenizer, writes=True)
    assert writes({"text": 7, "label": 12}) == TableTokenizer(tokenizer)({"text": "7", "label": "12"})
    with pytest.raises(ParallelismValueError, match="pass writes or classes"):
        TableTokenizer(tokenizer, writes=True, classes=["a"])


@pytest.mark.parametrize(("row", "message"), [
    ({"text": "", "label": 1}, "Column 'text' is empty. Remove the row"),
    ({"text": None, "label": 1}, "Column 'text' is empty. Remove the row"),
    ({"text": "a", "label": float("nan")}, "Column 'label' is empty. Remove the row"),
    ({"text": ["a"], "label": 1}, "Column 'text' must hold text, not list"),
    ({"txt": "a", "label": 1}, "no column 'text'. Did you mean 'txt'"),
])  # fmt: skip
def test_cells_that_cannot_be_used_are_named(row: Any, message: str) -> None:
    with pytest.raises((ParallelismValueError, ParallelismTypeError), match=message):
        TableTokenizer(chat_tokenizer())(row)
