"""Names: a checkpoint fits its model however either has been wrapped, renamed, tied or fused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from composer_dist._torch import checkpoint_wrapper
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.errors import CheckpointKeyError, CheckpointValueError
from composer_dist.files.match import Match, castable, match_names
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.safetensors import read_index
from composer_dist.files.slabs import plan_reads
from composer_dist.models import HuggingFaceModel
from composer_dist.structure.structure import read_structure
from tests.kit.huggingface import gpt2, llama, lora, mixtral, random
from tests.zoo import toy

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def matched(model: nn.Module, path: Path, strict: bool = True) -> Match:
    structure, index = read_structure(model), read_index(path)
    root = path if path.is_dir() else path.parent
    match = match_names(structure, index.tensors, root.name, index.adapter)
    match.check(structure, index.entries, strict)
    return match


@torch.no_grad()
def fill(model: nn.Module, path: Path, strict: bool = True) -> Match:
    """Read a checkpoint into a real model."""
    structure, index, match = read_structure(model), read_index(path), matched(model, path, strict)
    slabs = []
    for name, blueprint in match.tensors.items():
        value = structure.tensors[name].get()
        part = Layout(tuple(value.shape)).part(Coordinate())
        slabs += plan_reads(blueprint, index.entries, part, value.detach().view(-1))
    with Files(Path(index.root), index.files) as files:
        read_slabs(slabs, files)
    return match


def same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


def file_of(model: nn.Module, directory: Path, rename: Callable[[str], str] = str) -> Path:
    first = {held.info.name for held in read_structure(model).tensors.values()}
    state = model.state_dict()
    path = directory / "own.safetensors"
    save_file({rename(n): v.clone() for n, v in state.items() if n in first or "_wrapped" in n}, path)
    return path


# Wrappers


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_that_wrappers_have_lengthened(tmp_path: Path, prefix: str) -> None:
    model = random(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    path = file_of(model, tmp_path, lambda name: prefix + name)
    other = random(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 2)
    fill(other, path)
    same_state(other.state_dict(), model.state_dict())


def test_checkpoint_wrappers_on_either_side(tmp_path: Path) -> None:
    def make(wrap: bool) -> Any:
        inner = [nn.Linear(3, 3), nn.Linear(3, 3)]
        return random(nn.Sequential(*(checkpoint_wrapper(one) if wrap else one for one in inner)), 1 + wrap)

    for wrap in (True, False):
        raw = {
            name.replace("0.", "0._checkpoint_wrapped_module.", wrap): value.clone()
            for name, value in make(False).state_dict().items()
        }
        save_file(raw, tmp_path / "own.safetensors")
        other = make(not wrap)
        fill(other, tmp_path / "own.safetensors")
        same_state(dict(other.state_dict()), make(False).state_dict())


def test_a_composer_model_takes_what_transformers_and_what_it_itself_writes(tmp_path: Path) -> None:
    source = random(gpt2())
    source.save_pretrained(tmp_path / "a")
    wrapped = HuggingFaceModel(random(gpt2(), 2))
    assert matched(wrapped, tmp_path / "a").keys["model.transformer.wte.weight"] == ["transformer.wte.weight"]
    fill(wrapped, tmp_path / "a")
    same_state(wrapped.model.state_dict(), source.state_dict())
    own = HuggingFaceModel(random(gpt2(), 3))
    fill(wrapped, file_of(own, tmp_path))
    same_state(wrapped.state_dict(), own.state_dict())


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_a_tied_tensor_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    source, model = random(gpt2()), random(gpt2(), 2)
    state = {key: value.clone() for key, value in source.state_dict().items()}
    state.pop({"lm_head.weight": "transformer.wte.weight"}.get(name, "lm_head.weight"))
    save_file(state, tmp_path / "own.safetensors")
    match = fill(model, tmp_path / "own.safetensors")
    assert match.keys["transformer.wte.weight"] == [name]
    same_state(model.state_dict(), source.state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight


# transformers


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "deepseek_v3", "llama4", "t5", "vit", "wav2vec2", "zamba"]
)
def test_transformers_own_tables_of_names_and_fused_tensors(tmp_path: Path, name: str) -> None:
    source = random(toy.build(name))
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    reference = type(source).from_pretrained(tmp_path, dtype=torch.float32)
    model = random(toy.build(name), 2)
    fill(model, tmp_path)
    same_state(model.state_dict(), reference.state_dict())


def test_experts_that_lie_apart_are_read_as_they_are_fused(tmp_path: Path) -> None:
    source = random(mixtral(num_hidden_layers=1, num_local_experts=4))
    source.save_pretrained(tmp_path)
    match = matched(source, tmp_path)
    (name,) = [name for name in match.tensors if name.endswith("gate_up_proj")]
    assert len(match.keys[name]) == 8
    assert "w1.weight" in match.keys[name][0]
    index = read_index(tmp_path)
    lacking = {key: torch.zeros(e.shape) for key, e in index.entries.items() if "experts.2.w1" not in key}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointValueError, match=r"transformers converts .*gate_up_proj from .* joins tensors"
    ):
        matched(source, tmp_path)


def test_with_and_without_the_base_models_prefix(tmp_path: Path) -> None:
    source, model = random(llama()), random(llama(), 2)
    source.model.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointKeyError, match="missing: lm_head.weight. strict=False loads what matches"):
        matched(model, tmp_path / "base")
    head = model.lm_head.weight.clone()
    assert fill(model, tmp_path / "base", strict=False).missing == ["lm_head.weight"]
    same_state(model.model.state_dict(), source.model.state_dict())
    assert torch.equal(model.lm_head.weight, head)
    source.save_pretrained(tmp_path / "whole")
    base = random(llama(), 3).model
    assert fill(base, tmp_path / "whole", strict=False).unexpected == ["lm_head.weight"]
    same_state(base.state_dict(), source.model.state_dict())


def test_what_transformers_does_not_mind_is_not_minded(tmp_path: Path) -> None:
    model = random(llama())
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file({n: v.clone() for n, v in model.state_dict().items()} | extra, tmp_path / "model.safetensors")
    before = model.model.rotary_emb.inv_freq.clone()
    save_file({**extra, "other.inv_freq": torch.ones(4)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointKeyError, match="unexpected: .*other.inv_freq"):
        matched(model, tmp_path / "more.safetensors")
    fill(model, tmp_path / "model.safetensors")
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model._keys_to_ignore_on_load_unexpected == set()
    tolerant = random(llama(), 2)
    tolerant._keys_to_ignore_on_load_missing = {r"lm_head\.weight"}
    tolerant._keys_to_ignore_on_load_unexpected = {"rotary"}
    del (state := dict(model.state_dict()))["lm_head.weight"]
    save_file({n: v.clone() for n, v in state.items()}, tmp_path / "model.safetensors")
    assert matched(tolerant, tmp_path / "model.safetensors").missing == []


def test_a_buffer_that_the_model_does_not_save_is_passed_over(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    save_file({"weight": torch.zeros(3), "table": torch.zeros(3)}, tmp_path / "own.safetensors")
    model = Table()
    fill(model, tmp_path / "own.safetensors")
    assert torch.equal(model.table, torch.arange(3.0))
    assert not model.weight.any()


# peft


def test_a_base_checkpoint_onto_a_peft_model_leaves_the_adapter(tmp_path: Path) -> None:
    source = random(llama())
    source.save_pretrained(tmp_path)
    options: list[Any] = [
        {},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"target_modules": "all-linear"},
    ]
    for number, option in enumerate(options):
        model = random(lora(llama(), **option), 5)
        adapter = {n: v.clone() for n, v in model.state_dict().items() if "lora_" in n}
        if number == 3:
            model = HuggingFaceModel(model)
            adapter = {f"model.{name}": value for name, value in adapter.items()}
        fill(model, tmp_path)
        state = dict(nn.Module.state_dict(model)) if number < 3 else dict(whole(model))
        assert adapter
        assert all(torch.equal(state[name], value) for name, value in adapter.items())
        plain = {plain_name(n): v for n, v in state.items() if "lora_" not in n}
        same_state(plain, source.state_dict())
        copies = [v for n, v in state.items() if "modules_to_save" in n]
        assert all(torch.equal(value, source.lm_head.weight) for value in copies)
        assert len(copies) == (number == 1)


def whole(model: Any) -> dict[str, torch.Tensor]:
    model.should_save_peft_only = False
    return dict(model.state_dict())


def plain_name(name: str) -> str:
    for piece in (".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(piece, "")
    return name.split("base_model.model.")[-1]


def test_a_whole_peft_state_onto_peft_and_its_base_onto_a_plain_model(tmp_path: Path) -> None:
    source = random(lora(llama(), modules_to_save=["lm_head"]))
    path = file_of(source, tmp_path)
    model = random(lora(llama(), modules_to_save=["lm_head"]), 2)
    fill(model, path)
    same_state(model.state_dict(), source.state_dict())
    merged = {n: v.clone() for n, v in source.state_dict().items() if "lora_" not in n and "lm_head" not in n}
    save_file(merged, path)
    plain = random(llama(), 3)
    assert fill(plain, path, strict=False).missing == ["lm_head.weight"]
    assert torch.equal(
        plain.model.layers[0].self_attn.q_proj.weight,
        merged["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"],
    )


def test_an_adapter_onto_a_peft_model_leaves_the_base(tmp_path: Path) -> None:
    for number, option in enumerate(
        ({}, {"modules_to_save": ["lm_head"]}, {"use_dora": True, "bias": "all"})
    ):
        source = random(lora(llama(), **option))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source.save_pretrained(tmp_path / str(number))
        plain = random(lora(llama(), **option), 2)
        wrapped = HuggingFaceModel(random(lora(llama(), **option), 2))
        for model in (plain, wrapped):
            reference = random(lora(llama(), **option), 2)
            reference.load_adapter(tmp_path / str(number), "default")
            fill(model, tmp_path / str(number))
            state = plain.state_dict() if model is plain else wrapped.model.state_dict()
            same_state(dict(state), dict(reference.state_dict()))
        with pytest.raises(CheckpointValueError, match="is an adapter's, but the model has none"):
            matched(llama(), tmp_path / str(number))
    small = random(lora(llama(), r=2))
    with pytest.raises(CheckpointValueError, match=r"lora_A.default.weight .* is \(3, 32\) .* \(2, 32\)"):
        matched(small, tmp_path / "0")
    more = random(lora(llama(), target_modules=["q_proj", "v_proj", "k_proj"]))
    with pytest.raises(CheckpointKeyError, match="missing: .*k_proj.lora_A.default.weight"):
        matched(more, tmp_path / "0")


def test_of_several_adapters_the_directory_says_which(tmp_path: Path) -> None:
    source = random(lora(llama()))
    source.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=3))
    source = random(source)
    source.save_pretrained(tmp_path)
    model = random(source.__class__(llama(), source.peft_config["default"]), 2)
    model.add_adapter("second", source.peft_config["second"])
    for directory, adapter in ((tmp_path, "default"), (tmp_path / "second", "second")):
        match = fill(model, directory)
        assert all(f".{adapter}." in name for name in match.tensors)
    found, expected = model.state_dict(), source.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items() if "lora_" in name)


def test_prompts(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = get_peft_model(llama(), config)
        torch.nn.init.normal_(
            model.prompt_encoder.default.embedding.weight, generator=torch.Generator().manual_seed(seed)
        )
        return model

    source, model = make(1), make(2)
    source.save_pretrained(tmp_path / "adapter")
    fill(model, tmp_path / "adapter")
    assert torch.equal(*(one.prompt_encoder.default.embedding.weight for one in (model, source)))
    base = random(llama(), 4)
    base.save_pretrained(tmp_path / "base")
    fill(model, tmp_path / "base")
    same_state(model.base_model.state_dict(), base.state_dict())


# What does not fit


def test_every_fault_is_listed_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    state = {n: v.clone() for n, v in model.state_dict().items()}
    state |= {
        "0.weight": torch.ones(4, 4),
        "1.weight": torch.ones(2, 4).to(torch.float8_e4m3fn),
        "x": torch.ones(1),
    }
    state |= {"2.num_batches_tracked": torch.tensor(3.0)}
    del state["1.bias"]
    save_file(state, tmp_path / "own.safetensors")
    with pytest.raises(CheckpointValueError) as caught:
        matched(model, tmp_path / "own.safetensors")
    for text in (
        "0.weight is (4, 4) in the checkpoint, (4, 3) in the model",
        "1.weight is float8_e4m3fn in the checkpoint, float32 in the model",
        "2.num_batches_tracked is float32 in the checkpoint, int64 in the model",
        "missing: 1.bias",
        "unexpected: x",
    ):
        assert text in str(caught.value)


def test_casts_that_keep_the_meaning() -> None:
    allowed = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.int32, torch.int64)]
    refused = [
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int64, torch.float32),
        (torch.float32, torch.int64),
        (torch.int64, torch.int32),
        (torch.bool, torch.uint8),
        (torch.float32, torch.complex64),
        (torch.uint8, torch.int8),
    ]
    assert all(castable(*pair) for pair in allowed)
    assert not any(castable(*pair) for pair in refused)
