"""A small tokenizer with merges and a chat template, and conversations; nothing is downloaded."""

import json
from typing import Any

MARKED = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template in ChatML, with the assistant's turns marked up to their last token."""
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _turns(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": _turns("What is the capital of France?", "Paris, of course. é€")},
    {"messages": [{"role": "system", "content": "Be brief."}, *_turns("Hi!", "Hello.", "Bye", "Bye then.")]},
    {
        "messages": [
            {"role": "user", "content": "2 and 3?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
            },
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ],
        "tools": json.dumps([TOOL]),
    },
]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"prompt": "One and one is", "completion": " two, and that is that."},
]


def chat_tokenizer(template: str | None = MARKED) -> Any:
    """A byte-pair tokenizer with 60 merges, trained on the conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([json.dumps(CONVERSATIONS + PAIRS)] * 2, trainer)
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made
