"""What is wrong with a configuration is told all at once, each with its line and the nearest key."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_dist import ParallelismConfig, users_code
from composer_dist.config import parallelism as strategies
from composer_dist.config.parallelism import register_strategy, resolve_config, strategy_named
from composer_dist.errors import ParallelismError, ParallelismKeyError, ParallelismValueError
from composer_dist.recipe.build import callbacks_of, loggers_of
from composer_dist.recipe.data import datasets, loader
from composer_dist.recipe.first_look.look import faults_at_once
from composer_dist.recipe.models import _module
from composer_dist.recipe.named import CALLBACKS, find, resolve
from composer_dist.recipe.problems import ConfigurationError, blamed_on
from composer_dist.recipe.read import read_configuration
from composer_dist.recipe.schema import HubModel, ModuleModel, TextData
from composer_dist.recipe.source import Document, override
from composer_dist.wording import unknown_strategy

pytestmark = pytest.mark.promise(109)

GOOD = """\
model:
  kind: causal_lm
  config:
    model_type: llama
    hidden_size: 32
data:
  kind: text
  source: english
optimizer:
  name: adamw
  lr: 1e-3
trainer:
  max_duration: 2ba
"""

NO_DURATION = (
    "is not a valid duration. Use a number and a unit: '3ep' (epochs), '100ba' (batches), "
    "'5000sp' (samples), '3e4tok' (tokens), '0.5dur' (share of the training), '90sec', '1h30m'"
)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    return put


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(file, overrides)
    with suppress(ConfigurationError):
        assert set(faults_at_once(file, overrides)) <= set(str(caught.value).splitlines())
    return [line.removeprefix(str(file)) for line in str(caught.value).splitlines()]


def test_a_good_configuration_is_read_and_numbers_are_numbers(write: Write) -> None:
    run = read_configuration(write(GOOD)).run
    assert run.optimizer.arguments == {"lr": 1e-3}
    assert run.out == Path("runs/run")
    assert run.data.batch_size == 8


def test_all_problems_come_at_once_with_lines_and_the_nearest_known_key(write: Write) -> None:
    text = (
        GOOD.replace("hidden_size", "hiden_size")
        .replace("source: english", "sorce: english")
        .replace("lr: 1e-3", "leaning_rate: 1e-3\n  weight_decay: much")
        .replace("max_duration: 2ba", "max_duration: 2bax\n  gradient_cliping: 1.0")
    )
    assert problems(write(text + "resum: false\nexport: onnx\n")) == [
        ":5: model.config.hiden_size: unknown key 'hiden_size': LlamaConfig does not have it. "
        "Did you mean 'hidden_size'?",
        ":6: data.source: 'source' is missing",
        ":8: data.sorce: unknown key 'sorce'. Did you mean 'source'?",
        ":11: optimizer.leaning_rate: unknown key 'leaning_rate'. Valid keys: lr, betas, eps, weight_decay, "
        "amsgrad, maximize, foreach, capturable, differentiable, fused, name",
        ":12: optimizer.weight_decay: expected a number, got 'much'",
        f":14: trainer.max_duration: '2bax' {NO_DURATION}",
        ":15: trainer.gradient_cliping: unknown key 'gradient_cliping'. Did you mean 'gradient_clipping'?",
        ":16: resum: unknown key 'resum'. Did you mean 'resume'?",
        ":17: export: expected true, false or 'merged', got 'onnx'",
    ]


def test_a_key_that_is_a_number_is_named(write: Write) -> None:
    with_number = GOOD.replace("hidden_size: ", "1e999: null\n    hidden_size: ")
    assert problems(write(with_number)) == [
        ":3: model.config: expected a string, got inf",
        ":3: model.config.inf: unknown key inf: LlamaConfig does not have it",
    ]


def test_what_needs_no_torch_is_told_without_it(write: Write) -> None:
    text = GOOD.replace("source: english", "sorce: english").replace("2ba", "2bax\n  max_epochs: 3")
    text = text.replace("1e-3", "fast").replace("adamw", "adam\n  fused: 2").replace("hidden_", "hiden_")
    text += "  hang_timeout: {step: 5ba}\n  precision: bf16\n  gradient_clipping: {norm: high}\n"
    text += "callbacks: {ema: {half_lif: 10ba}, emma: {}}\ncheckpoints: {folder: here, intervl: 1ep}\n"
    text += "parallelism: {strategy: fsdp, mesh: {tp: x}}\nscheduler: {name: cosine, t_warmup: 5bax}\n"
    file = write(text + "loggers: {console: {interval: 0.5}}\nresume: {load_path: 3}\n")
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path\n"
        "from composer_dist.recipe.first_look.look import faults_at_once\n"
        "print(*faults_at_once(Path(sys.argv[1]), sys.argv[2:]), sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    overrides = ["sed=3", "optimizer.lrr=1", "optimizer.betas=[0.9, 1]", "checkpoints.keep=0"]
    told = subprocess.run([*command, file, *overrides], capture_output=True, text=True, check=True).stdout
    assert [line.removeprefix(str(file)) for line in told.splitlines()] == [
        ":5: model.config.hiden_size: unknown key 'hiden_size': LlamaConfig does not have it. Did you mean "
        "'hidden_size'?",
        ":6: data.source: 'source' is missing",
        ":8: data.sorce: unknown key 'sorce'. Did you mean 'source'?",
        "'optimizer.betas=[0.9, 1]': optimizer.betas.1: expected a number less than 1, got 1",
        "'optimizer.lrr=1': optimizer.lrr: unknown key 'lrr'. Did you mean 'lr'?",
        ":11: optimizer.fused: expected true or false, got 2",
        ":12: optimizer.lr: expected a number, got 'fast'",
        f":14: trainer.max_duration: '2bax' {NO_DURATION}",
        ":15: trainer.max_epochs: unknown key 'max_epochs'. Here it is trainer.max_duration, such as '3ep', "
        "'1000ba' or '2h'",
        ":16: trainer.hang_timeout: hang_timeout['step']='5ba' is not a positive time; write '60s', '1h30m' "
        "or a number of seconds",
        ":17: trainer.precision: expected 'fp32', 'amp_fp16', 'amp_bf16' or 'amp_fp8', got 'bf16'",
        ":18: trainer.gradient_clipping.norm: expected a number, got 'high'",
        ":19: callbacks.ema.half_life: 'half_life' is missing",
        ":19: callbacks.ema.half_lif: unknown key 'half_lif'. Did you mean 'half_life'?",
        f":19: callbacks.emma: There is no callback 'emma'. Did you mean 'ema'? Valid names: "
        f"{', '.join(CALLBACKS)}, or any class as package.module.Name or file.py:Name",
        "'checkpoints.keep=0': checkpoints.keep: expected a number greater than 0, got 0",
        ":20: checkpoints.intervl: unknown key 'intervl'. Did you mean 'interval'?",
        ":21: parallelism.mesh.tp: expected an integer, got 'x'",
        f":22: scheduler.t_warmup: '5bax' {NO_DURATION}",
        ":23: loggers.console.interval: expected a string or an integer, got 0.5",
        ":24: resume.load_path: expected a string, got 3",
        "'sed=3': sed: unknown key 'sed'. Did you mean 'seed'?",
    ]
    missing = subprocess.run([*command, file.parent / "other.yaml"], capture_output=True, text=True)
    text = "other.yaml: No such file or directory. 'composer-dist init' writes a configuration.\n"
    assert missing.stderr.endswith(f"ConfigurationError: {file.parent}/{text}")
    command += [write(GOOD), "parallelism=fsdpp"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert told == f"'parallelism=fsdpp': parallelism: {unknown_strategy('fsdpp', strategies.STRATEGIES)}"


def test_numbers_and_times_out_of_range_are_told_at_once(write: Write) -> None:
    text = GOOD + "checkpoints: {interval: 0ba}\nloggers: {console: {interval: 0ba}}\nscheduler:\n"
    text += "  {name: cosine, t_warmup: 0ba, t_max: 0ba}\n"
    text += "parallelism: {bucket_bytes: 0, ddp: {bucket_cap_mb: 0}}\n"
    text += "callbacks:\n  early_stopping: {monitor: loss/train/total, patience: 0, min_delta: -1}\n"
    text += "  ema: {half_life: 0ba, start: 0ba}\n  generate: {prompts: [a], batch_size: 0, interval: 0}\n"
    text += "  speed_monitor: {window_size: 0}\n  profiler: {active: 0, wait: -1}\n"
    told = [line.partition(": ")[2] for line in faults_at_once(write(text), [])]
    above, least = "expected a number greater than 0, got 0", "expected a number greater than or equal to 0"
    assert told == [
        "checkpoints.interval: interval must be positive, not '0ba'",
        "loggers.console.interval: interval must be positive, not '0ba'",
        "scheduler.t_max: t_max must be positive, not '0ba'",
        f"parallelism.ddp.bucket_cap_mb: {above}",
        f"parallelism.bucket_bytes: {above}",
        "callbacks.early_stopping.patience: expected a number greater than 0 or a string, got 0",
        f"callbacks.early_stopping.min_delta: {least}, got -1",
        "callbacks.ema.half_life: half_life must be positive, not '0ba'",
        "callbacks.generate.interval: interval must be positive, not '0ep'",
        f"callbacks.generate.batch_size: {above}",
        f"callbacks.speed_monitor.window_size: {above}",
        f"callbacks.profiler.wait: {least}, got -1",
        f"callbacks.profiler.active: {above}",
    ]
    assert faults_at_once(write(GOOD + "callbacks: {progress_bar: {interval: 0}}\n"), []) == []


def test_files_are_utf_8_whatever_the_locale_is(write: Write) -> None:
    file = write(GOOD + "# caf\u00e9\n")
    code = (
        "import sys; from pathlib import Path\n"
        "from composer_dist.recipe.first_look.look import faults_at_once\n"
        "print(faults_at_once(Path(sys.argv[1]), []))"
    )
    latin = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code, file], env=os.environ | latin, capture_output=True)
    assert done.stdout == b"[]\n", done.stderr


def test_only_a_run_needs_places_to_write_to(write: Write) -> None:
    file = write(GOOD)
    (told,) = faults_at_once(file, ["out=/proc/none"], files=True)
    assert "out=/proc/none cannot be written: /proc is not a folder to write to" in told
    assert faults_at_once(file, ["out=/proc/none"], files=True, writes=False) == []


def test_missing_files_are_told_at_once(write: Write, tmp_path: Path) -> None:
    def told(*overrides: str) -> list[str]:
        assert faults_at_once(file, overrides) == []
        return [line.partition(" (in ")[0] for line in faults_at_once(file, overrides, files=True)]

    file = write(GOOD)
    there, none = f"{file.parent}/*.yaml", f"{file.parent}/none.txt"
    assert told() == []
    assert told("trainer.hang_timeout=false", "parallelism={strategy: null}", "trainer.precision=FP32") == []
    (tmp_path / "rows[1]").mkdir()
    (tmp_path / "none.txt").write_bytes(b"\xff")
    assert told(f"data={{kind: chat, source: '{tmp_path}/rows[1]'}}") == []
    (unreadable,) = told(f"data={{kind: chat, source: {{dataset: x}}, chat_template: {none}}}")
    assert "none.txt cannot be read: 'utf-8' codec can't decode byte 0xff" in unreadable
    (tmp_path / "none.txt").unlink()
    assert told(f"data.source=[{there}, {none}]") == [
        f"'data.source=[{there}, {none}]': data.source: No file matches '{none}'"
    ]
    classes = f"data={{kind: labeled_text, classes: {{a: python, b: {none}}}}}"
    assert told("model.kind=sequence_classification", classes) == [
        f"'{classes}': data.classes.b: No file matches '{none}'"
    ]
    (nowhere,) = told("model.config=null", f"model.pretrained={tmp_path}/nowhere")
    assert f"model.pretrained: {tmp_path}/nowhere: there is no such directory" in nowhere
    (is_a_file,) = told(f"model.tokenizer={file}")
    assert is_a_file.endswith(f"model.tokenizer: {file} is a file: give the directory of the model")
    keys = ("out=", "checkpoints.folder=", "loggers.tensorboard.log_dir=", "loggers.file.path=")
    for key in (*keys, "callbacks.profiler.folder=", "phases.write_to="):
        (unwritable,) = told(f"{key}/dev/null/a/b")
        assert f"{key}/dev/null/a/b cannot be written: /dev/null is not a folder to write to" in unwritable
    chat = f"data={{kind: chat, source: {{dataset: x}}, evaluate: {none}, chat_template: none.jinja}}"
    assert told(chat) == [
        f"'{chat}': data.evaluate: No file matches '{none}'",
        f"'{chat}': data.chat_template: {tmp_path}/none.jinja does not exist, or is not a file",
    ]
    assert told(chat.replace("none.txt", "run.yaml").replace("none.jinja", "run.yaml")) == []


def test_a_missing_file_is_told_its_nearest_neighbor(tmp_path: Path) -> None:
    for name in ("pretrain.yaml", "lora.yaml"):
        (tmp_path / name).touch()
    for name, said in (("pretrian.yaml", f" Did you mean '{tmp_path}/pretrain.yaml'?"), ("nope.yaml", "")):
        with pytest.raises(ConfigurationError) as caught:
            read_configuration(tmp_path / name)
        text = f"{tmp_path}/{name}: No such file or directory.{said} 'composer-dist init' writes a"
        assert str(caught.value) == f"{text} configuration."


REPLACED = [
    ("model:\n  kind: causal_lm", "model:\n  kind: causal", ":2: model.kind: unknown kind 'causal'."),
    ("  kind: text\n", "", ":6: data: 'kind' is missing"),
    ("model_type: llama", "model_type: lama", "no model 'lama'. Did you mean 'llama'?"),
    ("model_type: llama", "model_type: [llama]", "transformers has no model ['llama']"),
    ("kind: text", "kind: [text]", ":7: data.kind: unknown kind"),
    ("kind: causal_lm", "kind: [causal_lm]", ":2: model.kind"),
    ("    model_type: llama\n", "", ":3: model.config: 'model_type' is missing"),
    ("name: adamw", "name: adamx", ":10: optimizer.name: There is no optimizer 'adamx'. Did you mean"),
    ("data:\n", "\tdata:\n", ":6: not valid YAML: "),
    ("  lr: 1e-3", "  lr: 1e-3\n  lr: 2e-3", ":12: optimizer.lr: duplicate key 'lr', first on line 11"),
    ("trainer:", "precision: amp_bf16\ntrainer:", ":12: precision: unknown key 'precision'."),
    ("max_duration: 2ba", "precision: bf16", ":13: trainer.precision: "),
    ("optimizer:", "resume: 3\noptimizer: 3\nscheduler:", ":10: optimizer: expected a mapping, got 3"),
]
"""Text, what replaces it, and what the message says."""
INSERTED = [
    ("parallelism: fsdb", ":6: parallelism: There is no strategy 'fsdb'; valid names:"),
    (
        "parallelism: {fsdp2: {reshard_after_foward: true}}",
        ":6: parallelism.fsdp2.reshard_after_foward: unknown key 'reshard_after_foward'. Did you mean "
        "'reshard_after_forward'?",
    ),
    (
        "parallelism:\n  mesh: {tp: 0}",
        ":7: parallelism.mesh: Mesh sizes must be positive, or -1 for 'the rest', but got tp=0",
    ),
    ("  adapter: {method: lora, rank: 8}", ":6: model.adapter.rank: unknown key 'rank'."),
    ("  adapter: {method: lorra}", ":6: model.adapter.method: peft has no method 'lorra'."),
    ("  quantize: nf4", ":1: model: quantize freezes the weights, so there must be"),
    ("  adapter: {method: [lora]}", ":6: model.adapter.method: expected a string, got ['lora']"),
    ("parallelism: {strategy: 5}", ":6: parallelism.strategy: expected a string, got 5"),
    ("callbacks: {.x: {}}", ":6: callbacks..x: "),
    ('"a\\e[2J": 1', ":6: a\\x1b[2J: unknown key"),
    ("  pretrained: x", ":1: model: give either config (a new model) or pretrained"),
    ("callbacks: {progres_bar: {}}", ":6: callbacks.progres_bar: There is no callback"),
    ("loggers: {console: {every: 1ba}}", ":6: loggers.console.every: unknown key 'every'."),
    ("callbacks:\n- lr_monitor", ":6: callbacks: expected a mapping, got"),
    ("callbacks: {ema: 3}", ":6: callbacks.ema: expected a mapping, got 3"),
    ("callbacks: {ema: {}}", ":6: callbacks.ema.half_life: 'half_life' is missing"),
    ("phases: {schedule: {}}", ":6: phases.schedule: A schedule needs at least one phase"),
    ("phases: {schedule: no.yaml}", ":6: phases.schedule: no.yaml: No such file"),
]
"""What stands after the model, and what the message says."""


@pytest.mark.parametrize(
    ("old", "new", "expected"), [*REPLACED, *(("data:", f"{new}\ndata:", told) for new, told in INSERTED)]
)
def test_what_is_wrong_is_said_where_it_is(write: Write, old: str, new: str, expected: str) -> None:
    told = problems(write(GOOD.replace(old, new, 1)))
    assert any(expected in line for line in told), told


def test_every_phase_has_its_line(write: Write) -> None:
    phases = """\
phases:
  no_decay: head
  schedule:
  - params: head
    lr: -1
  - params: body
    untill: 2ep
  - params: rest
"""
    assert problems(write(GOOD + phases)) == [
        ":17: phases.schedule.0: lr is a positive number, not -1.0",
        ":20: phases.schedule.1.untill: unknown key 'untill'. Did you mean 'until'?",
    ]
    assert problems(write(GOOD + phases), "phases.schedule.0.lr=1", "phases.schedule.1={params: body}") == [
        ":16: phases.schedule: phase 0 has no 'until', so phase 1 would never begin. "
        "phase 1 has no 'until', so phase 2 would never begin"
    ]


def test_what_has_no_arguments_is_named_alone(write: Write) -> None:
    text = GOOD.replace("optimizer:\n  name: adamw\n  lr: 1e-3", "optimizer: adamw")
    assert read_configuration(write(text)).run.optimizer.name == "adamw"
    assert problems(write(text + "scheduler: one_cycle\n")) == [":12: scheduler.max_lr: 'max_lr' is missing"]


def test_overrides_are_read_as_yaml_and_named_as_the_place_of_what_is_wrong(write: Write) -> None:
    file = write(GOOD)
    overrides = ["optimizer.lr=2e-4", "data.source=[a.txt, b.txt]", "out=elsewhere", "resume=false"]
    run = read_configuration(file, overrides).run
    assert run.optimizer.arguments == {"lr": 2e-4}
    assert (run.out, run.resume) == (Path("elsewhere"), False)
    assert run.data == TextData(kind="text", source=["a.txt", "b.txt"])
    assert problems(file, "seed=x", "optimizer.betas=[0.9]") == [
        "'optimizer.betas=[0.9]': optimizer.betas.1: missing, the list is too short",
        "'seed=x': seed: expected an integer, got 'x'",
    ]
    (wrong,) = problems(file, "data.source=[a]", "data.source.\u00b2=b")
    assert wrong.endswith("data.source is a list of 1 and has no entry '\u00b2'")
    assert problems(file, "optimizer.lr=fast", "seed", "model.kind.x=1", "seed={a: 1, a: 2}") == [
        "'optimizer.lr=fast': optimizer.lr: expected a number, got 'fast'",
        "command line: 'seed' is not an override: expected key=value, as in optimizer.lr=1e-3",
        "command line: 'model.kind.x=1': model.kind is 'causal_lm', which has no keys; "
        "replace all of it: model.kind='{x: ...}'",
        "command line: 'seed={a: 1, a: 2}': duplicate key 'a', first on line 1",
    ]


@pytest.mark.parametrize(
    "typed", ["checkpoints.overwrite=no", "resume=off", "optimizer.amsgrad=no", "trainer.deterministic=off"]
)
def test_no_and_off_are_strings_and_not_false(write: Write, typed: str) -> None:
    key, _, value = typed.partition("=")
    assert problems(write(GOOD), typed) == [f"{typed!r}: {key}: expected true or false, got {value!r}"]
    (told,) = faults_at_once(write(GOOD), [typed])
    assert told.endswith(f"expected true or false, got {value!r}")


def test_numbers_get_the_type_that_is_expected(write: Write) -> None:
    run = read_configuration(
        write(GOOD),
        ["optimizer.betas=[0, 0.9]", "callbacks={speed_monitor: {window_size: 20.0}}", "seed=3.0"],
    ).run
    betas, size = run.optimizer.arguments["betas"], run.callbacks["speed_monitor"]["window_size"]
    assert [type(one) for one in (*betas, size, run.seed)] == [float, float, int, int]
    assert (betas, size, run.seed) == ([0.0, 0.9], 20, 3)
    assert problems(write(GOOD), "optimizer.betas=[0, 0.5, 0.9]") == [
        "'optimizer.betas=[0, 0.5, 0.9]': optimizer.betas: expected at most 2 values, got [0, 0.5, 0.9]"
    ]


def test_what_transformers_takes_beside_the_fields_of_a_config(write: Write) -> None:
    eager = read_configuration(write(GOOD), ["model.config.attn_implementation=eager"]).run.model
    assert isinstance(eager, HubModel)
    assert eager.config == {"model_type": "llama", "hidden_size": 32, "attn_implementation": "eager"}
    for key in ("dtype", "torch_dtype"):
        typed = f"model.config.{key}=bfloat16"
        assert problems(write(GOOD), typed) == [
            f"{typed!r}: model.config.{key}: the dtype of the weights is model.dtype here"
        ]


@pytest.mark.parametrize("classes", ["{}", "{a: english}"])
def test_labeled_texts_have_several_classes(write: Write, classes: str) -> None:
    typed = f"data={{kind: labeled_text, classes: {classes}}}"
    (told,) = faults_at_once(write(GOOD), [typed, "model.kind=sequence_classification"])
    (kind,) = faults_at_once(write(GOOD), ["data.kind=txt"])
    assert kind.startswith("'data.kind=txt': data.kind: unknown kind 'txt'. Did you mean 'text'?")
    count = classes.count(":")
    assert told.startswith(f"{typed!r}: data.classes: expected at least two classes, got {count}")


def test_an_override_of_one_place_leaves_others_of_the_same_alias_alone(write: Write) -> None:
    text = GOOD + "callbacks: {early_stopping: &watch {monitor: loss, mode: min}}\ncheckpoints: *watch\n"
    run = read_configuration(write(text), ["checkpoints.interval=2ba", "checkpoints.mode=max"]).run
    assert run.callbacks == {"early_stopping": {"monitor": "loss", "mode": "min"}}
    assert run.checkpoints == {"monitor": "loss", "mode": "max", "interval": "2ba"}


def test_kinds_that_do_not_fit_are_told_at_once(write: Write) -> None:
    file = write(GOOD)
    (told,) = faults_at_once(file, ["model.kind=seq2seq_lm"])
    assert told == f"{file}:7: data.kind: a model of kind seq2seq_lm needs data of kind table or function"
    typed = "model.metrics={accuracy: null}"
    said = "a model of kind causal_lm has no accuracy; it has perplexity and token_accuracy"
    assert faults_at_once(file, [typed]) == [f"{typed!r}: model.metrics.accuracy: {said}"]
    assert problems(file, typed) == faults_at_once(file, [typed])


def test_what_callbacks_refuse_is_told_with_its_lines(write: Write) -> None:
    text = GOOD + "callbacks:\n  ema: {half_life: 1dur}\n  generate: {prompts: []}\n"
    file = write(text + "checkpoints: {mode: min}\n")
    with pytest.raises(ConfigurationError) as caught:
        callbacks_of(
            read_configuration(file, ["phases={schedule: [{params: rest, until: 2ba}], no_decay: []}"])
        )
    assert [line.removeprefix(str(file)) for line in str(caught.value).splitlines()] == [
        ":15: callbacks.ema: EMA's half_life must be positive, and not in 'dur': '1dur'",
        ":16: callbacks.generate: Generate needs at least one prompt and a positive batch_size, not [] and "
        "None",
        ":17: checkpoints: mode and save_top_k need a monitor, such as 'loss/eval/total'",
    ]


def test_an_override_beside_a_name_keeps_the_name(write: Write) -> None:
    text = GOOD.replace("optimizer:\n  name: adamw\n  lr: 1e-3\n", "optimizer: sgd\nparallelism: ddp\n")
    overrides = [
        "optimizer.lr=0.1",
        "parallelism.ddp.bucket_cap_mb=3",
        "scheduler=cosine",
        "scheduler.alpha_f=0",
    ]
    read = read_configuration(write(text), overrides)
    assert (read.run.optimizer.name, read.run.optimizer.arguments) == ("sgd", {"lr": 0.1})
    assert read.parallelism == resolve_config({"strategy": "ddp", "ddp": {"bucket_cap_mb": 3}})
    assert read.run.scheduler is not None
    assert (read.run.scheduler.name, read.run.scheduler.arguments) == ("cosine", {"alpha_f": 0.0})


def test_an_override_finds_a_key_that_is_a_number(write: Write) -> None:
    text = GOOD + "phases: {schedule: {0: {params: a, until: 2ba}, 1: {params: rest}}}\n"
    run = read_configuration(write(text), ["phases.schedule.1.lr=1e-4"]).run
    assert run.phases == {"schedule": {0: {"params": "a", "until": "2ba"}, 1: {"params": "rest", "lr": 1e-4}}}


def test_out_is_a_path_and_may_be_in_the_home_folder(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read_configuration(write(GOOD), ["out=~/runs"]).run.out == Path("/home/somebody/runs")
    assert problems(write(GOOD), "out=5") == ["'out=5': out: expected a path, got 5"]


@pytest.mark.promise(102)
def test_a_strategy_is_named_in_the_file_or_on_the_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "_strategies", dict(strategies._strategies))
    file = write(GOOD + "parallelism: ddp\n")
    assert read_configuration(file).parallelism == strategy_named("ddp")
    unused = "ddp_spawn_find_unused_parameters_true"
    assert read_configuration(file, [f"parallelism={unused}"]).parallelism == strategy_named(unused)
    named = read_configuration(file, ["parallelism={strategy: fsdp, activation_checkpointing: true}"])
    assert isinstance(named.parallelism, ParallelismConfig)
    assert named.parallelism.activation_checkpointing is True
    register_strategy("two_by_two", {"mesh": {"dp_replicate": 2, "dp_shard": 2}})
    assert read_configuration(file, ["parallelism=two_by_two"]).parallelism.mesh.sizes()["dp_replicate"] == 2
    with pytest.raises(ConfigurationError, match="valid names: ddp, ddp_find_unused.*, tp, two_by_two"):
        read_configuration(file, ["parallelism=zero3"])


def test_an_unknown_strategy_is_told_at_once_unless_code_may_register_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "_strategies", dict(strategies._strategies))
    file = write(GOOD)
    for typed, place in (("parallelism=fsdpp", ""), ("parallelism={strategy: fsdpp}", ".strategy")):
        (told,) = faults_at_once(file, [typed])
        assert told == problems(file, typed)[0]
        assert told.startswith(
            f"{typed!r}: parallelism{place}: There is no strategy 'fsdpp'; valid names: ddp"
        )
        assert told.endswith("tp. Did you mean 'fsdp'?")
    assert faults_at_once(file, ["parallelism=FSDP"])[0].endswith("Did you mean 'fsdp'?")
    register_strategy("of_this_process", "fsdp")
    assert faults_at_once(file, ["parallelism=of_this_process"]) == []
    odd = ("data.collate=[a]", "optimizer.name=[a]", "callbacks=[a]", "model=3", "extra={name: a.b}")
    for typed in odd:
        assert any("fsdpp" in one for one in faults_at_once(file, ["parallelism=fsdpp", typed]))
    for code in (
        "callbacks={mine.py:Shown: {}}",
        "callbacks={of_a_package: {}}",
        "optimizer.name=mine.Adam",
        "model.metrics={mine.py:Metric: {}}",
        "data.collate=mine.py:collate",
    ):
        assert not any("strategy" in one for one in faults_at_once(file, ["parallelism=fsdpp", code]))


def test_functions_and_modules_of_a_file_beside_the_configuration(write: Write, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef data(size: int = 3): return [(torch.zeros(2), 0)] * size\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, width: int): super().__init__(width, 2)\n"
    )
    text = """\
model: {kind: module, name: "mine.py:Net", arguments: {width: 2}}
data: {kind: function, name: "mine.py:data"}
trainer: {max_duration: 1ba}
"""
    read_configuration(write(text))
    assert problems(write(text.replace("width", "with"))) == [
        ":1: model.arguments.width: 'width' is missing",
        ":1: model.arguments.with: unknown key 'with'. Did you mean 'width'?",
    ]
    assert problems(write(text.replace("mine.py:data", "mine.py:dada"))) == [
        ":2: data.name: mine.py has no 'dada'. Did you mean 'data'?"
    ]


def test_what_is_left_empty_or_short_is_accepted(write: Write) -> None:
    text = f"{GOOD}callbacks:\n  # ema: {{}}\nloggers: null\nscheduler: cosine\n"
    run = read_configuration(write(text), ["model.config.num_labels=3"]).run
    assert (run.callbacks, run.loggers) == ({}, {})
    assert run.scheduler is not None
    assert run.scheduler.arguments == {}


def test_a_url_is_for_checkpoints(write: Write) -> None:
    assert problems(write(GOOD), "out=memory://x") == [
        "'out=memory://x': out: memory://x is a URL, but out is a local folder; checkpoints.folder may be "
        "a URL"
    ]
    run = read_configuration(write(GOOD), ["checkpoints.folder=memory://x"]).run
    assert run.checkpoints == {"folder": "memory://x"}


FUNCTIONS = """\
from datasets import Dataset
rows = Dataset.from_dict({"x": [[float(n), 1.0] for n in range(6)], "y": [0, 1] * 3})
def lists(): return rows, rows
def stream(): return rows.to_iterable_dataset()
def pairs(rows): return [(row["x"], row["y"]) for row in rows]
def sizes(samples): return len(samples)
"""


def test_data_of_functions(write: Write, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    text = GOOD.replace("causal_lm", "module").partition("data:")[0].partition("  config")[0]
    text += "  name: torch.nn.Linear\n  arguments: {in_features: 2, out_features: 2}\n"
    text += "data: {kind: function, name: mine.py:lists, batch_size: 4}\ntrainer: {max_duration: 1ba}\n"

    def batches(*overrides: str) -> list[Any]:
        read = read_configuration(write(text), overrides)
        train, _ = datasets(read.run, None, tmp_path)
        return list(loader(train, read, None, training=True).placed(1, 0))

    (batch,) = batches()
    assert (batch["x"].shape, batch["y"].dtype) == ((4, 2), torch.int64)
    (streamed,) = batches("data.name=mine.py:stream")
    assert streamed["x"][:, 0].tolist() == [0, 1, 2, 3]
    assert batches("data.collate=mine.py:sizes") == [4]
    told = problems(write(text), "data.collate=mine.py:size")
    assert told == ["'data.collate=mine.py:size': data.collate: mine.py has no 'size'. Did you mean 'sizes'?"]


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file.*composer-dist init"):
        read_configuration(tmp_path / "none.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")  # as <(cat run.yaml) gives one; reading it would wait here
    with pytest.raises(ConfigurationError, match="pipe.yaml is a pipe.*Use a file"):
        read_configuration(tmp_path / "pipe.yaml")


def test_reading_leaves_the_random_state_alone(write: Write) -> None:
    before = torch.get_rng_state()
    read_configuration(write(GOOD))
    assert torch.equal(before, torch.get_rng_state())


def test_an_error_of_the_run_is_blamed_on_the_override_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document({}, "run.yaml")
    assert override(document, ["data.source=/nowhere/*.txt", "model.config.width=3", "out=there"]) == []
    for text, expected in (
        ("No file matches '/nowhere/*.txt'", "'data.source=/nowhere/*.txt'"),
        ("model.config.width is 3", "'model.config.width=3'"),
        ("model.config.widths is 3, without", "run.yaml"),
    ):
        monkeypatch.setattr(users_code, "is_users_file", lambda file: False)
        with pytest.raises(ConfigurationError) as error, blamed_on(document):
            raise ParallelismValueError(text)
        assert str(error.value) == f"{expected}: {text}"
    monkeypatch.undo()
    with pytest.raises(ParallelismKeyError, match="^of the users code$"), blamed_on(document):
        raise ParallelismKeyError("of the users code")


@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        ("import torch\nimport nosuchmodule\n", ModuleNotFoundError, 2),
        ("import torch\nfrom torch import nosuchname\n", ImportError, 2),
        ("import torch\n\nraise KeyError('a')\n", KeyError, 3),
        ("import torch\nif\n", SyntaxError, 2),
    ],
)
def test_a_file_that_cannot_be_imported_fails_as_the_users_code(
    tmp_path: Path, write: Write, code: str, kind: type[Exception], line: int
) -> None:
    (tmp_path / "mine.py").write_text(code)
    file = write(GOOD + "callbacks: {'mine.py:Mine': {}}\n")
    for read in (lambda: resolve("mine.py:Net", tmp_path), lambda: read_configuration(file)):
        with pytest.raises(kind) as error:
            read()
        assert error.type is kind
        last = users_code.users_frames(error.value)[-1]
        assert (last.filename, last.lineno) == (str(tmp_path / "mine.py"), line)


def test_a_module_that_lies_beside_the_configuration_is_named_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "nets.py").touch()
    told = rf"'mine'\. Write mine/nets\.py:\.\.\. for the file in {tmp_path}\."
    with pytest.raises(ParallelismValueError, match=told):
        resolve("mine.nets.Net", tmp_path)


def test_a_callback_for_checkpoints_is_a_section_here(tmp_path: Path) -> None:
    for name in ("checkpoint", "CheckpointSaver", "model_checkpoint"):
        with pytest.raises(ParallelismValueError, match="Did you mean 'checkpoints:' at the top of the file"):
            find("callback", CALLBACKS, name, tmp_path)


def test_a_module_without_num_classes_is_told_the_key(tmp_path: Path) -> None:
    section = ModuleModel(kind="module", name="torch.nn.Identity")
    with pytest.raises(ParallelismValueError, match=r"its accuracy needs model\.num_classes"):
        _module(section, tmp_path)


@pytest.mark.promise(131)
def test_installed_packages_give_short_names(tmp_path: Path, monkeypatch: Any, write: Write) -> None:
    package = tmp_path / "installed"
    (package / "stranger-1.0.dist-info").mkdir(parents=True)
    (package / "stranger-1.0.dist-info" / "METADATA").write_text("Name: stranger\nVersion: 1.0\n")
    (package / "stranger-1.0.dist-info" / "entry_points.txt").write_text(
        "[composer_dist.callbacks]\nslack = stranger:Slack\nema = stranger:Slack\n"
        "[composer_dist.loggers]\naim = stranger:Aim\n"
    )
    (package / "stranger.py").write_text(
        "from composer_dist.trainer import Callback, LoggerDestination\n"
        "class Slack(Callback):\n    def __init__(self, channel: str) -> None: self.channel = channel\n"
        "class Aim(LoggerDestination): pass\n"
    )
    monkeypatch.syspath_prepend(package)
    run = read_configuration(write(GOOD + "callbacks: {slack: {channel: runs}}\nloggers: {aim: {}}\n"))
    (slack,) = (one for one in callbacks_of(run) if type(one).__name__ == "Slack")
    assert slack.channel == "runs"
    assert [type(one).__name__ for one in loggers_of(run)] == ["Aim"]
    assert find("callback", CALLBACKS, "ema", tmp_path).__name__ == "EMA"
    with pytest.raises(ParallelismError, match=r"run\.yaml:14: callbacks\.slack.*chanel"):
        read_configuration(write(GOOD + "callbacks: {slack: {chanel: runs}}\n"))
    with pytest.raises(ParallelismValueError, match="Did you mean 'slack'"):
        find("callback", CALLBACKS, "slak", tmp_path)
