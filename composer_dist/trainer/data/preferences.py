"""Pairs of a preferred and a rejected answer as tokens with labels."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.data.chat import ChatTokenizer, common_start
from composer_dist.trainer.data.messages import text_or_messages
from composer_dist.trainer.data.packing import IGNORED
from composer_dist.trainer.data.padding import PadRows
from composer_dist.trainer.data.rows import Row, RowTokenizer, check_max_length
from composer_dist.wording import near_miss

_ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceTokenizer(RowTokenizer):
    """Makes `chosen_ids`, `chosen_labels`, `rejected_ids` and `rejected_labels`, as TRL's DPOTrainer does.

    A row has `chosen` and `rejected`, strings or messages, and `prompt`; without it, what both begin with is
    the prompt. `tools` and `chat_template_kwargs` are those of a `ChatTokenizer`.

    Args:
        tokenizer: one of transformers'; for messages with a chat template.
        max_length: cut longer prompts with their answers at the end.
        chat_template: in place of the tokenizer's.
    """

    tokenizer: Any
    _: KW_ONLY
    max_length: int | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        check_max_length(self.max_length)

    def tokenized(self, row: Row) -> tuple[dict[str, Any], bool]:
        """The tokens of the prompt with each answer and labels on the answers; whether they are cut.

        Raises:
            ParallelismValueError: a column is missing, or the answers repeat the prompt.
            ParallelismTypeError: a column holds values of another type.
        """
        if missing := [name for name in _ANSWERS if row.get(name) is None]:
            if missing[0] in row:
                raise ParallelismValueError(f"{missing[0]} is empty. Remove the row.")
            near = near_miss(missing[0], list(row))
            raise ParallelismValueError(
                f"The row has no {missing[0]!r}, which preferences need; it has {', '.join(row)}.{near}"
            )
        row = {**row, **{name: text_or_messages(row[name]) for name in _ANSWERS}}
        row = row if row.get("prompt") is not None else _with_prompt(row)
        made: dict[str, Any] = {}
        cut = False
        chat = ChatTokenizer(self.tokenizer, chat_template=self.chat_template)
        for name, (prompt, answer) in zip(_ANSWERS, chat.pairs(row, *_ANSWERS), strict=True):
            made[f"{name}_ids"] = tokens = (prompt + answer)[: self.max_length]
            made[f"{name}_labels"] = ([IGNORED] * len(prompt) + answer)[: self.max_length]
            cut = cut or len(tokens) < len(prompt + answer)
        return made, cut

    @staticmethod
    def teaches(made: Row) -> bool:
        """Whether both answers have a label, and differ."""
        chosen, rejected = (made[f"{name}_labels"] for name in _ANSWERS)
        return chosen != rejected and all(
            any(one != IGNORED for one in labels) for labels in (chosen, rejected)
        )

    @property
    def _useless(self) -> str:
        return f"{super()._useless}, or both answers are the same"


@dataclass(frozen=True)
class PadPreferences:
    """A `collate_fn` for what a `PreferenceTokenizer` makes: `input_ids`, `labels`, `attention_mask`.

    Each is `(pairs, 2, tokens)`, the chosen answer first.

    Args:
        pad_token_id: for `input_ids`.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch."""
        answers = [
            {"input_ids": row[f"{name}_ids"], "labels": row[f"{name}_labels"]}
            for row in rows
            for name in _ANSWERS
        ]
        return {name: one.unflatten(0, (-1, 2)) for name, one in PadRows(self.pad_token_id)(answers).items()}


def _with_prompt(row: Row) -> dict[str, Any]:
    """The row with what both answers begin with as its prompt."""
    chosen, rejected = row["chosen"], row["rejected"]
    same = common_start(chosen, rejected)
    if same and chosen[same - 1] == " ":  # the answers begin with their space
        same -= 1
    return {**row, "prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}
