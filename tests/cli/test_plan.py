"""`composer-dist plan`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS

pytestmark = pytest.mark.promise(111)
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def printed(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], prog_name="composer-dist")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def test_a_model_directory_fits_or_does_not(directory: Path) -> None:
    options = (directory, "--world-size", 4, "--batch", "2x16")
    status, shown, _ = printed(*options, "--device-memory", "1GiB")
    assert (status, "Plan for 4 ranks" in shown, "A rank fits" in shown) == (0, True, True)
    status, shown, _ = printed(*options, "--device-memory", "100KB")
    assert (status, "A rank does not fit" in shown) == (1, True)
    assert shown.endswith(" of 97.7 KiB. --suggest searches a plan that does.\n")


def test_json_has_the_names_of_the_estimate(directory: Path) -> None:
    status, shown, _ = printed(directory / "config.json", "--world-size", 2, "--batch", "2x16", "--json")
    found = json.loads(shown)
    sizes = 2 * 100 * 64 + 64, 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64)
    assert (status, found["fits"]) == (0, None)
    assert found["memory"]["parameters"] == sum(sizes) // 2 * 4
    assert found["memory"]["peak"] == sum(found["memory"]["at_peak"].values())
    assert found["memory"]["peak_at"].startswith("backward of ")
    gathered = [one for one in found["communication"] if one["collective"] == "all_gather"]
    assert sum(one["count"] for one in gathered) == 4  # root and two blocks, the first one in backward again
    assert found["compute"]["forward"] > 0
    assert found["how"]["memory"]["parameters"] == "exact"
    assert found["how"]["communication"] == {"count": "exact", "bytes": "exact", "seconds": "modeled"}
    assert (found["how"]["compute"]["forward"], found["how"]["compute"]["seconds"]) == ("traced", "modeled")


def test_parallelism_of_a_file_and_an_optimizer_by_name(directory: Path) -> None:
    (directory / "some.yaml").write_text("parallelism: {ddp: {}}")
    options = (directory, "--world-size", 2, "--config", directory / "some.yaml", "--json")
    whole = json.loads(printed(*options)[1])["memory"]
    momentless = json.loads(printed(*options, "--optimizer", "torch.optim.SGD")[1])["memory"]
    assert whole["optimizer"] > 2 * whole["parameters"]
    assert momentless["optimizer"] == 0
    assert momentless["parameters"] == whole["parameters"] == whole["gradients"]
    assert json.loads(printed(*options)[1])["how"]["communication"]["count"] == "untraced"


@pytest.mark.parametrize(
    ("text", "said"), [(b"a: [", "not valid YAML"), (b"\xff", "utf-8"), (b"parallelism:", "is not a mapping")]
)
def test_a_config_that_cannot_be_read_is_named(directory: Path, text: bytes, said: str) -> None:
    (directory / "some.yaml").write_bytes(text)
    status, _, told = printed(directory, "--world-size", 2, "--config", directory / "some.yaml")
    assert (status, "some.yaml" in told, said in told) == (2, True, True)


def test_without_a_gpu_it_plans_for_gpus(directory: Path) -> None:
    (directory / "some.yaml").write_text("activation_checkpointing: offload")
    options = (directory, "--world-size", 2, "--batch", "2x16", "--config", directory / "some.yaml", "--json")
    offloaded = json.loads(printed(*options)[1])["memory"]
    (directory / "some.yaml").write_text("{mesh: {device_type: cpu}, activation_checkpointing: offload}")
    kept = json.loads(printed(*options)[1])["memory"]
    assert (offloaded["host"] > 0, kept["host"]) == (True, 0)
    assert offloaded["activations"] < kept["activations"]


def test_a_loss_without_logits_has_nothing_on_the_host() -> None:
    memory = json.loads(printed(PRESETS / "pretrain.yaml", "--world-size", 2, "--json")[1])["memory"]
    assert (memory["logits"] > 0, memory["host"]) == (True, 0)


@pytest.mark.slow
@pytest.mark.promise(116)
def test_a_suggestion_is_a_config_that_plan_confirms(directory: Path) -> None:
    options = (directory, "--world-size", 4, "--batch", "2x16", "--device-memory", "1GiB")
    status, shown, _ = printed(*options, "--suggest")
    assert (status, "Best: " in shown) == (0, True)
    (directory / "found.yaml").write_text(shown.split("run's file:")[1])
    status, told, _ = printed(*options, "--suggest", "--json")
    found = json.loads(told)
    assert (status, found["fits"]) == (0, True)
    status, confirmed, _ = printed(*options, "--config", directory / "found.yaml", "--json")
    assert status == 0
    assert json.loads(confirmed)["memory"] == found["memory"]
    assert found["suggestion"]["best"]["peak"] == found["memory"]["peak"]
    assert json.loads(confirmed)["compute"] == found["compute"]
    (directory / "base.yaml").write_text("activation_checkpointing: composable")
    status, told, _ = printed(*options, "--suggest", "--json", "--config", directory / "base.yaml")
    assert json.loads(told)["suggestion"]["best"]["config"]["activation_checkpointing"] == "composable"


@pytest.mark.slow
@pytest.mark.promise(116)
def test_where_nothing_fits_there_is_advice(directory: Path) -> None:
    options = (directory, "--batch", "1x512", "--device-memory", "1500KB", "--suggest")
    status, shown, _ = printed(*options)
    assert (status, "Nothing fits into 1.4 MiB of each device. It does with" in shown) == (1, True)
    assert "- sequences of " in shown
    status, told, _ = printed(*options, "--json")
    found = json.loads(told)
    assert (status, found["fits"], found["memory"], found["suggestion"]["best"]) == (1, False, None, None)
    assert found["suggestion"]["advice"][0]["peak"] <= 1500_000


@pytest.mark.slow
@pytest.mark.promise(116)
def test_a_run_gets_a_suggestion_for_its_own_batch() -> None:
    options = (PRESETS / "pretrain.yaml", "--world-size", 2, "--device-memory", "80GiB")
    status, told, _ = printed(*options, "--suggest", "--json")
    best = json.loads(told)["suggestion"]["best"]
    assert (status, best["microbatches"]) == (0, 1)


@pytest.mark.promise(115)
def test_a_report_for_the_browser(directory: Path) -> None:
    status, _, _ = printed(
        directory, "--batch", "2x16", "--html", directory / "report.html", "--device-memory", 7
    )
    assert (status, '"device_memory":7,' in (directory / "report.html").read_text()) == (1, True)


def test_a_function_makes_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\ndef make(): return nn.Linear(8, 8)\n")
    monkeypatch.chdir(tmp_path)
    status, shown, _ = printed("own.py:make", "--world-size", 2, "--json")
    assert (status, json.loads(shown)["memory"]["parameters"]) == (0, 72 * 2)


@pytest.mark.parametrize("preset", ["pretrain", "classification"])  # a label for each token, or sequence
def test_a_run_has_its_own_batch_and_optimizer(preset: str) -> None:
    status, shown, told = printed(PRESETS / f"{preset}.yaml", "--world-size", 2, "--json")
    assert (status, told) == (0, "")
    memory = json.loads(shown)["memory"]
    assert memory["optimizer"] > 2 * memory["parameters"]  # AdamW
    assert memory["activations"] > memory["logits"]
    assert (memory["logits"] > 0) == (preset == "pretrain")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suggest", "--batch", "8x8"], "--suggest needs --device-memory"),
        (["--suggest", "--device-memory", "1GiB"], "--suggest needs --batch"),
        (["--batch", "8"], "expected sequences x tokens"),
        (["--device-memory", "80Gx"], "expected a number with a unit"),
        (["--rank", "2", "--world-size", "2"], "ranks 0 to 1"),
        (["--optimizer", "adm"], "Did you mean 'adam'?"),
        (["--precision", "bf17"], "bf17"),
    ],
)
def test_a_wrong_call_names_what_is_wrong(directory: Path, arguments: list[str], words: str) -> None:
    status, _, told = printed(directory, *arguments)
    assert (status, words in " ".join(told.replace("\u2502", "").split())) == (2, True)


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty"):
        status, _, told = printed(tmp_path / name)
        assert (status, f"{name} is not a model: expected a directory with a config.json" in told) == (
            2,
            True,
        )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status, _, told = printed(tmp_path)
    assert (status, told.count("--like"), told.count("must name an architecture")) == (2, 0, 1)


@pytest.mark.parametrize("exists", [True, False])
def test_another_file_beside_a_config_is_not_planned_as_that(directory: Path, exists: bool) -> None:
    other = directory / "other.json"
    if exists:
        other.write_text(json.dumps({**SIZES, "num_hidden_layers": 3}))
    status, shown, told = printed(other, "--world-size", 2)
    assert (status, shown) == (2, "")
    assert f"{other} is not a model" in told
    assert "a file called config.json" in told


def test_what_the_figures_assume_is_said(directory: Path) -> None:
    _, shown, _ = printed(directory)
    assert shown.endswith("Calculated with --optimizer adamw --device h100 --topology h100.\n")
    _, shown, _ = printed(directory, "--optimizer", "sgd", "--topology", "a100")
    assert shown.endswith("Calculated with --optimizer sgd --device h100 --topology a100.\n")


def test_less_than_the_allocator_reserves_is_said(directory: Path) -> None:
    options = (directory, "--world-size", 2, "--batch", "2x16")
    memory = json.loads(printed(*options, "--json")[1])["memory"]
    assert memory["peak"] < memory["reserved"]
    status, shown, _ = printed(*options, "--device-memory", f"{memory['peak']}B")
    assert (status, "A rank fits" in shown, "torch's allocator may reserve" in shown) == (0, True, True)


@pytest.mark.promise(109)
def test_values_of_a_run_are_overridden(tmp_path: Path) -> None:
    run = PRESETS / "pretrain.yaml"
    status, shown, told = printed(run, "model.config.num_hidden_layers=3", "--world-size", 2)
    assert (status, told) == (0, "")
    assert "model.model.layers.* (2 units)" in shown
    assert shown.endswith("Calculated with --device h100 --topology h100.\n")
    status, _, told = printed(run, "model.config.num_hidden_layer=3")
    assert (status, "num_hidden_layers" in told) == (2, True)
    status, _, told = printed(run, "--precision", "amp_bf16", "--optimizer", "sgd")
    assert status == 2
    assert f"--precision, --optimizer: {run} is a run, which sets this itself" in told
    status, _, told = printed(tmp_path, "optimizer.lr=1")
    assert (status, "optimizer.lr=1: only values of a run's YAML" in told) == (2, True)
