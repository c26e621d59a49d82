"""Pretrained models of a run: every rank reads its part of each weight, or rank 0 all of them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.config.parallelism import resolve_config
from composer_dist.distributed import parallelize_composer_model
from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.models import Built, build_model
from composer_dist.recipe.schema import Run
from composer_dist.recipe.tokenizer import byte_tokenizer
from tests.kit.compare import fails_alike, full_each, same
from tests.kit.huggingface import llama
from tests.kit.world import on_ranks

pytestmark = [
    pytest.mark.promise(142),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying"),
]
INDEX = "model.safetensors.index.json"
LORA = {"method": "lora", "r": 2, "target_modules": "all-linear"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model in several files, with settings of its own for generation."""
    model = llama(vocab_size=261)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "model" / "both")
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "model" / "both")
    return tmp_path / "model"


def built(
    pretrained: Path | str, kind: str = "causal_lm", config: Any = "fsdp", classes: int = 3, **model: Any
) -> Built:
    """The model of a run on these files."""
    data: Mapping[str, Any] = {"kind": "text", "source": "english"}
    if kind == "sequence_classification":
        data = {"kind": "labeled_text", "classes": dict.fromkeys("xyz"[:classes], "english")}
    described = {"kind": kind, "pretrained": str(pretrained), "tokenizer": "bytes"} | model
    run = Run.model_validate({"out": "runs/none", "model": described, "data": data, "trainer": {}})
    return build_model(run, byte_tokenizer(), Path(), None if config is None else resolve_config(config))


def prepared(made: Built) -> tuple[dict[str, torch.Tensor], int]:
    """The whole tensors of the prepared model, and the bytes that this rank has read."""
    assert made.parallelism is not None
    done = parallelize_composer_model(made.model, None, made.parallelism, weights=made.weights)
    return full_each(made.model.state_dict()), done.bytes_read


@on_ranks(2)
def test_every_rank_reads_its_part_of_each_weight(files: Path) -> None:
    made = built(files)
    assert made.weights == files / INDEX
    assert {parameter.device.type for parameter in made.model.parameters()} == {"meta"}
    model: Any = made.model
    assert (model.model.generation_config.max_new_tokens, model.model.name_or_path) == (7, str(files))
    found, read = prepared(made)
    expected = AutoModelForCausalLM.from_pretrained(files).state_dict()
    same(found, {f"model.{name}": value for name, value in expected.items()})
    whole = sum(value.nbytes for value in expected.values())
    assert read < 0.6 * whole


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A T5 in float16, of which transformers reads some layers in float32."""
    sizes = {"vocab_size": 261, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).half().save_pretrained(tmp_path)
    return tmp_path


@on_ranks(2)
def test_the_dtypes_are_those_that_transformers_reads(half: Path) -> None:
    found, _ = prepared(built(half, "seq2seq_lm"))
    expected = AutoModelForSeq2SeqLM.from_pretrained(half).state_dict()
    assert {value.dtype for value in expected.values()} == {torch.float16, torch.float32}
    same(found, {f"model.{name}": value for name, value in expected.items()})


@on_ranks(2)
def test_a_head_that_the_files_lack_is_initialized(files: Path) -> None:
    made = built(files, "sequence_classification")
    with pytest.warns(UserWarning, match=r"lacks these, .*: model.score.weight|, which .* has: lm_head"):
        found, _ = prepared(made)
    head = found.pop("model.score.weight")
    assert head.shape == (3, 32)
    assert 0.005 < head.std() < 0.1
    expected = AutoModelForCausalLM.from_pretrained(files).model.state_dict()
    same(found, {f"model.model.{name}": value for name, value in expected.items()})


@on_ranks(2)
def test_a_lora_is_added_to_weights_that_are_read_in_parts(files: Path) -> None:
    made = built(files, adapter=LORA)
    assert made.weights == files / INDEX
    prepared(made)
    found = full_each(dict(made.model.named_parameters()))
    expected = AutoModelForCausalLM.from_pretrained(files).state_dict()
    base = {
        name.removeprefix("model.base_model.model.").replace(".base_layer.", "."): value
        for name, value in found.items()
        if ".lora_" not in name
    }
    same(base, expected)
    firsts = [value for name, value in found.items() if ".lora_A." in name]
    assert len(firsts) == 14
    assert all(value.std() > 0.01 for value in firsts)
    assert not any(value.any() for name, value in found.items() if ".lora_B." in name)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"adapter": LORA | {"use_dora": True}},
        {"adapter": LORA | {"init_lora_weights": "pissa"}},
        {"adapter": LORA | {"trainable_token_indices": [1]}},
        {"config": ParallelismConfig(fsdp2=FSDP2Config(), sync="rank0")},
        {"config": None},
    ],
    ids=str,
)
def test_rank_0_has_the_values_of_what_starts_from_them(files: Path, options: Any) -> None:
    made = built(files, **options)
    assert made.weights is None
    assert made.model.model.generation_config.max_new_tokens == 7
    frozen: Any = made.model.get_parameter(
        next(name for name, _ in made.model.named_parameters() if name.endswith("norm.weight"))
    )
    assert frozen.is_meta == (torch.distributed.get_rank() == 1)


@on_ranks(2)
def test_an_adapter_beside_a_new_head_starts_on_rank_0(files: Path) -> None:
    """It trains a copy of the head, which the files lack."""
    made = built(files, "sequence_classification", adapter=LORA)
    assert made.weights is None
    prepared(made)
    found = full_each(dict(made.model.named_parameters()))
    heads = [value for name, value in found.items() if ".score." in name]
    assert len(heads) == 2
    assert torch.equal(*heads)
    assert heads[0].std() > 0.005


@on_ranks(2)
def test_an_adapter_in_the_models_directory_is_refused(files: Path) -> None:
    with fails_alike(ParallelismValueError, "both has an adapter of peft next to the model"):
        built(files / "both")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A model whose files have its tied tensor once, and in `twice` under both names."""
    model = llama(vocab_size=261, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "twice")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "twice" / "model.safetensors", {"format": "pt"})
    return tmp_path


@on_ranks(2)
def test_what_the_files_have_under_both_names_is_one_tensor(tied: Path) -> None:
    made = built(tied / "twice")
    assert made.weights == tied / "twice" / "model.safetensors"
    model: Any = made.model.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found, _ = prepared(made)
    expected = AutoModelForCausalLM.from_pretrained(tied).state_dict()
    same(found, {f"model.{name}": value for name, value in expected.items()})


@on_ranks(2)
def test_a_copy_of_a_tied_head_starts_on_rank_0(tied: Path) -> None:
    made = built(tied, adapter=LORA | {"modules_to_save": ["lm_head"]})
    assert made.weights is None
    prepared(made)
    found = full_each(dict(made.model.named_parameters()))
    [copied] = [value for name, value in found.items() if "modules_to_save" in name]
    [embedded] = [value for name, value in found.items() if name.endswith("embed_tokens.weight")]
    assert torch.equal(copied, embedded)


@pytest.mark.parametrize("config", ["fsdp", None])
def test_sizes_that_do_not_fit_are_named(files: Path, config: Any) -> None:
    LlamaForSequenceClassification.from_pretrained(files, num_labels=3).save_pretrained(files / "classifier")
    said = r"score.weight is \(3, 32\) in the files and \(2, 32\) in the model.*comes from model.num_labels"
    with pytest.raises(ParallelismValueError, match=said):
        built(files / "classifier", "sequence_classification", config, classes=2)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A model as transformers wrote it once."""
    model = llama(vocab_size=261)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


@on_ranks(2)
def test_pickled_weights_are_for_rank_0(pickled: Path) -> None:
    made = built(pickled)
    assert made.weights is None
    assert made.model.model.lm_head.weight.is_meta == (torch.distributed.get_rank() == 1)
    found, _ = prepared(made)
    expected = torch.load(pickled / "pytorch_model.bin")
    same(found, {f"model.{name}": value for name, value in expected.items()})


def test_a_model_in_the_hubs_cache_is_read_in_parts(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--someone--model"
    snapshot = cached / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    for blob in files.rename(cached / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert built("someone/model").weights == snapshot / INDEX


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    llama(vocab_size=261).save_pretrained(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParallelismValueError, match="its files have none of the weights of a LlamaForCausal"):
        built(tmp_path)
