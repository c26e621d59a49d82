"""Composer's and LLM Foundry's configurations, converted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from composer_dist import FSDP2Config, ParallelismConfig
from composer_dist.config.parallelism import resolve_config
from composer_dist.recipe.converting.convert import convert_file, convert_values
from composer_dist.recipe.problems import ConfigurationError
from tests.kit.huggingface import llama, tokenizer

pytestmark = pytest.mark.promise(140)

FOUNDRY = """\
variables:
  seed: 3
  length: 64
run_name: dolly
max_seq_len: ${variables.length}
model:
  name: hf_causal_lm
  pretrained: true
  pretrained_model_name_or_path: base
  use_flash_attention_2: true
tokenizer:
  name: base
  kwargs: {model_max_length: "${variables.length}"}
train_loader:
  name: finetuning
  dataset:
    hf_name: json
    hf_kwargs: {data_files: rows.jsonl}
    split: train
    max_seq_len: ${variables.length}
    packing_ratio: auto
    shuffle: true
  drop_last: true
  num_workers: 0
scheduler: {name: cosine_with_warmup, t_warmup: 1ba, alpha_f: 0.1}
optimizer: {name: decoupled_adamw, lr: 2.0e-4, betas: [0.9, 0.95], weight_decay: 1.0e-5}
algorithms:
  gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}
max_duration: 2ba
eval_interval: 1ep
global_train_batch_size: 4
device_train_microbatch_size: 2
seed: ${variables.seed}
precision: fp32
dist_timeout: 600
fsdp_config:
  sharding_strategy: SHARD_GRAD_OP
  mixed_precision: PURE
  activation_checkpointing: true
  activation_checkpointing_reentrant: false
  activation_cpu_offload: true
  limit_all_gathers: true
progress_bar: false
log_to_console: true
console_log_interval: 5ba
callbacks:
  speed_monitor: {window_size: 3, time_unit: hours}
  memory_monitor: {}
save_folder: ./{run_name}/checkpoints
save_interval: 1ba
save_num_checkpoints_to_keep: 1
save_filename: ep{epoch}-ba{batch}-rank{rank}.pt
autoresume: true
"""
CONVERTED: dict[str, Any] = {
    "out": "runs/dolly",
    "seed": 3,
    "model": {"kind": "causal_lm", "pretrained": "base"},
    "data": {
        "kind": "chat",
        "source": {"dataset": "json", "data_files": "rows.jsonl", "split": "train"},
        "batch_size": 4,
        "packing": True,
        "context": 64,
        "shuffle": True,
        "workers": 0,
        "drop_last": True,
    },
    "optimizer": {"name": "adamw", "lr": 2e-4, "betas": [0.9, 0.95], "weight_decay": 1e-5 / 2e-4},
    "scheduler": {"name": "cosine", "t_warmup": "1ba", "alpha_f": 0.1},
    "parallelism": {
        "activation_checkpointing": ["composable", {"offload": True}],
        "fsdp2": {"reshard_after_forward": False, "mixed_precision": "PURE"},
    },
    "trainer": {
        "precision": "fp32",
        "max_duration": "2ba",
        "device_train_microbatch_size": 2,
        "progress_bar": False,
        "gradient_clipping": {"norm": 1.0},
    },
    "callbacks": {"speed_monitor": {"window_size": 3}, "memory_monitor": {}},
    "loggers": {"console": {"interval": "5ba"}},
    "checkpoints": {"folder": "./dolly/checkpoints", "interval": "1ba", "keep": 1},
    "resume": True,
}
LEFT = {
    "max_seq_len": 0, "model.use_flash_attention_2": 10, "train_loader.dataset": 16,
    "train_loader.dataset.target_responses": 16, "eval_interval": 30, "dist_timeout": 35,
    "fsdp_config.limit_all_gathers": 42, "callbacks.speed_monitor.time_unit": 47, "save_filename": 52,
}  # fmt: skip
"""Keys without a counterpart, by their lines."""


def test_a_run_of_llm_foundry_becomes_ours_and_the_rest_is_listed_by_line(tmp_path: Path) -> None:
    file = tmp_path / "dolly.yaml"
    file.write_text(FOUNDRY)
    done = convert_file(file)
    assert done.library == "composer"
    assert done.values == CONVERTED
    assert done.whole
    found = {one.key: one.line for one in done.remarks}
    assert found == {key: line for key, line in LEFT.items() if line}
    assert not any(one.undecided for one in done.remarks)


def test_defaults_and_options_that_change_what_is_trained() -> None:
    text = FOUNDRY.replace("betas: [0.9, 0.95], ", "").replace("drop_last: true", "drop_last: false")
    given = yaml.safe_load(text)
    given["train_loader"]["dataset"]["target_responses"] = "last"
    given["eval_loader"], given["eval_interval"] = given["train_loader"], 0
    given["callbacks"] = {"early_stopper": {"monitor": "LanguageCrossEntropy", "dataloader_label": "eval"}}
    done = convert_values(given)
    assert done.values["optimizer"]["betas"] == [0.9, 0.95]
    assert done.values["data"]["drop_last"] is False
    assert "evaluate" not in done.values["data"]
    assert "eval_interval" not in done.values["trainer"]
    assert done.values["callbacks"]["early_stopping"] == {"monitor": "metrics/eval/LanguageCrossEntropy"}
    said = {one.key: one for one in done.remarks}
    assert said["train_loader.dataset.target_responses"].undecided
    assert "0 means no evaluation" in said["eval_interval"].text
    assert "callbacks.early_stopper.dataloader_label" not in said


def test_what_llm_foundry_does_where_its_file_says_nothing() -> None:
    given = yaml.safe_load(FOUNDRY)
    del given["precision"], given["train_loader"]["drop_last"]
    given["train_loader"]["dataset"]["packing_ratio"] = 1.0
    values = convert_values(given).values
    assert values["trainer"]["precision"] == "amp_bf16"
    assert values["data"]["drop_last"] is False
    assert values["data"]["packing"] is False


@pytest.mark.slow
def test_the_converted_run_plans_and_trains(tmp_path: Path) -> None:
    (tmp_path / "dolly.yaml").write_text(FOUNDRY)
    llama(vocab_size=len(tokenizer())).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    rows = [{"prompt": "a b c", "completion": "d e"}] * 200
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def call(*arguments: str) -> str:
        command = [sys.executable, "-m", "composer_dist", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "--dry-run" in call("convert-config", "dolly.yaml", "run.yaml")
    call("train", "run.yaml", "--dry-run", "-n", "2")
    call("train", "run.yaml", "-n", "2")
    assert (tmp_path / "runs/dolly/model/model.safetensors").is_file()
    assert len(list((tmp_path / "dolly/checkpoints").glob("ep*"))) == 1


@pytest.mark.parametrize(
    ("given", "parallelism"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, {"fsdp2": {}}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"fsdp2": {"reshard_after_forward": False}}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"strategy": "hsdp", "fsdp2": {}}),
        (
            {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
            {"strategy": "hsdp", "fsdp2": {"reshard_after_forward": False}},
        ),
        ({"sharding_strategy": "NO_SHARD", "cpu_offload": False}, "ddp"),
        (
            {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": -1},
            {"mesh": {"dp_shard": 2, "dp_replicate": -1}, "fsdp2": {}},
        ),
        (
            {"parallelism_config": {"fsdp2": {"reshard_after_forward": 4, "state_dict_type": "full"}}},
            {"fsdp2": {"reshard_after_forward": 4, "state_dict_type": "full"}},
        ),
        (
            {"parallelism_config": {"fsdp": {}, "tp": {"tensor_parallel_degree": 2}}},
            {"fsdp2": {}, "mesh": {"tp": 2}, "tp": {}},
        ),
        (
            {"activation_cpu_offload": True, "auto_wrap": True},
            {"activation_checkpointing": "offload", "fsdp2": {}},
        ),
    ],
)
def test_a_dictionary_becomes_a_parallelism_that_resolves(given: dict[str, Any], parallelism: Any) -> None:
    done = convert_values(given, "composer")
    assert done.values["parallelism"] == parallelism
    if "strategy" not in parallelism:
        assert isinstance(resolve_config(parallelism), ParallelismConfig)


def test_what_from_compatible_attrs_keeps_is_what_the_conversion_keeps() -> None:
    given = {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "PURE", "state_dict_type": "full"}
    done = convert_values({"fsdp_config": given})
    here, there = (
        resolve_config(done.values["parallelism"]),
        resolve_config(FSDP2Config.from_compatible_attrs(given)),
    )
    assert here == there


def test_decoupled_weight_decay_is_torchs_divided_by_the_first_rate() -> None:
    """Composer: `param *= 1 - (lr / initial_lr) * weight_decay`, then Adam's step."""
    done = convert_values(
        {"max_duration": "1ep", "optimizer": {"name": "decoupled_adamw", "lr": 0.1, "weight_decay": 0.02}}
    )
    arguments = dict(done.values["optimizer"])
    assert arguments.pop("name") == "adamw"
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    torch.optim.AdamW([parameter], **arguments).step()
    torch.testing.assert_close(parameter.data, torch.full((3,), 0.98))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fsdp_config:\n  sharding_strategy: HALF\n",
            "x.yaml:2: fsdp_config.sharding_strategy: HALF is not one of",
        ),
        (
            "seed: 1\nmax_duration: 1ep\nfsdp_config: {state_dict_type: local}\n",
            "x.yaml:3: fsdp_config.state_dict_type: ",
        ),
        ("max_duration: 2 parsecs\n", "x.yaml:1: trainer.max_duration: "),
        ("precision: int4\nmax_duration: 1ep\n", "x.yaml:1: trainer.precision: "),
        ("seed: ${a.b}\nmax_duration: 1ep\n", "x.yaml:1: seed: ${a.b} names nothing in this file"),
        (
            "seed: ${oc.env:SEED}\nmax_duration: 1ep\n",
            "x.yaml:1: seed: ${oc.env:SEED} is computed by OmegaConf",
        ),
        ("seed: ${seed}\nmax_duration: 1ep\n", "refers to itself"),
        ("speed: 1\n", "do not say which library they are for. Pass --from with one of composer"),
        ("activation_checkpointing: true\n", "Pass --from"),
        ("model: {_component_: torchtune.models.a}\noutput_dir: o\n", "torchtune cannot be converted"),
        ("gradient_accumulation_steps: 1\nzero_optimization: {stage: 3}\n", "DeepSpeed cannot be converted"),
        ("", "nothing to convert"),
        ("a: [\n", "x.yaml:2: not valid YAML"),
    ],
)
def test_an_error_names_the_file_the_line_the_key_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as error:
        convert_file(Path("x.yaml"))
    assert message in str(error.value)


def test_what_must_be_decided_stands_apart(tmp_path: Path) -> None:
    given = {
        "max_duration": "1ep",
        "model": {"name": "mpt_causal_lm"},
        "train_loader": {"name": "text"},
        "optimizer": {"name": "decoupled_lionw", "lr": 1e-4},
        "algorithms": {"alibi": {}},
    }
    file = tmp_path / "mpt.yaml"
    file.write_text(yaml.safe_dump(given))
    done = convert_file(file)
    assert not done.whole
    undecided = {one.key for one in done.remarks if one.undecided}
    assert undecided == {"model.name", "train_loader", "optimizer.name", "algorithms.alibi"}
    text = done.text("mpt.yaml")
    assert text.index("# To decide:") < text.index("there is no 'decoupled_lionw' here")
    assert yaml.safe_load(text) == done.values
