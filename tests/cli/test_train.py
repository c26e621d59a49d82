"""`composer-dist train` as its user sees it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS
from composer_dist.cli.train import refuse_at_once
from tests.kit.world import World

pytestmark = pytest.mark.promise(109)

MINE = """\
model: {kind: module, name: "mine.py:Net", arguments: {}, num_classes: 2}
data: {kind: function, name: "mine.py:data", batch_size: 4}
trainer: {max_duration: 1ba}
"""
CODE = """\
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

def data():
    return [(torch.zeros(3), torch.tensor(0))] * 8
"""


def call(*arguments: object, debug: bool = False) -> tuple[int, str, str]:
    command = [*(["--debug"] if debug else []), "train", *map(str, arguments)]
    result = CliRunner().invoke(app, command, prog_name="composer-dist")
    return result.exit_code, result.stdout, result.stderr


def test_a_dry_run_prints_the_plan_for_any_number_of_ranks_and_starts_none(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--dry-run", "-n", 64, f"out={out}", "data.batch_size=64"]
    status, printed, _ = call(PRESETS / "lora.yaml", *options)
    assert status == 0
    for words in ("Plan for 64 ranks (dp_shard 64)", "64, 1 on each rank", "of which", "LlamaDecoderLayer"):
        assert words in printed
    assert not out.exists()


def test_a_dry_run_of_an_adapter_that_keeps_tensors_on_meta(tmp_path: Path) -> None:
    """The tokens of peft's prompts are no buffer, so a copy of the model cannot take a step."""
    adapter = "model.adapter={method: p_tuning, num_virtual_tokens: 4}"
    status, printed, told = call(PRESETS / "lora.yaml", "--dry-run", adapter, f"out={tmp_path}/out")
    assert status == 0, told
    assert "of which 111,936 train" in printed


@pytest.mark.promise(102)
def test_a_dry_run_with_a_strategy_by_name() -> None:
    _, printed, _ = call(PRESETS / "vision.yaml", "--dry-run", "-n", 4, "parallelism=ddp_spawn")
    assert "Plan for 4 ranks (dp_replicate 4)" in printed
    status, _, told = call(PRESETS / "vision.yaml", "--dry-run", "parallelism=ddq")
    assert status == 2
    assert "There is no strategy 'ddq'; valid names: ddp," in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["-n", 2, "data.batch_size=1"],
            "global_batch_size=1 (in YAML data.batch_size) leaves some of the 2",
        ),
        (["-n", 64], "global_batch_size=32 (in YAML data.batch_size) leaves some of the 64"),
        (["-n", 2, "parallelism=null"], "2 ranks need parallelism: set it to fsdp"),
        (["callbacks={generate: {prompts: []}}"], "Generate needs at least one prompt"),
        (["trainer.max_duration=0ba"], "max_duration"),
        (["trainer.gradient_clipping=-1"], "expected a number greater than 0 or a mapping, got -1"),
        (["trainer.device_train_microbatch_size=0"], "a positive number of samples, 'auto' or None, not 0"),
        (["resume={load_path: /not/there}"], "There is no checkpoint /not/there"),
        (["resume={autoresume: true}", "checkpoints=null"], "autoresume needs a CheckpointSaver"),
        (["trainer.device=cuda:99"], "Device 'cuda:99' was asked for, but this machine offers"),
        (["parallelism={mesh: {device_type: xla}}"], "Device 'xla' was asked for"),
        (["trainer.device=tpu"], "torch has no device 'tpu'"),
        (["trainer.compile=true"], "Pass ParallelismConfig(compile=...) instead"),
        (["trainer.max_duration=0.5dur"], "max_duration='0.5dur' is a share of max_duration itself"),
        (["trainer.max_duration=100tok"], "the batches have none: no mapping with 'input_ids'"),
        (["trainer.eval_interval=100tok"], "the batches have none"),
        (["scheduler={name: cosine, t_warmup: 5ba, t_max: 9tok}"], "compares '9tok' with a time in"),
        (
            ["scheduler={name: one_cycle, max_lr: 1, total_steps: 2}"],
            "scheduler.total_steps is 2, but the run has",
        ),
        (
            ["scheduler={name: one_cycle, max_lr: 1, pct_start: 0.25}", "trainer.max_duration=4ba"],
            "scheduler 'one_cycle' with max_lr=1.0, pct_start=0.25, total_steps=4: float division by zero",
        ),
        (["scheduler={name: torch.optim.lr_scheduler.StepLR, step_size: 0}"], "scheduler: integer modulo"),
        (["scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"], "needs a metric at each step"),
        (["scheduler=torch.zeros"], "cannot be called with arguments by name"),
        (["scheduler=torch.pi"], "is not a function or a class"),
        (["callbacks={torch.nn.ReLU: {}}"], "callbacks takes a Callback"),
        (["callbacks={generate: {prompts: [a]}}"], "Generate needs a HuggingFaceModel"),
        (["callbacks={early_stopping: {monitor: loss/val/total}}"], "Did you mean 'loss/eval/total'? Logged"),
        (["loggers={torch.nn.ReLU: {}}"], "loggers takes a LoggerDestination"),
        (["loggers={console: {interval: 0ba}}"], "loggers.console.interval: interval must be positive"),
        (["loggers={wandb: {mode: no}}"], "expected 'online', 'offline' or 'disabled'"),
        (["out=/proc/a"], "out=/proc/a cannot be written: /proc is not a folder to write to"),
        (["loggers={file: {path: /dev/null/a}}"], "loggers.file.path=/dev/null/a cannot be written"),
        (["checkpoints={folder: /dev/null/a}"], "checkpoints.folder=/dev/null/a cannot be written"),
        (["checkpoints={folder: nope://a}"], "nope://a cannot be reached"),
        (["checkpoints={filename: 'a/{batch}'}"], "filename='a/0' must be a name in the folder"),
        (["checkpoints={latest: ../a}"], "latest='../a' must be a name in the folder"),
        (["export=merged"], "there is no model.adapter"),
        (["data.workers=100000"], "data.workers"),
        (["seed=99999999999999999999"], "seed"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(options: list[object], text: str) -> None:
    status, _, told = call(PRESETS / "vision.yaml", "--dry-run", *options)
    assert status == 2
    assert text in told


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_world_size_that_is_no_number(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    status, _, told = call(PRESETS / "vision.yaml", *options)
    assert status == 1
    assert "The environment variable WORLD_SIZE is 'two', but must be a number." in told


def test_ranks_of_a_launcher_find_missing_data_together(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = PRESETS / "pretrain.yaml", ["data.source=none.txt"]
    with pytest.raises(typer.Exit):
        refuse_at_once(*missing)
    monkeypatch.setenv("RANK", "1")  # of another host, say, which may have the file
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_at_once(*missing)


@pytest.mark.parametrize(("rank", "tells"), [("0", True), ("00", True), ("x", True), ("1", False)])
def test_one_rank_says_what_all_find(monkeypatch: pytest.MonkeyPatch, rank: str, tells: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, told = call("none.yaml")
    assert (status, "none.yaml: No such file" in told) == (2, tells)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("optimizer.lr=nan", "optimizer.lr: expected a number greater than or equal to 0, got 'nan'"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a number greater than or equal to 0, got nan"),
        ("optimizer.lr='1e-3'", "optimizer.lr: expected a number, got '1e-3'"),
        ("optimizer.lr=true", "optimizer.lr: expected a number, got True"),
        ("optimizer.betas=[0.9, .inf]", "optimizer.betas.1: expected a number less than 1, got inf"),
        ("trainer.gradient_clipping={norm: true}", "gradient_clipping.norm: expected a number, got True"),
        ("trainer.max_duration=true", "trainer.max_duration: expected a number, got True"),
        ("model.num_classes=3", "model.num_classes is not the number of the module's outputs"),
        ("optimizer.capturable=true", "fails in the optimizer's step: If capturable=True"),
        ("loggers={wandb: {mode: online}}", "loggers.wandb: wandb has no key. Run `wandb login`"),
        ("loggers={wandb: {mode: offline, nam: x}}", "unknown key 'nam'. Did you mean 'name'?"),
        ("checkpoints={filename: '{batch'}", "filename='{batch': expected '}' before end of string"),
        ("scheduler={name: torch.optim.lr_scheduler.StepLR, step_size: 0}", "scheduler: integer modulo"),
        ("trainer.eval_interval=100tok", "the batches have none: no mapping with 'input_ids'"),
    ],
)
def test_a_run_refuses_it_with_the_status_of_a_dry_run(tmp_path: Path, option: str, text: str) -> None:
    for dry in (["--dry-run"], []):
        status, _, told = call(PRESETS / "vision.yaml", *dry, f"out={tmp_path / 'out'}", option)
        assert (status, text in told) == (2, True)


def test_data_that_differ_from_the_checkpoints_are_refused_with_the_status_of_a_dry_run(
    tmp_path: Path,
) -> None:
    run = [
        PRESETS / "vision.yaml",
        f"out={tmp_path}",
        "checkpoints.interval=1ba",
        "trainer.eval_interval=null",
    ]
    assert call(*run, "trainer.max_duration=1ba")[0] == 0
    for dry in (["--dry-run"], []):
        status, _, told = call(*dry, *run, "trainer.max_duration=2ba", "seed=3")
        assert (status, "differ from the checkpoint's (seed was 17, is now 3)" in told) == (2, True), told
        assert told.endswith("restart the epoch with load_ignore_keys=['data'] (in YAML resume: "
                             "{load_ignore_keys: [data]}).\n")  # fmt: skip


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_dry_run_refuses_a_logger_without_its_package(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, told = call(PRESETS / "vision.yaml", "--dry-run", f"loggers={{{package}: {{}}}}")
    assert (status, f"pip install 'composer_dist[{package}]'" in told) == (2, True), told


@pytest.mark.filterwarnings("ignore:Skipping")
def test_a_dry_run_looks_into_the_checkpoints_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(
        CODE.replace("(self)", "(self, width=3)")
        .replace("(3, 2)", "(width, 2)")
        .replace("data()", "data(width=3)")
        .replace("zeros(3)", "zeros(width)")
    )
    run = [tmp_path / "mine.yaml", f"out={tmp_path / 'out'}", "scheduler={name: one_cycle, max_lr: 1}"]
    assert call(*run)[0] == 0
    assert call(*run, "--dry-run")[0] == 0
    shapes = ["model.arguments.width=4", "data.arguments={width: 4}"]
    other = ["optimizer={name: sgd, momentum: 0.9, lr: 0.1}"]
    longer = ["trainer.max_duration=2ba"]
    missing = [f"out={tmp_path / 'new'}", "resume={load_path: nowhere}"]
    for options, text in (
        (missing, f"resume.load_path: There is no checkpoint {Path('nowhere').absolute()}.\n"),
        (shapes, "model.module.weight is (2, 3) in the checkpoint, (2, 4) in the model"),
        (other, "is AdamW, and this run's is SGD, which cannot use its state"),
        (longer, "The run was started for 1 batches, and OneCycleLR cannot go further"),
        (["resume=false"], "has checkpoints of an earlier run"),
    ):
        status, _, told = call(*run, "--dry-run", *options)
        assert (status, text in told) == (2, True), told
    for part in (tmp_path / "out" / "checkpoints" / "ep0-ba1").glob("__*"):
        part.write_bytes(part.read_bytes()[:-1])
    status, _, told = call(*run, "--dry-run")
    assert (status, "All checkpoints in" in told) == (2, True), told
    assert (tmp_path / "out" / "checkpoints" / "ep0-ba1").is_dir(), "nothing was renamed"


def test_a_schedule_that_steps_after_each_epoch_has_as_many_steps(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(CODE)
    cosine = "scheduler={name: torch.optim.lr_scheduler.CosineAnnealingLR}"
    run = [tmp_path / "mine.yaml", f"out={tmp_path / 'out'}", cosine, "optimizer={name: sgd, lr: 1.0}"]
    run += ["trainer.max_duration=2ep", "trainer.step_schedulers_every_batch=false"]
    assert call(*run, "callbacks={lr_monitor: {}}", "loggers={file: {interval: 1ba}}")[0] == 0
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    rates = [value for line in lines for key, value in line.items() if key.startswith("lr-")]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.5])
    once = "scheduler={name: one_cycle, max_lr: 1, total_steps: 2}"
    assert call(*run, once, "--dry-run", f"out={tmp_path / 'new'}")[0] == 0


def test_a_metric_that_a_callback_of_the_user_may_log_is_looked_for_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    mine = CODE + "from composer_dist.trainer import Callback\nclass Mine(Callback):\n    pass\n"
    (tmp_path / "mine.py").write_text(mine)
    options = [
        "callbacks={early_stopping: {monitor: mine/loss}, 'mine.py:Mine': {}}",
        f"out={tmp_path / 'out'}",
    ]
    assert call(tmp_path / "mine.yaml", "--dry-run", *options)[0] == 0
    status, _, told = call(tmp_path / "mine.yaml", *options)
    assert (status, "EarlyStopping: there is no metric 'mine/loss'" in told) == (2, True), told


def test_a_new_model_without_parallelism_has_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(CODE)
    for name, parallelism in (("none", "null"), ("fsdp", "fsdp")):
        options = [f"out={tmp_path / name}", f"parallelism={parallelism}"]
        assert call(tmp_path / "mine.yaml", *options)[0] == 0
    alone, sharded = (torch.load(tmp_path / name / "model.pt") for name in ("none", "fsdp"))
    torch.testing.assert_close(alone, sharded, rtol=0, atol=0)


def test_a_dry_run_of_tensor_parallelism_has_all_ranks_on_one_host() -> None:
    options = ["--dry-run", "-n", 2, "parallelism=tp", "model.config.num_hidden_layers=1"]
    status, printed, told = call(PRESETS / "pretrain.yaml", *options)
    assert (status, "Plan for 2 ranks (tp 2)" in printed) == (0, True), told
    assert "LOCAL_WORLD_SIZE" not in os.environ


PHASES = """\
phases:
  no_decay: re:.*bais
  schedule:
  - {params: module.layers.6, until: 1ep}
  - params: [module.layer.2, "re:.*weight"]
    until: 2ep
  - params: rest
"""


def test_phases_that_do_not_fit_the_model_are_told_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert CliRunner().invoke(app, ["init", "vision", str(file)]).exit_code == 0
    file.write_text(file.read_text() + PHASES)
    first = file.read_text().splitlines().index("phases:") + 1
    expected = [
        f"{file}:{first + 1}: phases.no_decay: 're:.*bais' matches no parameter, and no module that has any",
        f"{file}:{first + 4}: phases.schedule.1.params.0: 'module.layer.2' matches no parameter, and no "
        "module that has any. Did you mean 'module.layers.2'?",
        f"{file}:{first + 4}: phases.schedule.1.params: phases 0 and 1 both name module.layers.6.weight. "
        "Phases add to each other: name a parameter in the first one that trains it, and 'rest' for "
        "everything else",
    ]
    for dry in (["--dry-run"], []):
        status, _, told = call(file, *dry, f"out={tmp_path / 'out'}")
        assert (status, told.splitlines()[-3:]) == (2, expected)
    (tmp_path / "phases.yaml").write_text("- {params: module.layers.7, until: 1ep}\n- params: rest\n")
    fixed = "phases.no_decay=re:.*bias"
    _, _, told = call(file, "--dry-run", fixed, f"phases.schedule={tmp_path / 'phases.yaml'}")
    where = f"/phases.yaml': phases.schedule: {tmp_path}/phases.yaml: "
    assert f"{where}phase 0: 'module.layers.7' matches" in told
    status, printed, _ = call(file, "--dry-run", fixed, "phases.schedule.1.params=module.layers.2")
    assert status == 0
    for words in ("phase 0 adds", "5,130, for 1ep", "4,640, for 2ep", "160, to the end"):
        assert words in printed


def test_wrong_input_has_status_2_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE.replace("trainer", "trainr"))
    status, _, told = call(file)
    assert status == 2
    assert told.splitlines()[-4:] == [  # first what is known without torch
        f"{file}:3: trainr: unknown key 'trainr'. Did you mean 'trainer'?",
        f"{file}: trainer: 'trainer' is missing",
        f"{file}:1: model.name: There is no file {tmp_path / 'mine.py'}",
        f"{file}:2: data.name: There is no file {tmp_path / 'mine.py'}",
    ]


def test_errors_of_the_users_own_code_show_where_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(CODE.replace("return [", "return 1 / 0 or ["))
    status, _, told = call(tmp_path / "mine.yaml", f"out={tmp_path / 'out'}")
    assert status == 1
    assert 'mine.py", line 8, in data' in told
    assert told.endswith("composer-dist train: ZeroDivisionError: division by zero\n")
    assert "composer_dist/" not in told
    _, _, told = call(tmp_path / "mine.yaml", f"out={tmp_path / 'out'}", debug=True)
    assert "composer_dist/recipe/data.py" in told


def test_an_error_of_the_users_forward_has_its_class(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(
        CODE.replace("def data", "    def forward(self, x):\n        return {}['oops']\n\ndef data")
    )
    status, _, told = call(tmp_path / "mine.yaml", "--dry-run")
    assert status == 1
    assert 'mine.py", line 8, in forward' in told
    assert told.endswith("fails in the forward: KeyError: 'oops'\n"), told


@pytest.mark.parametrize(("kind", "said"), [("KeyError", "KeyError: 'a'"), ("ValueError", "ValueError: a")])
def test_an_error_of_the_users_own_code_fails_all_ranks_alike(
    world2: World, tmp_path: Path, kind: str, said: str
) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    broken = f"if torch.distributed.get_rank() == 1:\n        raise {kind}('a')\n    return ["
    (tmp_path / "mine.py").write_text(CODE.replace("return [", broken))
    (*first, told), (*second, _) = world2(call, tmp_path / "mine.yaml", f"out={tmp_path / 'out'}")
    assert (first, second) == ([1, ""], [1, ""])
    assert told.endswith(f"composer-dist train: Rank 1: {said} (at 'reading the data')\n"), told


def test_errors_in_training_say_where_and_show_no_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    others = "one = (torch.zeros(3), torch.tensor(0))\n    return [one, *[(one[0], one[1] - 5)] * 6, one]"
    (tmp_path / "mine.py").write_text(CODE.replace("return [(torch.zeros(3), torch.tensor(0))] * 8", others))
    status, _, told = call(tmp_path / "mine.yaml", f"out={tmp_path / 'out'}")
    assert status == 1
    assert "Traceback" not in told
    assert "Target -5 is out of bounds.\nThis was the loss of batch 1.\n" in told


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("(3, 2)", "(4, 2)", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x2)"),
        ("(3, 2)", "(3, 1)", "in the metrics"),
        (
            "tensor(0))] * 8",
            "tensor(0))] * 99 + [(torch.zeros(3), torch.tensor(2))]",
            "Target 2 is out of bounds: a label",
        ),
        (
            "zeros(3), torch.tensor(0))] * 8",
            "zeros(3), torch.tensor(0)), (torch.zeros(2), 0)] * 4",
            "make a batch",
        ),
    ],
)
def test_a_model_that_does_not_match_the_data_is_refused(
    tmp_path: Path, old: str, new: str, text: str
) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(CODE.replace(old, new))
    for dry in (["--dry-run"], []):
        status, _, told = call(tmp_path / "mine.yaml", *dry, f"out={tmp_path / 'out'}")
        assert (status, text in told) == (2, True), told


METRIC = """\
import torch, torchmetrics
from composer_dist import ComposerModel

class Net(ComposerModel):
    def __init__(self, device):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        with torch.device(device):
            self.made = {"mean": torchmetrics.MeanMetric()}
    def forward(self, batch):
        return self.layer(batch[0])
    def loss(self, outputs, batch):
        return outputs.sum()
    def get_metrics(self, is_train=False):
        return self.made
    def update_metric(self, batch, outputs, metric):
        metric.update(outputs)
"""


def test_metrics_without_values_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE.replace(", num_classes: 2", ""))
    (tmp_path / "mine.py").write_text(METRIC + CODE[CODE.index("\ndef data") :])
    for device, expected in (("meta", 2), ("cpu", 0)):
        option = f"model.arguments={{device: {device}}}"
        status, _, told = call(tmp_path / "mine.yaml", "--dry-run", f"out={tmp_path / 'out'}", option)
        assert status == expected, told
        assert ("Make them inside of `with torch.device('cpu'):`" in told) == (status == 2)


STREAM = """\
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from [(torch.zeros(3), torch.tensor(0))] * 8

def data():
    return Stream()
"""


def test_a_stream_without_tokens_is_refused_with_the_status_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "mine.py").write_text(CODE.partition("def data")[0] + STREAM)
    for dry in (["--dry-run"], []):
        status, _, told = call(
            tmp_path / "mine.yaml", *dry, f"out={tmp_path / 'out'}", "trainer.max_duration=9tok"
        )
        assert (status, "no mapping with 'input_ids'" in told) == (2, True), told


@pytest.mark.slow
def test_an_error_on_one_of_two_processes_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    broken = CODE.replace("return [", "import os\n    return 1 / int(os.environ['RANK'] == '0') and [")
    (tmp_path / "mine.py").write_text(broken)
    command = [sys.executable, "-m", "composer_dist", "train", "mine.yaml", "-n", "2"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: division by zero") >= 1, done.stderr
    assert done.stderr.count("composer-dist train:") == 1, done.stderr


@pytest.mark.promise(108)
@pytest.mark.slow
def test_a_rank_that_ends_with_status_0_in_the_middle_is_named(tmp_path: Path) -> None:
    mine = MINE.replace("1ba", "2ba, progress_bar: false") + "callbacks: {'mine.py:Ends': {}}\n"
    (tmp_path / "mine.yaml").write_text(mine)
    ends = "import os\nfrom composer_dist.trainer import Callback\nclass Ends(Callback):\n"
    ends += "    def before_forward(self, state, logger):\n        if os.environ['RANK'] == '1':\n"
    (tmp_path / "mine.py").write_text(f"{CODE}{ends}            os._exit(0)\n")
    command = [sys.executable, "-m", "composer_dist", "train", "mine.yaml", "-n", "2"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 1, done.stderr
    assert "Rank 1 ended while rank 0 was at 'the " in done.stderr
    assert "of batch 1'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_resumes_and_exports_the_averages(tmp_path: Path) -> None:
    run = [PRESETS / "vision.yaml", "trainer.eval_interval=null", "trainer.progress_bar=false"]
    averaged = [*run, f"out={tmp_path / 'averaged'}", "callbacks={ema: {half_life: 1000ba}}"]
    status, _, told = call(*averaged, "trainer.max_duration=2ba")
    assert (status, "Resuming" in told, "the EMA's averages" in told) == (0, False, True), told
    begun = ["callbacks={ema: {half_life: 1000ba, start: 3ba}}", f"out={tmp_path / 'none'}"]
    status, _, told = call(*run, *begun, "trainer.max_duration=2ba")
    assert (status, "the EMA's averages" in told) == (0, False), told
    status, _, told = call(*averaged, "trainer.max_duration=4ba")
    assert status == 0
    assert f"Resuming from {tmp_path}/averaged/checkpoints/ep0-ba2 after batch 2.\n" in told
    assert not re.search(r"^ *initialized ", told, re.MULTILINE)  # but loaded
    assert "has already reached trainer.max_duration=4ba" in call(*averaged, "trainer.max_duration=4ba")[2]
    status, _, told = call(*averaged, "trainer.max_duration=5ba", "model.arguments.width=8")
    assert status == 2
    assert "To start over, choose another out than" in told
    first = call(*run, f"out={tmp_path / 'first'}", "trainer.max_duration=1ba")
    assert first[0] == 0, first
    found, expected = (torch.load(tmp_path / name / "model.pt") for name in ("averaged", "first"))
    for name, value in expected.items():  # with which the averages begin, and which they hardly leave
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)


def test_a_launcher_inside_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    status, _, told = call(PRESETS / "vision.yaml", "-n", 2)
    assert status == 2
    assert "already started by a launcher" in " ".join(told.split())
