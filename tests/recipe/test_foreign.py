"""What transformers, peft and datasets reject: sentences with the key, the name and the remedy; status 2."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_dist.cli.init import PRESETS
from composer_dist.cli.main import app
from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.models import hub_config
from composer_dist.recipe.other_libraries.failures import check_positions, from_hub
from composer_dist.recipe.schema import HubModel
from composer_dist.recipe.tokenizer import tokenizer_named
from tests.kit.huggingface import llama


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def refused(preset: str, *overrides: str) -> str:
    """What a dry run prints, without the file's name in front."""
    result = CliRunner().invoke(app, ["train", str(PRESETS / f"{preset}.yaml"), "--dry-run", *overrides])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix(f"{PRESETS / preset}.yaml: ").rstrip("\n")


@pytest.mark.parametrize(
    ("preset", "overrides", "said"),
    [
        (
            "finetune",
            ["model.config=null", "model.pretrained=./nope", "model.tokenizer=bytes"],
            "model.pretrained=./nope: there is no such directory (seen from ",
        ),
        (
            "finetune",
            ["model.config=null", "model.pretrained=some/model"],
            "HF_HUB_OFFLINE is set, so only models that are in the cache already can be used",
        ),
        (
            "pretrain",
            ["model.tokenizer=nope"],
            "model.tokenizer=nope: there is no such directory (seen from ",
        ),
        (
            "lora",
            ["model.adapter.target_modules=[q_prj]"],
            "linear layers are called down_proj, gate_proj, k_proj, ",
        ),
        ("pretrain", ["model.config.vocab_size=100"], "vocab_size is 100, but the tokenizer has 261 tokens"),
        (
            "pretrain",
            ["model.config={model_type: t5}"],
            "transformers has 't5' only as sequence_classification",
        ),
        (
            "pretrain",
            ["model.config={model_type: gpt2, n_layer: 1, n_positions: 32}"],
            "data.context is 128, but transformer.wpe has only 32 positions: lower data.context",
        ),
        ("pretrain", ["optimizer.lr=-1"], "optimizer 'adamw': Invalid learning rate: -1"),
    ],
)
def test_it_is_said_before_anything_starts(preset: str, overrides: list[str], said: str) -> None:
    assert said in refused(preset, *overrides)


def test_directories_that_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, said in (
        ("adapter", "is an adapter of peft, not a model: merge it into its model first"),
        ("empty", "the directory has no config.json of a model; it has no file at all"),
        ("file", "is a file: give the directory"),
    ):
        with pytest.raises(ParallelismValueError, match=said), from_hub("model.pretrained", name):
            pytest.fail("it is not read")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with (
        pytest.raises(ParallelismValueError, match="model.safetensors is corrupt or cut short"),
        from_hub("model.pretrained", "cut"),
    ):
        type(model).from_pretrained("cut")
    shutil.rmtree(tmp_path / "cut")


@pytest.mark.parametrize("key", ["pretrained", "tokenizer"])
def test_code_of_a_model_is_neither_run_nor_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"auto_map": {"AutoConfig": "mine.C", "AutoTokenizer": ["mine.T", None]}, "model_type": "mine"}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).write_text(json.dumps(code))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = HubModel(kind="causal_lm", pretrained="m", tokenizer="bytes")
    read = {"pretrained": lambda: hub_config(model, None), "tokenizer": lambda: tokenizer_named("m")}[key]
    with pytest.raises(ParallelismValueError, match=f"model.{key}=m: The repository m contains custom code"):
        read()
    assert not (tmp_path / "ran").exists()


def test_rotary_positions_have_no_end() -> None:
    check_positions(llama(), 10**6)
