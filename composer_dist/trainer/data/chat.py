"""Conversations, prompts with completions, and texts as tokens with labels.

The tokens and labels are those of TRL's SFTTrainer. Where a chat template does not mark the assistant's turns
with `{% generation %}`, they are found by rendering the conversation up to each of them.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from composer_dist.config.base import require
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer.data.packing import IGNORED
from composer_dist.trainer.data.rows import Row, RowTokenizer, Tokens

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class ChatTokenizer(RowTokenizer):
    """Makes `input_ids` and `labels` of a row; labels are -100 where nothing is to be learned.

    A row has `messages` (or `conversations` of `from` and `value`), or `prompt` and `completion`, both
    strings or both messages, or a text, or `input_ids`. `tools` (a list, or JSON) and `chat_template_kwargs`
    go to the chat template. Texts and completions that are strings end with the end-of-sequence token.

    Args:
        tokenizer: one of transformers'; for messages a fast one with a chat template.
        max_length: cut longer rows at their end.
        loss_on: "assistant": the assistant's turns; "all": every token. None: the assistant's turns of
            `messages`, the whole `completion` after a `prompt`, and all of a text.
        chat_template: in place of the tokenizer's.
        text: the column of texts.
    """

    tokenizer: Any
    _: KW_ONLY
    max_length: int | None = None
    loss_on: Literal["assistant", "all"] | None = None
    chat_template: str | None = None
    text: str = "text"

    def __post_init__(self) -> None:
        if self.loss_on is not None:
            require("loss_on", self.loss_on, ("assistant", "all"))

    def __call__(self, row: Row) -> dict[str, Tokens]:
        """The tokens and labels of a row.

        Raises:
            ParallelismValueError: the row has none of the known columns, or no turn of the assistant; the
                chat template is missing, or does not show where the assistant's turns are.
        """
        tokens, labels = self._read(row)
        return {"input_ids": tokens[: self.max_length], "labels": labels[: self.max_length]}

    def pairs(self, row: Row, *answers: str) -> list[tuple[Tokens, Tokens]]:
        """The tokens of a row's prompt, and those of each of these columns after it.

        An answer begins where the prompt's tokens with it differ from those of the prompt alone.
        """
        prompt = row["prompt"]
        if len({isinstance(one, str) for one in (prompt, *(row[name] for name in answers))}) > 1:
            raise ParallelismTypeError(f"prompt and {' and '.join(answers)} must be strings, or messages.")
        if isinstance(prompt, str):
            first = self._encode(prompt)
            whole = [self._encode(self._ended(prompt + row[name])) for name in answers]
        else:
            first = self._render(prompt, row, add_generation_prompt=True)["input_ids"]
            whole = [self._render([*prompt, *row[name]], row)["input_ids"] for name in answers]
        shared = min(_shared(first, one) for one in whole)
        if shared < len(first):
            warnings.warn(
                f"A tokenized prompt ends with {self.tokenizer.decode(first[shared:])!r}, which its "
                f"{answers[0]} changes; the loss begins before that. A chat template that renders the prompt "
                "alike with and without an answer, or prompts that end between words, avoid that.",
                stacklevel=2,
            )
        return [(one[:shared], one[shared:]) for one in whole]

    def _read(self, row: Row) -> tuple[Tokens, Tokens]:
        if row.get("input_ids") is not None:
            return row["input_ids"], row.get("labels", row["input_ids"])
        if row.get("prompt") is not None and row.get("completion") is not None:
            return self._of_pair(row)
        if (messages := _messages(row)) is not None:
            if self.loss_on == "all":
                tokens = self._render(messages, row)["input_ids"]
                return tokens, tokens
            return self._of_turns(messages, row)
        if isinstance(text := row.get(self.text), str):
            tokens = self._encode(self._ended(text))
            return tokens, tokens
        raise ParallelismValueError(
            f"A row needs messages, prompt and completion, {self.text}, or input_ids; it has "
            f"{', '.join(row)}."
        )

    def _of_pair(self, row: Row) -> tuple[Tokens, Tokens]:
        ((prompt, completion),) = self.pairs(row, "completion")
        tokens = prompt + completion
        if self.loss_on == "all":
            return tokens, tokens
        labels = [IGNORED] * len(prompt) + completion
        if self.loss_on == "assistant" and not isinstance(row["prompt"], str):
            _, turns = self._of_turns([*row["prompt"], *row["completion"]], row)
            labels = [min(label, turn) for label, turn in zip(labels, turns, strict=True)]
        return tokens, labels

    def _of_turns(self, messages: list[Any], row: Row) -> tuple[Tokens, Tokens]:
        """With labels on the assistant's turns alone."""
        if _MARKER.search(self._template(row)):
            made = self._render(messages, row, return_assistant_tokens_mask=True)
            tokens, learned = made["input_ids"], made["assistant_masks"]
        else:
            tokens, learned = self._by_prefixes(messages, row)
        if not any(learned):
            raise ParallelismValueError(
                "A conversation has no turn of the assistant, so there is nothing to learn from it: "
                f"its roles are {', '.join(str(one.get('role')) for one in messages)}. Remove it, or use "
                "loss_on='all'."
            )
        return tokens, [token if mark else IGNORED for token, mark in zip(tokens, learned, strict=True)]

    def _by_prefixes(self, messages: list[Any], row: Row) -> tuple[Tokens, list[bool]]:
        if not self.tokenizer.is_fast:
            raise ParallelismTypeError(
                f"{type(self.tokenizer).__name__} does not say which characters its tokens are made of, "
                "which finding the assistant's turns needs. Use a fast tokenizer, or loss_on='all'."
            )
        whole: str = self._render(messages, row, tokenize=False)
        turns = list(self._turns(messages, row, whole))
        made = self._render(messages, row, tokenizer_kwargs={"return_offsets_mapping": True})
        places = made["offset_mapping"]
        learned = [any(first < end and begin < last for begin, end in turns) for first, last in places]
        return made["input_ids"], learned

    def _turns(self, messages: list[Any], row: Row, whole: str) -> Iterator[tuple[int, int]]:
        """Where in the rendered conversation each of the assistant's turns begins and ends."""
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            try:
                before = self._render(messages[:number], row, tokenize=False)
                asked = self._render(messages[:number], row, tokenize=False, add_generation_prompt=True)
                after = self._render(messages[: number + 1], row, tokenize=False)
            except Exception as error:  # templates raise whatever they like
                raise _unclear(number, f"cannot render the conversation up to there ({error})") from error
            if not (after.startswith(before) and whole.startswith(after)):
                raise _unclear(number, "renders it in another way once the conversation continues")
            yield max(len(before), _shared(asked, after)), len(after)

    def _template(self, row: Row) -> str:
        try:
            template: str = self.tokenizer.get_chat_template(self.chat_template, tools=_tools(row))
        except ValueError as error:
            raise ParallelismValueError(
                "The tokenizer has no chat template, which messages need. Use the tokenizer of a chat model, "
                "or give chat_template."
            ) from error
        return template

    def _render(self, messages: Sequence[Any], row: Row, *, tokenize: bool = True, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            [_present(one) for one in messages],
            chat_template=self._template(row),
            tools=_tools(row),
            tokenize=tokenize,
            return_dict=tokenize,
            **(row.get("chat_template_kwargs") or {}),
            **options,
        )

    def _encode(self, text: str) -> Tokens:
        tokens: Tokens = self.tokenizer(text)["input_ids"]
        return tokens

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token
        return text if end is None or text.endswith(end) else text + end


def _messages(row: Row) -> list[Any] | None:
    if row.get("conversations") is not None:
        return [
            {"role": _ROLES.get(one["from"], one["from"]), "content": one["value"]} if "from" in one else one
            for one in row["conversations"]
        ]
    return row.get("messages")


def _tools(row: Row) -> Any:
    tools = row.get("tools")
    return (json.loads(tools) if isinstance(tools, str) else _present(tools)) or None


def _present(value: Any) -> Any:
    """Without the empty fields that Arrow adds where other rows have some."""
    if isinstance(value, Mapping):
        return {key: _present(one) for key, one in value.items() if one is not None or key == "content"}
    return [_present(one) for one in value] if isinstance(value, list) else value


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements two sequences have in common from their start."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _unclear(number: int, why: str) -> ParallelismValueError:
    return ParallelismValueError(
        f"Which tokens of message {number} the assistant wrote is not clear: the chat template does not mark "
        f"them with {{% generation %}}, and {why}. Give a chat_template with these marks, rows of prompt and "
        "completion, or loss_on='all'."
    )
