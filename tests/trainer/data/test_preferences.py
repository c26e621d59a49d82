"""Pairs of answers as tokens: those of TRL's DPOTrainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import PadPreferences, PreferenceTokenizer
from tests.kit.chat import CONVERSATIONS, chat_tokenizer
from tests.kit.preferences import PREFERENCES, of_trl

pytestmark = [pytest.mark.promise(125), pytest.mark.filterwarnings("ignore:.* rows (is|are) longer than")]
MESSAGES: list[dict[str, Any]] = [
    {
        "prompt": row["messages"][:-1],
        "chosen": row["messages"][-1:],
        "rejected": [{"role": "assistant", "content": "Go away."}],
    }
    for row in CONVERSATIONS[:2]
]
WITHOUT_PROMPT = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in MESSAGES]


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize(("rows", "length"), [
    (PREFERENCES, None),
    (MESSAGES, None),
    (WITHOUT_PROMPT, None),
    (MESSAGES, 45),
])  # fmt: skip
def test_batches_are_those_of_trl(rows: Any, length: int | None, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="an extra")
    tokenizer = chat_tokenizer()
    trainer = of_trl(tokenizer, rows, tmp_path, max_length=length)
    theirs = trainer.data_collator(list(trainer.train_dataset))
    made = PreferenceTokenizer(tokenizer, max_length=length).map(rows)
    batch = PadPreferences(tokenizer.pad_token_id)(made)
    for name, index in (("chosen", 0), ("rejected", 1)):
        half = {key: value.chunk(2)[index] for key, value in theirs.items()}
        assert torch.equal(batch["input_ids"][:, index], half["input_ids"]), name
        assert torch.equal(batch["attention_mask"][:, index], half["attention_mask"])
        assert torch.equal(batch["labels"][:, index] != -100, half["completion_mask"].bool())


def test_strings_share_their_beginning_and_rows_lack_no_column() -> None:
    tokenizer = chat_tokenizer()
    make = PreferenceTokenizer(tokenizer)
    split = make({"chosen": "It is good.", "rejected": "It is bad."})
    assert split == make({"prompt": "It is", "chosen": " good.", "rejected": " bad."})
    with pytest.raises(ParallelismValueError, match="no 'rejected', which preferences need; it has chosen"):
        make({"chosen": "a"})


def test_answers_that_repeat_the_prompt_or_are_the_same() -> None:
    tokenizer = chat_tokenizer()
    make = PreferenceTokenizer(tokenizer)
    repeated = MESSAGES[0] | WITHOUT_PROMPT[0]
    with pytest.raises(ParallelismValueError, match="chosen, rejected repeat the prompt. Remove the column"):
        make(repeated)
    with pytest.raises(ParallelismTypeError, match="chosen is a list.*remove the column prompt"):
        make(MESSAGES[0] | {"prompt": "Hi!"})
    written = {name: json.dumps(messages) for name, messages in MESSAGES[0].items()}
    assert make(written) == make(MESSAGES[0])
    with pytest.raises(ParallelismValueError, match="rejected is empty. Remove the row"):
        make({"chosen": "a", "rejected": None})
    same = {"prompt": "It is", "chosen": " good.", "rejected": " good."}
    with pytest.warns(UserWarning, match=r"1 of 2 rows is left out: .*, or both answers are the same"):
        assert len(make.map([same, same | {"rejected": " bad."}])) == 1
