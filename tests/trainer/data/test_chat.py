"""Conversations as tokens and labels: those of TRL's SFTTrainer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.trainer import ChatTokenizer, PackedDataset, PadRows
from tests.kit.chat import CONVERSATIONS, MARKED, PAIRS, UNMARKED, chat_tokenizer

pytestmark = [pytest.mark.promise(124), pytest.mark.filterwarnings("ignore:.* rows (is|are) longer than")]
IGNORED = -100
CHATS = [CONVERSATIONS[:2], CONVERSATIONS[2:]]
TEXTS = [{"text": "Once upon a time."}, {"text": "The end.<eos>"}]
ASKED = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in CHATS[0][:1]]


def of_trl(
    rows: Any, tokenizer: Any, *, assistant: bool, packed: int | None = None, length: Any = None
) -> Any:
    """What TRL makes of rows."""
    pytest.importorskip("trl", reason="an extra")
    from datasets import Dataset
    from trl.trainer.sft_trainer import SFTTrainer

    arguments = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=assistant,
        max_length=packed or length,
        truncation_mode="keep_start",
        shuffle_dataset=False,
        packing_strategy="bfd",
    )
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    made = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list(rows), tokenizer, arguments, packed is not None, None, "train"
    )
    return list(made)


def learned(tokenizer: Any, row: Any) -> list[str]:
    """The runs of tokens that have labels, as text."""
    runs: list[list[int]] = [[]]
    for label in row["labels"]:
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("length", [None, 40])
@pytest.mark.parametrize(("rows", "loss_on"), [
    *((rows, None) for rows in (*CHATS, PAIRS, TEXTS, ASKED)),
    (CHATS[0], "all"),
    (ASKED, "assistant"),
])  # fmt: skip
def test_tokens_and_labels_are_those_of_trl(rows: Any, loss_on: Any, length: int | None) -> None:
    tokenizer = chat_tokenizer()
    assistant = loss_on == "assistant" or ("messages" in rows[0] and loss_on is None)
    theirs = of_trl(rows, tokenizer, assistant=assistant, length=length)
    make = ChatTokenizer(tokenizer, loss_on=loss_on, max_length=length)
    if not theirs:
        with pytest.raises(
            ParallelismValueError, match=r"None of 1 rows is left: the first 40 tokens .*Raise"
        ):
            make.map(rows)
        return
    ours = make.map(rows)
    assert [[row["input_ids"], row["labels"]] for row in ours] == [
        [row["input_ids"], row["labels"]] for row in theirs
    ]


def test_padded_and_packed_batches_are_those_of_trl() -> None:
    tokenizer = chat_tokenizer()
    theirs = of_trl(CHATS[0], tokenizer, assistant=True)
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    ours = ChatTokenizer(tokenizer).map(CHATS[0])
    pad = tokenizer.pad_token_id
    expected = DataCollatorForLanguageModeling(pad_token_id=pad, pad_to_multiple_of=8)(theirs)
    batch = PadRows(pad, multiple_of=8)(ours)
    assert {key: value.tolist() for key, value in batch.items()} == {
        key: value.tolist() for key, value in expected.items()
    }
    rows = [*CHATS[0], *CHATS[0][:1]]
    packed = of_trl(rows, tokenizer, assistant=True, packed=110)
    collate = DataCollatorForLanguageModeling(pad_token_id=pad, padding_free=True)
    blocks = PackedDataset(
        ChatTokenizer(tokenizer, max_length=110).map(rows), 110, how="whole", pad_token_id=pad
    )
    assert len(blocks) == len(packed) == 2
    for one, other in zip(blocks, packed, strict=True):  # type: ignore[call-overload]
        expected = collate([{**other, "seq_lengths": other["seq_lengths"]}])
        size = expected["input_ids"].shape[1]
        for name in ("input_ids", "labels"):
            assert one[name][:size].tolist() == expected[name][0].tolist()
        starts = [place for length in other["seq_lengths"] for place in range(length)]
        assert one["position_ids"][:size].tolist() == starts
        assert (one["labels"][size:] == IGNORED).all()


def test_turns_are_found_without_marks() -> None:
    marked, bare = chat_tokenizer(MARKED), chat_tokenizer(UNMARKED)
    for row in CONVERSATIONS:
        one, other = ChatTokenizer(marked)(row), ChatTokenizer(bare)(row)
        assert one["input_ids"] == other["input_ids"]
        # A turn ends where the next one begins; the marks leave out the line's end.
        assert [turn.rstrip("\n") for turn in learned(bare, other)] == learned(marked, one)
    assert learned(bare, ChatTokenizer(bare)(CONVERSATIONS[2]))[0].startswith('<call>{"name": "add"')


@pytest.mark.parametrize(
    "name", ["cohere", "gemma3", "idefics3", "lfm2", "llama3", "qwen2_5_vl", "qwen3_instruct_2507"]
)
def test_turns_are_those_of_trls_marked_templates(name: str) -> None:
    trl = pytest.importorskip("trl", reason="an extra")
    folder = Path(trl.__file__).parent / "chat_templates"
    bare, marked = (chat_tokenizer((folder / f"{name}{end}.jinja").read_text()) for end in ("", "_training"))
    row = {"messages": CONVERSATIONS[1]["messages"][1:]}
    for tokenizer in (bare, marked):
        tokenizer.bos_token = "<eos>"
    assert ChatTokenizer(bare)(row) == ChatTokenizer(marked)(row)


def test_tools_of_a_table_are_those_that_were_given() -> None:
    from datasets import Dataset

    tokenizer = chat_tokenizer()
    rows = [dict(CONVERSATIONS[0], tools=None), CONVERSATIONS[2]]
    table = Dataset.from_list(rows)  # Arrow adds an empty field for each that another row has
    assert list(ChatTokenizer(tokenizer).map(table)) == [ChatTokenizer(tokenizer)(row) for row in rows]
    streamed = ChatTokenizer(tokenizer).map(table.to_iterable_dataset())
    assert list(streamed) == [ChatTokenizer(tokenizer)(row) for row in rows]


def test_conversations_of_from_and_value() -> None:
    tokenizer = chat_tokenizer()
    row = {"conversations": [{"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}]}
    assert learned(tokenizer, ChatTokenizer(tokenizer)(row)) == ["Hello.<|im_end|>"]


def test_messages_as_json_and_with_other_names_of_roles() -> None:
    tokenizer = chat_tokenizer()
    make = ChatTokenizer(tokenizer)
    for row in CONVERSATIONS:
        assert make(row | {"messages": json.dumps(row["messages"])}) == make(row)
    asked = ASKED[0]
    written = {name: json.dumps(messages) for name, messages in asked.items()}
    assert make(written) == make(asked)
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert make(CONVERSATIONS[0] | {"chat_template_kwargs": json.dumps(kwargs)}) == make(CONVERSATIONS[0])
    renamed = [{"human": "user", "gpt": "assistant"}.get(role, role) for role in ("system", "human", "gpt")]
    messages = [{"role": role, "content": role} for role in ("system", "human", "gpt")]
    expected = [one | {"role": role} for one, role in zip(messages, renamed, strict=True)]
    assert make({"messages": messages}) == make({"messages": expected})
    with pytest.warns(UserWarning, match="The role 'bot' is not one of system, developer, user, assistant"):
        make({"messages": [*expected, {"role": "bot", "content": "!"}]})


def test_errors_name_the_row_and_warnings_count_rows() -> None:
    from datasets import Dataset, IterableDataset

    tokenizer = chat_tokenizer()
    rows = [*CONVERSATIONS[:2], {"messages": CONVERSATIONS[0]["messages"][:1]}]
    named = r"Row 2 \(\{'messages': .*capital of France.* has no message of the assistant"
    for data in (rows, Dataset.from_list(rows)):
        with pytest.raises(ParallelismValueError, match=named):
            ChatTokenizer(tokenizer).map(data)
    stream = ChatTokenizer(tokenizer).map(Dataset.from_list(rows).to_iterable_dataset())
    with pytest.raises(
        ParallelismValueError, match=r"A row \(\{'messages'.* has no message of the assistant"
    ):
        list(stream)
    long = [CONVERSATIONS[1], {"prompt": "a" * 50, "completion": "b"}]
    with pytest.warns(UserWarning, match=r"1 of 2 rows is left out: the first 50 tokens of"):
        assert len(ChatTokenizer(tokenizer, max_length=50).map(long)) == 1
    with (
        pytest.warns(
            UserWarning, match=r"Rows longer than 50 tokens \(max_length, in YAML data.context\) are cut"
        ),
        pytest.warns(UserWarning, match=r"Rows are left out: the first 50 tokens of"),
    ):
        assert (
            len(
                list(
                    ChatTokenizer(tokenizer, max_length=50).map(
                        Dataset.from_list(long[1:]).to_iterable_dataset()
                    )
                )
            )
            == 0
        )
    rows = [{"text": ""}, {"input_ids": [5, 6], "labels": [5, -100]}, {"input_ids": [5, 6], "labels": None}]
    with pytest.warns(UserWarning, match="2 of 3 rows are left out"):
        assert ChatTokenizer(tokenizer).map(rows) == [{"input_ids": [5, 6], "labels": [5, 6]}]
    for empty in ([], Dataset.from_list([]), IterableDataset.from_generator(lambda: iter(()))):
        with pytest.raises(ParallelismValueError, match="The data has no rows"):
            ChatTokenizer(tokenizer).map(empty)
    with pytest.raises(
        ParallelismValueError,
        match=r"max_length \(in YAML data.context\) must be a number of tokens, at least 2",
    ):
        ChatTokenizer(tokenizer, max_length=0)


FORGETFUL = UNMARKED.replace("message.content or ''", "message.content if loop.last else '...'")


@pytest.mark.parametrize(("template", "row", "message"), [
    (MARKED, {"question": "?"}, "needs messages, prompt and completion, text, or input_ids; it has question"),
    (MARKED, {"messages": CONVERSATIONS[0]["messages"][:1]}, "no message of the assistant.*its roles are us"),
    (MARKED, {"messages": []}, "messages is empty"),
    (MARKED, {"messages": "[{"}, "messages is a string that is not valid JSON: Expecting property name"),
    (MARKED, {"messages": ["Hi"]}, "messages must be a list of messages, each with a role and a content"),
    (MARKED, {"messages": [{"content": "Hi"}]}, "Message 0 of messages has no role; it has content"),
    (MARKED, {"conversations": [{"from": "gpt"}]}, "Message 0 of conversations, of role 'assistant', has no"),
    (MARKED, CONVERSATIONS[0] | {"tools": "[{"}, "tools is a string that is not valid JSON"),
    (MARKED, {"input_ids": [1, 2], "labels": [1]}, "input_ids has 2 tokens, but labels has 1"),
    (MARKED, {"input_ids": ["1", "2"]}, "input_ids must be a list of integers"),
    (MARKED, {"messages": None, "tools": None}, "messages is empty. Remove the row"),
    (MARKED, {"text": 5}, "text must be a string, not 5. Put it in quotes"),
    (MARKED, {"mesages": []}, "it has mesages. Did you mean 'messages'"),
    ("{{ missing.content }}", CONVERSATIONS[0] | {"loss": 0}, "cannot render the messages .Undef"),
    (None, CONVERSATIONS[0], "no chat template, which messages need"),
    (FORGETFUL, CONVERSATIONS[1], r"message 2 the assistant wrote is not clear.*once the conversation cont"),
    ("{{ messages[1].content }}", CONVERSATIONS[0], "message 1 .* cannot render the conversation up to ther"),
])  # fmt: skip
def test_rows_that_teach_nothing_are_named(template: Any, row: Any, message: str) -> None:
    with pytest.raises((ParallelismValueError, ParallelismTypeError), match=message):
        ChatTokenizer(chat_tokenizer(template))(row)


def test_options_and_rows_that_cannot_be_used() -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(ParallelismValueError, match="loss_on must be one of 'assistant', 'all', not 'user'"):
        ChatTokenizer(tokenizer, loss_on="user")  # type: ignore[arg-type]
    with pytest.raises(
        ParallelismTypeError,
        match="prompt, completion must all be strings, or all lists.*remove the column prompt",
    ):
        ChatTokenizer(tokenizer)({"prompt": "Hi", "completion": CONVERSATIONS[0]["messages"]})
    from datasets import Dataset

    rows = Dataset.from_list(CONVERSATIONS[:2])
    starts = [
        row["labels"].index(max(row["labels"], key=lambda x: x != IGNORED))
        for row in ChatTokenizer(tokenizer).map(rows)
    ]
    with pytest.warns(UserWarning, match="1 of 2 rows is left out: the first .* tokens"):
        kept = ChatTokenizer(tokenizer, max_length=max(starts)).map(rows)
    assert len(kept) == 1
