"""Exported directories, loaded by transformers and peft alone."""

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaForCausalLM

from composer_dist.checkpoint import export_pretrained, full_model_state, load_pretrained
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import init_context, parallelize_model
from composer_dist.errors import (
    CheckpointRuntimeError,
    CheckpointValueError,
    ParallelismRuntimeError,
    ParallelismTypeError,
    ParallelismValueError,
)
from composer_dist.models import HuggingFaceModel
from tests.kit import huggingface as hf
from tests.kit.compare import fails_alike
from tests.kit.files import files, tensors
from tests.kit.grids import crossed
from tests.kit.meshes import BY_WORLD, PLACES
from tests.kit.world import World, on_ranks, run

pytestmark = [
    # peft 0.21 reads an attribute that transformers 5.23 deprecates.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]


def settings(path: Path) -> dict[str, Any]:
    """The adapter's configuration; sets are written in any order."""
    read = json.loads((path / "adapter_config.json").read_text())
    return {k: sorted(v) if isinstance(v, list) else v for k, v in read.items()}


BUILDS: dict[str, Callable[[], Any]] = {
    "llama": hf.pretrained_llama,
    "tied": lambda: hf.pretrained_llama(tied=True),
    "t5": hf.pretrained_t5,
}


def export(kind: str, path: Path, wrapped: bool, max_shard_size: str) -> None:
    model = BUILDS[kind]()
    given = HuggingFaceModel(model, hf.tokenizer()) if wrapped else model
    if dist.is_initialized():
        hf.sharded(given)
    if dist.is_initialized() and dist.get_rank() == 1:
        path = path / "of another rank"
    export_pretrained(given, path, max_shard_size=max_shard_size)


@pytest.mark.promise(96)
@crossed({"max_shard_size": ["5GB", "4KB"], "kind": BUILDS})
def test_transformers_loads_it(world2: World, tmp_path: Path, kind: str, max_shard_size: str) -> None:
    world2(export, kind, tmp_path, True, max_shard_size)
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(hf.logits(model), hf.logits(BUILDS[kind]()))
    assert type(model) is type(BUILDS[kind]())
    assert model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path)("a b").input_ids == [4, 5]
    assert ("model.safetensors.index.json" in files(tmp_path)) == (max_shard_size == "4KB")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]


IN_BFLOAT16: dict[str, Callable[[], Any]] = {
    "llama": hf.pretrained_llama,
    "mixtral": lambda: hf.random(hf.mixtral()),  # its experts are fused in memory and separate on disk
    "merged": hf.lora_llama,
    "adapter": hf.lora_llama,
}


def twice(kind: str, path: Path) -> None:
    model = IN_BFLOAT16[kind]()
    parallelize_model(model, FSDP2Config())
    for name, dtype in (("own", None), ("cast", torch.bfloat16)):
        export_pretrained(model, path / name, dtype=dtype, merge_adapters=kind == "merged")


@pytest.mark.promise(130)
@pytest.mark.parametrize("kind", IN_BFLOAT16)
def test_weights_are_stored_in_the_dtype_asked_for(world2: World, tmp_path: Path, kind: str) -> None:
    world2(twice, kind, tmp_path)
    own, cast = (tensors(tmp_path / name) for name in ("own", "cast"))
    assert own.keys() == cast.keys()
    for name, value in own.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.bfloat16(), cast[name])
    if kind != "adapter":
        assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "bfloat16"
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "cast").dtype == torch.bfloat16
    with pytest.raises(ParallelismValueError, match=r"must be torch\.bfloat16, float16, .* not torch\.int8"):
        export_pretrained(IN_BFLOAT16[kind](), tmp_path, dtype=torch.int8)


@pytest.mark.promise(96)
@pytest.mark.parametrize(("first", "second"), [("5GB", "4KB"), ("4KB", "5GB")])
def test_a_plain_model_over_an_earlier_export(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".export-killed").mkdir()
    export("tied", tmp_path, False, first)
    export("llama", tmp_path, False, second)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(hf.logits(loaded), hf.logits(hf.pretrained_llama()))
    assert ("model.safetensors" in files(tmp_path)) == (second == "5GB")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not [name for name in files(tmp_path) if ".export-" in name]


@pytest.mark.parametrize("size", ["abc", "", None])
def test_what_is_no_size_is_named(tmp_path: Path, size: Any) -> None:
    with pytest.raises(CheckpointValueError, match=f"such as '5GB', not {size!r}."):
        export_pretrained(hf.pretrained_llama(), tmp_path, max_shard_size=size)
    assert not files(tmp_path)


@pytest.mark.promise(95)
def test_a_merged_model_over_its_adapter(tmp_path: Path) -> None:
    model = lora_of_peft()
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    export_pretrained(model, tmp_path)
    assert adapter <= files(tmp_path)
    export_pretrained(model, tmp_path, merge_adapters=True)
    assert not adapter & files(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not getattr(loaded, "_hf_peft_config_loaded", False)
    torch.testing.assert_close(hf.logits(loaded), hf.logits(model))
    export_pretrained(model, tmp_path)
    assert adapter <= files(tmp_path)
    assert "model.safetensors" not in files(tmp_path)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@on_ranks(2)
def test_a_model_is_as_before_after_its_export(tmp_path: Path, strategy: str) -> None:
    model = hf.pretrained_llama()
    parallelize_model(model, strategy)
    kind = type(model)
    export_pretrained(model, tmp_path)
    model(input_ids=hf.prompt(0), labels=hf.prompt(0)).loss.backward()
    assert type(model) is kind is not LlamaForCausalLM
    assert all(p.grad is not None for p in model.parameters())


def export_adapter(path: Path, kind: str) -> None:
    model = hf.adapted(kind)
    rules = [Rule("re:.*[.]lora_[ABE]", shard=False)] if kind == "adalora" else []
    parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(), rules=rules))
    export_pretrained(model, path)


@pytest.mark.promise(95)
@pytest.mark.parametrize("kind", hf.ADAPTERS)
def test_peft_loads_the_directory(world2: World, tmp_path: Path, kind: str) -> None:
    world2(export_adapter, tmp_path, kind)
    reference = hf.adapted(kind)
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files(tmp_path)
    assert not {name for name in files(tmp_path) if name.startswith("model")}
    expected = tmp_path / "expected"
    reference.model.save_pretrained(expected)
    assert settings(tmp_path) == settings(expected)
    assert "FSDP" not in (tmp_path / "README.md").read_text()
    loaded = PeftModel.from_pretrained(hf.base_for(kind), tmp_path)
    torch.testing.assert_close(hf.logits(loaded), hf.logits(reference.model), rtol=0, atol=0)


def reloads(path: Path, expected: Tensor) -> None:
    with init_context(empty=dist.get_rank() != 0):
        base = hf.pretrained_llama()
    if dist.get_rank() == 0:
        model = HuggingFaceModel(PeftModel.from_pretrained(base, path))
    else:
        model = HuggingFaceModel(base, peft_config=PeftConfig.from_pretrained(path))
    parallelize_model(model, "fsdp")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()({"input_ids": hf.prompt(0)}).logits, expected)


@pytest.mark.promise(95)
def test_an_adapter_reloads_into_any_number_of_ranks(
    world1: World, world2: World, world4: World, tmp_path: Path
) -> None:
    world2(export_adapter, tmp_path, "lora")
    expected = hf.logits(hf.adapted("lora").model)
    for world in (world1, world2, world4):
        world(reloads, tmp_path, expected)


def two_adapters() -> HuggingFaceModel:
    model = hf.adapted("lora")
    second = LoraConfig(r=2, target_modules=["o_proj"], bias="all", init_lora_weights=False)
    model.model.add_adapter("second", second)
    return model


def lora_of_peft() -> Any:
    return hf.adapted("lora").model


def injected() -> Any:
    model = hf.pretrained_llama()
    torch.manual_seed(1)
    model.add_adapter(hf.adapter("lora"))
    return model


def export_made(path: Path, make: Callable[[], Any]) -> None:
    export_pretrained(hf.sharded(make()), path)


@pytest.mark.promise(95)
def test_several_adapters(world2: World, tmp_path: Path) -> None:
    world2(export_made, tmp_path, two_adapters)
    reference = two_adapters().model
    for name, place in (("default", tmp_path), ("second", tmp_path / "second")):
        reference.set_adapter(name)
        loaded = PeftModel.from_pretrained(hf.pretrained_llama(), place)
        assert torch.equal(hf.logits(loaded), hf.logits(reference)), name


@pytest.mark.promise(95)
@pytest.mark.parametrize("make", [lora_of_peft, injected])
def test_adapters_without_the_wrapper(world2: World, tmp_path: Path, make: Callable[[], Any]) -> None:
    world2(export_made, tmp_path, make)
    loaded = PeftModel.from_pretrained(hf.pretrained_llama(), tmp_path)
    assert torch.equal(hf.logits(loaded), hf.logits(make()))


def seeded(kind: str, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return hf.LORA[kind]().eval()


def adapters(directory: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name, kind in itertools.product(names, hf.LORA):
        model, other = seeded(kind), seeded(kind, seed=4)
        for one in (model, other):
            parallelize_model(one, BY_WORLD[name]())
        export_pretrained(model, directory / name / kind)
        assert load_pretrained(other, directory / name / kind) == ([], [])
        found, expected = (full_model_state(one, ranks="all") for one in (other, model))
        assert all(torch.equal(found[key], expected[key]) for key in expected if "lora_" in key)


@pytest.mark.promise(95)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
def test_an_adapter_from_every_mesh_loads_in_plain_peft(tmp_path: Path, ranks: int, names: list[str]) -> None:
    run(adapters, ranks, tmp_path, names, timeout=180)
    for kind, name in itertools.product(hf.LORA, names):
        torch.manual_seed(3)
        base = {"llama": hf.llama, "gpt2": hf.gpt2}[kind]()
        loaded = PeftModel.from_pretrained(base, tmp_path / name / kind)
        assert torch.equal(hf.logits(loaded), hf.logits(seeded(kind))), name


@on_ranks(2)
def test_what_rank_0_cannot_write_fails_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with fails_alike(CheckpointRuntimeError, f"export_pretrained cannot write {file}"):
        export_pretrained(hf.sharded(hf.pretrained_llama()), file)


@pytest.mark.promise(92)
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_save_pretrained_of_shards_names_the_way_to_save_them(tmp_path: Path) -> None:
    model = get_peft_model(hf.pretrained_llama(), LoraConfig(target_modules="all-linear"))
    parallelize_model(model, FSDP2Config())
    with pytest.raises(ParallelismRuntimeError, match=r"call export_pretrained\(model, path\) on all ranks"):
        model.save_pretrained(str(tmp_path / "adapter"))


@pytest.mark.promise(92)
def test_an_empty_adapter_is_never_written(tmp_path: Path) -> None:
    model = hf.emptied(hf.adapted("lora").model)
    with pytest.raises(CheckpointValueError, match="'default'"):
        export_pretrained(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_only_pretrained_models_are_exported(tmp_path: Path) -> None:
    with pytest.raises(ParallelismTypeError, match="not Linear"):
        export_pretrained(nn.Linear(1, 1), tmp_path)
