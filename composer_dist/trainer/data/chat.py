"""Conversations, prompts with completions, and texts as tokens with labels.

The tokens and labels are those of TRL's SFTTrainer. Where a chat template does not mark the assistant's turns
with `{% generation %}`, they are found by rendering the conversation up to each of them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, Literal

from composer_dist.config.base import require
from composer_dist.errors import ParallelismTypeError, ParallelismValueError, in_words
from composer_dist.trainer.data.messages import conversation, read_json, text_or_messages, without_empty
from composer_dist.trainer.data.packing import IGNORED
from composer_dist.trainer.data.rows import Row, RowTokenizer, Tokens, check_max_length
from composer_dist.users_code import warn
from composer_dist.wording import listed, near_miss

_CHATS = ("conversations", "messages")
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTokenizer(RowTokenizer):
    """Makes `input_ids` and `labels` of a row; labels are -100 where nothing is to be learned.

    A row has `messages` (or `conversations` of `from` and `value`), or `prompt` and `completion`, both
    strings or both messages, or a text, or `input_ids`. `tools` and `chat_template_kwargs`
    go to the chat template. Tables without lists, such as CSV files, hold messages and tools as JSON. Texts
    and completions that are strings end with the end-of-sequence token.

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
        check_max_length(self.max_length)
        if self.loss_on is not None:
            require("loss_on", self.loss_on, ("assistant", "all"))

    def tokenized(self, row: Row) -> tuple[dict[str, Any], bool]:
        """The tokens and labels of a row, and whether it is longer than `max_length`.

        Raises:
            ParallelismValueError: the row has none of the known columns, or no turn of the assistant; a
                message has no role or no content; the chat template is missing, cannot render the row, or
                does not show where the assistant's turns are.
            ParallelismTypeError: a column holds values of another type.
        """
        tokens, labels = self._read(row)
        if len(tokens) != len(labels):
            raise ParallelismValueError(
                f"input_ids has {len(tokens)} tokens, but labels has {len(labels)}; each token needs one."
            )
        limit = self.max_length
        return {"input_ids": tokens[:limit], "labels": labels[:limit]}, len(tokens[:limit]) < len(tokens)

    @staticmethod
    def teaches(made: Row) -> bool:
        """Whether a label is left after the first one, which follows no token."""
        return any(label != IGNORED for label in made["labels"][1:])

    def pairs(self, row: Row, *answers: str) -> list[tuple[Tokens, Tokens]]:
        """The tokens of a row's prompt, and those of each of these columns after it.

        An answer begins where the prompt's tokens with it differ from those of the prompt alone.
        """
        names = ("prompt", *answers)
        row = {**row, **{name: text_or_messages(row[name]) for name in names}}
        if all(isinstance(row[name], str) for name in names):
            first = self._encode(row["prompt"])
            whole = [self._encode(self._ended(row["prompt"] + row[name])) for name in answers]
        elif any(isinstance(row[name], str) for name in names):
            kinds = ", ".join(f"{name} is a {type(row[name]).__name__}" for name in names)
            raise ParallelismTypeError(
                f"{listed(names)} must all be strings, or all lists of messages: {kinds}. If the messages "
                "already begin with the prompt, remove the column prompt."
            )
        else:
            prompt, *ends = (conversation(row[name], name) for name in names)
            if all(end[: len(prompt)] == prompt for end in ends):
                raise ParallelismValueError(
                    f"{listed(answers)} repeat the prompt. Remove the column prompt, or the prompt's "
                    "messages from the answers."
                )
            first = self._render(prompt, row, add_generation_prompt=True)["input_ids"]
            whole = [self._render([*prompt, *end], row)["input_ids"] for end in ends]
        shared = min(common_start(first, one) for one in whole)
        if shared < len(first):
            warn(
                f"The prompt's tokens end with {self.tokenizer.decode(first[shared:])!r}, but not when "
                f"{listed(answers)} follows, so the loss includes this end of the prompt. Use prompts that "
                "end between words, or a chat template that renders a prompt in the same way with and "
                "without an answer."
            )
        return [(one[:shared], one[shared:]) for one in whole]

    def _read(self, row: Row) -> tuple[Tokens, Tokens]:
        if (tokens := row.get("input_ids")) is not None:
            labels = row.get("labels")
            return _tokens(tokens, "input_ids"), _tokens(tokens if labels is None else labels, "labels")
        if row.get("prompt") is not None and row.get("completion") is not None:
            return self._of_pair(row)
        if (name := next((name for name in _CHATS if row.get(name) is not None), None)) is not None:
            messages = conversation(row[name], name)
            if self.loss_on == "all":
                tokens = self._render(messages, row)["input_ids"]
                return tokens, tokens
            return self._of_turns(messages, row)
        if isinstance(text := row.get(self.text), str):
            tokens = self._encode(self._ended(text))
            return tokens, tokens
        known = ("messages", "conversations", "prompt", "completion", self.text, "input_ids")
        if empty := [name for name in known if name in row and row[name] is None]:
            raise ParallelismValueError(
                f"{listed(empty)} {'is' if len(empty) == 1 else 'are'} empty. Remove the row."
            )
        if text is not None:
            raise ParallelismValueError(f"{self.text} must be a string, not {text!r}. Put it in quotes.")
        near = next(filter(None, (near_miss(name, known) for name in row if name not in known)), "")
        raise ParallelismValueError(
            f"A row needs messages, prompt and completion, {self.text}, or input_ids; it has "
            f"{', '.join(row)}.{near}"
        )

    def _of_pair(self, row: Row) -> tuple[Tokens, Tokens]:
        ((prompt, completion),) = self.pairs(row, "completion")
        tokens = prompt + completion
        if self.loss_on == "all":
            return tokens, tokens
        labels = [IGNORED] * len(prompt) + completion
        if self.loss_on == "assistant" and not isinstance(text_or_messages(row["prompt"]), str):
            both = [one for name in ("prompt", "completion") for one in conversation(row[name], name)]
            _, turns = self._of_turns(both, row)
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
                "The conversation has no message of the assistant, so there is nothing to learn from it: "
                f"its roles are {', '.join(one['role'] for one in messages)}. Remove it, or use "
                "loss_on='all' (in YAML data.loss_on)."
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
            if message["role"] != "assistant":
                continue
            try:
                before = self._render(messages[:number], row, tokenize=False)
                asked = self._render(messages[:number], row, tokenize=False, add_generation_prompt=True)
                after = self._render(messages[: number + 1], row, tokenize=False)
            except ParallelismValueError as error:
                why = f"cannot render the conversation up to there ({in_words(error.__cause__ or error)})"
                raise _unclear(number, why) from error
            if not (after.startswith(before) and whole.startswith(after)):
                raise _unclear(number, "renders it in another way once the conversation continues")
            yield max(len(before), common_start(asked, after)), len(after)

    def _template(self, row: Row) -> str:
        tools = _tools(row)
        try:
            template: str = self.tokenizer.get_chat_template(self.chat_template, tools=tools)
        except ValueError as error:
            raise ParallelismValueError(
                "The tokenizer has no chat template, which messages need. Use the tokenizer of a chat model, "
                "or give chat_template (in YAML data.chat_template)."
            ) from error
        return template

    def _render(self, messages: Sequence[Any], row: Row, *, tokenize: bool = True, **options: Any) -> Any:
        template = self._template(row)
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tools=_tools(row),
                tokenize=tokenize,
                return_dict=tokenize,
                **(read_json(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}),
                **options,
            )
        except Exception as error:  # templates raise whatever they like
            raise ParallelismValueError(
                f"The chat template cannot render the messages ({type(error).__name__}: {error})."
            ) from error

    def _encode(self, text: str) -> Tokens:
        tokens: Tokens = self.tokenizer(text)["input_ids"]
        return tokens

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token
        return text if end is None or text.endswith(end) else text + end


def _tools(row: Row) -> Any:
    return without_empty(read_json(row.get("tools"), "tools")) or None


def _tokens(value: Any, column: str) -> Tokens:
    tokens = [] if isinstance(value, str) else list(value)
    if isinstance(value, str) or not all(isinstance(one, Integral) for one in tokens):
        raise ParallelismTypeError(f"{column} must be a list of integers.")
    return tokens


def common_start(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements two sequences have in common from their start."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _unclear(number: int, why: str) -> ParallelismValueError:
    return ParallelismValueError(
        f"Which tokens of message {number} the assistant wrote is not clear: the chat template does not mark "
        f"them with {{% generation %}}, and {why}. Give a chat_template with these marks, rows of prompt and "
        "completion, or loss_on='all'."
    )
