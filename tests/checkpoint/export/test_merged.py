"""Adapters merged on the way into a model directory: what peft's `merge_and_unload` gives, from shards."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
)

from composer_dist.checkpoint import export_pretrained, full_model_state, load_pretrained
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import parallelize_model
from composer_dist.errors import CheckpointValueError
from tests.kit.compare import equal, same
from tests.kit.files import files, tensors
from tests.kit.grids import slow
from tests.kit.huggingface import LORA, adapted, logits, lora, pretrained_llama, random, tied_llama
from tests.kit.meshes import BY_WORLD
from tests.kit.world import on_ranks, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
MERGED = ["dora", "modules_to_save", "tokens"]
SHARDED = {"adalora": ParallelismConfig(fsdp2=FSDP2Config(), rules=[Rule("re:.*[.]lora_[ABE]", shard=False)])}
"""Where not "fsdp": AdaLoRA's matrices have to stay whole."""
OTHERS = ["lora", "embedding", "bias_all", "ia3", "adalora", "vera", "oft"]


def check_merged(path: Path, reference: Any) -> None:
    """The directory is peft's own merged model, bit for bit, and gives the adapted model's logits."""
    expected = logits(reference)
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    merged = reference.merge_and_unload()
    assert type(loaded) is type(merged)
    same(loaded.state_dict(), merged.state_dict())


def export_merged(directory: Path, kinds: list[str]) -> None:
    warnings.simplefilter("ignore")
    for kind in kinds:
        model = adapted(kind)
        parallelize_model(model, SHARDED.get(kind, "fsdp"))
        before, held = full_model_state(model.model, ranks="all"), objects(model)
        export_pretrained(model, directory / kind, merge_adapters=True, max_shard_size="4KB")
        assert objects(model) == held
        equal(full_model_state(model.model, ranks="all"), before)


def objects(model: nn.Module) -> list[Any]:
    """Which parameters the model has, and what its modules' attributes are."""
    attributes = [{key: repr(value) for key, value in vars(one).items()} for one in model.modules()]
    return [{name: id(value) for name, value in model.named_parameters()}, *attributes]


@pytest.mark.promise(96)
@pytest.mark.parametrize("kinds", [MERGED, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_merged_from_shards_equals_merge_and_unload(tmp_path: Path, kinds: list[str]) -> None:
    run(export_merged, 2, tmp_path, kinds)
    for kind in kinds:
        check_merged(tmp_path / kind, adapted(kind).model)
        found = files(tmp_path / kind)
        assert "tokenizer.json" in found
        assert "model.safetensors.index.json" in found
        assert not {name for name in found if name.startswith("adapter")}


def export_from(directory: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        for kind, make in LORA.items():
            torch.manual_seed(3)
            model = make()
            parallelize_model(model, BY_WORLD[name]())
            export_pretrained(model, directory / name / kind, merge_adapters=True)


@pytest.mark.promise(96)
@pytest.mark.parametrize(("ranks", "names"), [(2, ["tp", "ddp", "hsdp"]), slow(4, ["tp"])])
def test_merged_from_every_mesh(tmp_path: Path, ranks: int, names: list[str]) -> None:
    run(export_from, ranks, tmp_path, names)
    for kind, make in LORA.items():
        torch.manual_seed(3)
        merged = make().merge_and_unload().state_dict()
        for name in names:
            found = tensors(tmp_path / name / kind)
            same(found, {key: merged[key] for key in found})


@on_ranks(2)
def test_what_cannot_be_merged_is_refused_everywhere() -> None:
    warnings.simplefilter("ignore")
    in_layers = AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    for model, text in (
        (adapted("prompt"), "The adapters default of the model learn prompts instead of"),
        (get_peft_model(pretrained_llama(), in_layers), "The adapters default of the model learn prompts"),
        (pretrained_llama(), "merge_adapters has nothing to merge"),
    ):
        parallelize_model(model, "fsdp")
        with pytest.raises(CheckpointValueError, match=text):
            export_pretrained(model, "/nowhere", merge_adapters=True)


@pytest.mark.promise(96)
def test_a_tie_that_merging_undoes_is_undone_in_the_directory(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of adapters on tied weights
        options = {"target_modules": ["embed_tokens"], "init_lora_weights": False}
        model = lora(pretrained_llama(tied=True), **options).eval()
        export_pretrained(model, tmp_path, merge_adapters=True)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert model.config.tie_word_embeddings is True


def bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return random(BertForMaskedLM(BertConfig(vocab_size=64, **sizes)))


def bart() -> Any:
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32)
    counts = {f"{one}_{what}": 1 for one in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    return random(BartForConditionalGeneration(BartConfig(vocab_size=64, **sizes, **counts)))


@pytest.mark.promise(96)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (bert, {"target_modules": ["word_embeddings"]}),
        (bart, {"target_modules": ["lm_head"]}),
        (bart, {"target_modules": ["embed_tokens"]}),
        (tied_llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ],
)
def test_the_other_ties_of_the_model_are_stored_too(make: Any, options: Any, tmp_path: Path) -> None:
    """The model has several tied tensors, biases among them, and the adapter unties one."""
    warnings.simplefilter("ignore")
    model = get_peft_model(make(), LoraConfig(init_lora_weights=False, **options)).eval()
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(0.1)
    export_pretrained(model, tmp_path, merge_adapters=True)
    loaded, report = type(make()).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    inputs = {"input_ids": torch.arange(16).view(2, 8)}
    if make is bart:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        found, expected = loaded.eval()(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    copy = type(loaded)(loaded.config)
    load_pretrained(copy, tmp_path)
    same(copy.state_dict(), loaded.state_dict())
