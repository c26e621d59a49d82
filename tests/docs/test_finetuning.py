"""Every block of code in docs/finetuning.md runs, or is a valid configuration."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_dist.recipe.read import read_configuration
from composer_dist.trainer import ChatTokenizer, PadRows
from tests.kit.chat import CONVERSATIONS, chat_tokenizer
from tests.kit.huggingface import llama
from tests.kit.preferences import PREFERENCES, lora

datasets = pytest.importorskip("datasets", reason="an extra")
PAGE = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_every_block_of_python_runs() -> None:
    tokenizer = chat_tokenizer()
    model = llama(vocab_size=len(tokenizer), max_position_embeddings=128)
    rows = datasets.Dataset.from_list(CONVERSATIONS * 4)
    names: dict[str, Any] = {
        "tokenizer": tokenizer,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "conversations": rows,
        "reviews": [{"text": "It is good.", "label": "good"}, {"text": "No.", "label": "bad"}],
        "torch": torch,
        "preferences": PREFERENCES,
        "base_model": llama(vocab_size=len(tokenizer), max_position_embeddings=128),
        "lora_config": lora(),
        "batches": [PadRows(tokenizer.pad_token_id)(ChatTokenizer(tokenizer).map(CONVERSATIONS))],
        "stream": rows.to_iterable_dataset(num_shards=2),
    }
    found = blocks("python")
    assert len(found) >= 3
    for code in found:
        exec(code, names)
        if "train" in names:
            batch = next(iter(names.pop("train")))
            assert batch["labels"].shape == batch["input_ids"].shape


def test_every_configuration_is_valid(tmp_path: Path) -> None:
    found = blocks("yaml")
    assert found
    for number, text in enumerate(found):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        read_configuration(file)
