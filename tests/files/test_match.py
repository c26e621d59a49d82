"""Names: a checkpoint fits its model however either has been wrapped, renamed, tied or fused."""

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
from composer_dist.files.mismatch import StateMismatch
from composer_dist.files.read import Files, read_slabs
from composer_dist.files.safetensors import read_index
from composer_dist.files.slabs import plan_reads
from composer_dist.models import HuggingFaceModel
from composer_dist.structure.structure import read_structure
from tests.kit.compare import fails, same
from tests.kit.huggingface import gpt2, llama, lora, mixtral, random
from tests.zoo import toy

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def matched(model: nn.Module, path: Path, strict: bool = True) -> Match:
    structure, index = read_structure(model), read_index(path)
    match = match_names(structure, index.tensors, path, index.adapter)
    match.check(structure, index.entries, strict, path)
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


def write(path: Path, state: dict[str, torch.Tensor]) -> Path:
    """A safetensors file of copies, so that tied tensors share no memory."""
    save_file({name: value.clone() for name, value in state.items()}, path)
    return path


def file_of(model: nn.Module, path: Path, rename: Callable[[str], str] = str) -> Path:
    """Each tied tensor once."""
    first = {held.info.name for held in read_structure(model).tensors.values()}
    state = model.state_dict()
    return write(path, {rename(n): v for n, v in state.items() if n in first})


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own.safetensors"


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_that_wrappers_have_lengthened(own: Path, prefix: str) -> None:
    model, other = (random(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), seed) for seed in (1, 2))
    fill(other, file_of(model, own, lambda name: prefix + name))
    same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("wrapped_file", [True, False])
def test_checkpoint_wrappers_on_either_side(own: Path, wrapped_file: bool) -> None:
    source, model = (random(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), seed) for seed in (1, 2))
    state = source.state_dict()
    write(own, {n.replace("0.", "0._checkpoint_wrapped_module.", wrapped_file): v for n, v in state.items()})
    if not wrapped_file:
        model = nn.Sequential(*map(checkpoint_wrapper, model))
    fill(model, own)
    same(dict(model.state_dict()), source.state_dict())


def test_a_composer_model_takes_what_transformers_and_what_it_writes(tmp_path: Path, own: Path) -> None:
    source = random(gpt2())
    source.save_pretrained(tmp_path / "a")
    wrapped = HuggingFaceModel(random(gpt2(), 2))
    match = fill(wrapped, tmp_path / "a")
    assert match.keys["model.transformer.wte.weight"] == ["transformer.wte.weight"]
    same(wrapped.model.state_dict(), source.state_dict())
    other = HuggingFaceModel(random(gpt2(), 3))
    fill(wrapped, file_of(other, own))
    same(wrapped.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_a_tied_tensor_under_any_of_its_names(own: Path, name: str) -> None:
    source, model = random(gpt2()), random(gpt2(), 2)
    state = dict(source.state_dict())
    state.pop({"lm_head.weight": "transformer.wte.weight"}.get(name, "lm_head.weight"))
    match = fill(model, write(own, state))
    assert match.keys["transformer.wte.weight"] == [name]
    same(model.state_dict(), source.state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "deepseek_v3", "llama4", "t5", "vit", "wav2vec2", "zamba"]
)
def test_transformers_own_tables_of_names_and_fused_tensors(tmp_path: Path, name: str) -> None:
    source = random(toy.build(name))
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    reference = type(source).from_pretrained(tmp_path, dtype=torch.float32)
    model = random(toy.build(name), 2)
    fill(model, tmp_path)
    same(model.state_dict(), reference.state_dict())


def test_experts_that_lie_apart_are_read_as_they_are_fused(tmp_path: Path) -> None:
    source = random(mixtral(num_hidden_layers=1, num_local_experts=4))
    source.save_pretrained(tmp_path)
    match = matched(source, tmp_path)
    (name,) = [name for name in match.tensors if name.endswith("gate_up_proj")]
    assert len(match.keys[name]) == 8
    assert "w1.weight" in match.keys[name][0]
    index = read_index(tmp_path)
    lacking = {key: torch.zeros(e.shape) for key, e in index.entries.items() if "experts.2.w1" not in key}
    write(tmp_path / "model.safetensors", lacking)
    joins = r"transformers converts .*gate_up_proj from .* joins tensors"
    with pytest.raises(CheckpointValueError, match=joins):
        matched(source, tmp_path)


def test_with_and_without_the_base_models_prefix(tmp_path: Path) -> None:
    source, model = random(llama()), random(llama(), 2)
    source.model.save_pretrained(tmp_path / "base")
    with pytest.raises(
        CheckpointKeyError,
        match=r"The checkpoint \S*base does not match the model: missing: lm_head.weight. strict",
    ):
        matched(model, tmp_path / "base")
    head = model.lm_head.weight.clone()
    assert fill(model, tmp_path / "base", strict=False).missing == ["lm_head.weight"]
    same(model.model.state_dict(), source.model.state_dict())
    assert torch.equal(model.lm_head.weight, head)
    source.save_pretrained(tmp_path / "whole")
    base = random(llama(), 3).model
    assert fill(base, tmp_path / "whole", strict=False).unexpected == ["lm_head.weight"]
    same(base.state_dict(), source.model.state_dict())


def test_what_transformers_does_not_mind_is_not_minded(own: Path) -> None:
    model = random(llama())
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    with pytest.raises(CheckpointKeyError, match="unexpected: .*other.inv_freq"):
        matched(model, write(own, {**extra, "other.inv_freq": torch.ones(4)}))
    before = model.model.rotary_emb.inv_freq.clone()
    fill(model, write(own, model.state_dict() | extra))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model._keys_to_ignore_on_load_unexpected == set()
    tolerant = random(llama(), 2)
    tolerant._keys_to_ignore_on_load_missing = {r"lm_head\.weight"}
    tolerant._keys_to_ignore_on_load_unexpected = {"rotary"}
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert matched(tolerant, write(own, state)).missing == []


def test_a_buffer_that_the_model_does_not_save_is_passed_over(own: Path) -> None:
    model = nn.Linear(3, 1, bias=False)
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    fill(model, write(own, {"weight": torch.zeros(1, 3), "table": torch.zeros(3)}))
    assert torch.equal(model.table, torch.arange(3.0))
    assert not model.weight.any()


@pytest.mark.parametrize(
    ("options", "composer"),
    [
        ({}, False),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"use_dora": True}, False),
        ({"target_modules": "all-linear"}, True),
    ],
)
def test_a_base_checkpoint_onto_a_peft_model_leaves_the_adapter(
    tmp_path: Path, options: dict[str, Any], composer: bool
) -> None:
    source, model = random(llama()), random(lora(llama(), **options), 5)
    source.save_pretrained(tmp_path)
    adapter = {n: v.clone() for n, v in model.state_dict().items() if "lora_" in n}
    assert adapter
    given = HuggingFaceModel(model, should_save_peft_only=False) if composer else model
    fill(given, tmp_path)
    state = {name.removeprefix("model." * composer): v for name, v in given.state_dict().items()}
    same({name: state[name] for name in adapter}, adapter)
    copies = [v for n, v in state.items() if "modules_to_save" in n]
    assert all(torch.equal(value, source.lm_head.weight) for value in copies)
    assert len(copies) == ("modules_to_save" in options)
    same({plain_name(n): v for n, v in state.items() if "lora_" not in n}, source.state_dict())


def plain_name(name: str) -> str:
    for piece in (".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(piece, "")
    return name.split("base_model.model.")[-1]


def test_a_whole_peft_state_onto_peft_and_its_base_onto_a_plain_model(own: Path) -> None:
    source, model = (random(lora(llama(), modules_to_save=["lm_head"]), seed) for seed in (1, 2))
    fill(model, file_of(source, own))
    same(model.state_dict(), source.state_dict())
    merged = {n: v for n, v in source.state_dict().items() if "lora_" not in n and "lm_head" not in n}
    plain = random(llama(), 3)
    assert fill(plain, write(own, merged), strict=False).missing == ["lm_head.weight"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(plain.model.layers[0].self_attn.q_proj.weight, merged[name])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True, "bias": "all"},
        {"target_modules": ["embed_tokens", "q_proj"]},  # of which the base's embedding is saved too
    ],
    ids=str,
)
def test_an_adapter_onto_a_peft_model_leaves_the_base(tmp_path: Path, options: dict[str, Any]) -> None:
    random(lora(llama(), **options)).save_pretrained(tmp_path)
    reference, plain, inner = (random(lora(llama(), **options), 2) for _ in range(3))
    reference.load_adapter(tmp_path, "default")
    for model in (plain, HuggingFaceModel(inner)):
        fill(model, tmp_path)
    for model in (plain, inner):
        same(model.state_dict(), reference.state_dict())
    with pytest.raises(CheckpointValueError, match="is an adapter's, but the model has none"):
        matched(llama(), tmp_path)


def test_an_adapter_of_another_shape_or_with_other_targets_is_refused(tmp_path: Path) -> None:
    random(lora(llama())).save_pretrained(tmp_path)
    for options, kind, text in (
        ({"r": 2}, CheckpointValueError, r"lora_A.default.weight .* is \(3, 32\) .* \(2, 32\)"),
        ({"target_modules": ["q_proj", "k_proj"]}, CheckpointKeyError, "missing: .*k_proj.lora_A.default"),
    ):
        with pytest.raises(kind, match=text):
            matched(random(lora(llama(), **options)), tmp_path)


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
    same(*({name: v for name, v in state.items() if "lora_" in name} for state in (found, expected)))


def test_prompts(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        torch.manual_seed(seed)
        nn.init.normal_(model.prompt_encoder.default.embedding.weight)
        return model

    source, model = make(1), make(2)
    source.save_pretrained(tmp_path / "adapter")
    fill(model, tmp_path / "adapter")
    assert torch.equal(*(one.prompt_encoder.default.embedding.weight for one in (model, source)))
    base = random(llama(), 4)
    base.save_pretrained(tmp_path / "base")
    fill(model, tmp_path / "base")
    same(model.base_model.state_dict(), base.state_dict())


def test_every_fault_is_listed_at_once(own: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    state = model.state_dict() | {
        "0.weight": torch.ones(4, 4),
        "1.weight": torch.ones(2, 4).to(torch.float8_e4m3fn),
        "2.num_batches_tracked": torch.tensor(3.0),
        "x": torch.ones(1),
    }
    del state["1.bias"]
    with fails(
        CheckpointValueError,
        "0.weight is (4, 4) in the checkpoint, (4, 3) in the model",
        "1.weight is float8_e4m3fn in the checkpoint, float32 in the model",
        "2.num_batches_tracked is float32 in the checkpoint, int64 in the model",
        "missing: 1.bias",
        "unexpected: x",
    ):
        matched(model, write(own, state))


def test_casts_that_keep_the_meaning() -> None:
    allowed = [("bfloat16", "float32"), ("float32", "float16"), ("int32", "int64")]
    refused = [("float8_e4m3fn", "bfloat16"), ("int64", "float32"), ("float32", "int64"), ("int64", "int32")]
    refused += [("bool", "uint8"), ("float32", "complex64"), ("uint8", "int8")]
    for pair in allowed + refused:
        assert castable(*(getattr(torch, name) for name in pair)) == (pair in allowed), pair


def test_many_differences_are_counted() -> None:
    names = [f"layers.{number}" for number in range(10)]
    mismatch = StateMismatch(names, names[:9], [f"{name} is (2, 3) there" for name in names])
    with pytest.raises(CheckpointValueError) as caught:
        mismatch.check("It does not match", strict=True)
    text = str(caught.value)
    assert "layers.7 and 2 more. unexpected: layers.0" in text
    assert "layers.7 and 1 more. different kind, shape or dtype: layers.0 is (2, 3) there; layers.1" in text
    assert text.endswith("; layers.2 is (2, 3) there and 7 more.")
    assert mismatch.names() == [f"missing: {', '.join(names)}", f"unexpected: {', '.join(names[:9])}"]
