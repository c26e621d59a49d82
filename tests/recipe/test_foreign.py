"""What transformers, peft and datasets reject: sentences with the key, the name and the remedy; status 2."""

import ast
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForMaskedLM
from typer.testing import CliRunner

import composer_dist
from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS
from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.models import hub_config
from composer_dist.recipe.other_libraries.failures import check_positions, from_hub
from composer_dist.recipe.schema import HubModel
from composer_dist.recipe.tokenizer import byte_tokenizer, tokenizer_named
from tests.kit.huggingface import llama

pytestmark = pytest.mark.promise(109)


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
            "'model.pretrained=./nope': model.pretrained: ./nope: there is no such directory (seen from ",
        ),
        (
            "finetune",
            ["model.config=null", "model.pretrained=some/model"],
            "HF_HUB_OFFLINE is set, so only models that are in the cache already can be used",
        ),
        (
            "pretrain",
            ["model.tokenizer=nope"],
            "'model.tokenizer=nope': there is no such directory (seen from ",
        ),
        (
            "lora",
            ["model.adapter.target_modules=[q_prj]"],
            "linear layers are called down_proj, gate_proj, k_proj, ",
        ),
        ("pretrain", ["model.config.vocab_size=100"], "vocab_size is 100, but the tokenizer has 261 tokens"),
        (
            "pretrain",
            ["model.config.vocab_size=abc"],
            "vocab_size is 'abc', but the tokenizer has 261 tokens",
        ),
        (
            "pretrain",
            ["model.config.vocab_size=null"],
            "vocab_size is None, but the tokenizer has 261 tokens",
        ),
        (
            "pretrain",
            ["model.config={model_type: t5}"],
            "transformers has 't5' only as seq2seq_lm or sequence_classification",
        ),
        (
            "pretrain",
            ["model.config={model_type: gpt2, n_layer: 1, n_positions: 32}"],
            "data.context is 128, but transformer.wpe has only 32 positions: lower data.context",
        ),
        (
            "pretrain",
            ["optimizer={name: sgd, nesterov: true}"],
            "optimizer 'sgd': Nesterov momentum requires a momentum and zero dampening",
        ),
        ("pretrain", ["data.source=[]"], "The text is empty"),
        ("pretrain", ["data.source=/"], "data.source: '/' matches only folders"),
        (
            "lora",
            ["model.adapter={method: prompt_tuning, num_virtual_tokens: 3}", "export=merged"],
            "learn prompts instead of weights and cannot be merged",
        ),
    ],
)
def test_it_is_said_before_anything_starts(preset: str, overrides: list[str], said: str) -> None:
    assert said in refused(preset, *overrides)


def test_a_causal_model_does_not_see_the_next_token(tmp_path: Path) -> None:
    encoder = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = f"model.config={json.dumps(encoder)}"
    said = "'bert' sees the token that it has to predict. Set is_decoder: true in"
    assert f"model.kind=causal_lm: {said} model.config, or use" in refused("pretrain", config)
    command = ["train", str(PRESETS / "pretrain.yaml"), "--dry-run", config, "model.config.is_decoder=true"]
    assert CliRunner().invoke(app, command).exit_code == 0
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**encoder)).save_pretrained(tmp_path)
    pretrained = ("model.config=null", f"model.pretrained={tmp_path}", "model.tokenizer=bytes")
    assert f"{said} {tmp_path}/config.json" in refused("finetune", *pretrained)


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


def test_a_folder_of_runs_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "ep1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").symlink_to("ep1")
    said = refused("finetune", "model.config=null", f"model.pretrained={tmp_path}", "model.tokenizer=null")
    assert said == (
        f"'model.pretrained={tmp_path}': the directory has no config.json of a model; it has checkpoints."
    )


def pretrained(path: Path) -> HubModel:
    """A model's directory, in shards."""
    llama().save_pretrained(path, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(path)
    return HubModel(kind="causal_lm", pretrained=str(path), tokenizer="bytes")


def test_weights_that_cannot_be_read_are_found_by_their_headers(tmp_path: Path) -> None:
    for name, harm, said in (
        (
            "cut",
            lambda file: file.write_bytes(file.read_bytes()[:-100]),
            r"model-00002.*is corrupt or truncated",
        ),
        ("gone", Path.unlink, r"puts .* in model-00002.*, but that file does not exist"),
        (
            "none",
            lambda file: file.with_name(INDEX).unlink(),
            "the directory has none of model.safetensors, ",
        ),
    ):
        model = pretrained(tmp_path / name)
        harm(next((tmp_path / name).glob("model-00002-*")))
        with pytest.raises(ParallelismValueError, match=f"model.pretrained={tmp_path / name}: .*{said}"):
            hub_config(model, None)


INDEX = "model.safetensors.index.json"


@pytest.mark.promise(107)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", INDEX, "model-00002-*", "sub/a.safetensors"]
)
def test_links_out_of_a_models_directory_are_not_followed(tmp_path: Path, name: str) -> None:
    model = pretrained(tmp_path / "m")
    (tmp_path / "m" / "sub").mkdir()
    (tmp_path / "m" / "sub" / "a.safetensors").touch()
    file = next((tmp_path / "m").glob(name))
    file.symlink_to(file.rename(tmp_path / "outside"))
    for read in (lambda: hub_config(model, None), lambda: tokenizer_named(str(tmp_path / "m"))):
        with pytest.raises(
            ParallelismValueError, match=f"{file.name} is a link that leads out of its directory"
        ):
            read()


@pytest.mark.promise(107)
@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_names_no_file_outside_of_the_directory(tmp_path: Path, index: str) -> None:
    model = pretrained(tmp_path / "m")
    (tmp_path / "m" / index).write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    (tmp_path / "outside.safetensors").touch()
    with pytest.raises(ParallelismValueError, match=r"outside"):
        hub_config(model, None)
    (tmp_path / "m" / index).write_text(json.dumps({"weight_map": {"a": 5}}))
    with pytest.raises(ParallelismValueError, match=index):
        hub_config(model, None)


def test_nothing_asks_transformers_to_run_code() -> None:
    for file in Path(composer_dist.__path__[0]).rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if isinstance(call, ast.Call) and name.endswith((".from_pretrained", ".from_config")):
                given = {one.arg: ast.unparse(one.value) for one in call.keywords}
                assert given.get("trust_remote_code") == "False", (file, name)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for blob in (tmp_path / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("..", "..", "blobs", blob.name))
    assert hub_config(model.model_copy(update={"pretrained": str(snapshot)}), None).model_type == "llama"
    assert len(tokenizer_named(str(snapshot))) == 261


@pytest.mark.promise(107)
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


def test_a_hub_without_a_network_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """huggingface_hub tries five times more, for half a minute."""
    asked: list[str] = []

    def unknown(host: str, *args: Any) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    model = HubModel(kind="causal_lm", pretrained="someone/model", tokenizer="bytes")
    said = r"Face hub does not give .*: huggingface.co cannot be reached \(Name or service not known\)"
    with pytest.raises(ParallelismValueError, match=said):
        hub_config(model, None)
    assert asked == ["huggingface.co"]
    assert not constants.HF_HUB_OFFLINE
