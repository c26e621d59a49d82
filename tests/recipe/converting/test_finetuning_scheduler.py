"""The Fine-Tuning Scheduler's schedules, plans and files, converted."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from composer_dist.config.parallelism import ParallelismConfig, resolve_config
from composer_dist.distributed import plan_parallelism
from composer_dist.recipe.converting.convert import convert_file, convert_values
from composer_dist.recipe.converting.finetuning_scheduler import pattern_of
from composer_dist.recipe.problems import ConfigurationError
from composer_dist.trainer import FineTuningPhases, NoImprovement, Phase
from composer_dist.trainer.finetuning.schedule import load_schedule

pytestmark = pytest.mark.promise(140)

SCHEDULE = """\
0:
  params:
  - model.head.*
  max_transition_epoch: 1
1:
  params:
  - model.layers.1.(weight|bias)
  - model.norm.weight
  max_transition_epoch: 3
  lr: 2.0e-4
2:
  params:
  - model.layers.0
  - model.norm.b.*
  new_lr_scheduler: {lr_scheduler_init: {class_path: torch.optim.lr_scheduler.StepLR}}
"""


class Model(nn.Module):
    """What the schedule is for."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.model.norm, self.model.head = nn.LayerNorm(4), nn.Linear(4, 2)


def selected(patterns: list[str], names: list[str]) -> list[str]:
    """As FinetuningScheduler selects parameters: an exact name, or `re.match`."""
    return [
        name
        for name in names
        if any(one == name if one in names else re.compile(one).match(name) for one in patterns)
    ]


def test_a_schedule_selects_the_same_parameters_for_the_same_epochs(tmp_path: Path) -> None:
    file, phases = tmp_path / "schedule.yaml", tmp_path / "phases.yaml"
    file.write_text(SCHEDULE)
    done = convert_file(file)
    assert done.library == "finetuning-scheduler"
    assert [(one.key, one.line, one.undecided) for one in done.remarks] == [("2.new_lr_scheduler", 15, True)]
    phases.write_text(done.text("schedule.yaml", only="phases"))
    until = [NoImprovement(metric="loss/eval/total", patience=3, at_most=f"{n}ep") for n in (1, 2)]
    loaded = load_schedule(phases)
    assert [one.until for one in loaded] == [*until, None]
    assert [one.lr for one in loaded] == [None, 2e-4, 1e-5]
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    expected = [selected(one["params"], names) for one in yaml.safe_load(SCHEDULE).values()]
    assert FineTuningPhases(loaded).select(model).parts == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.head.weight", "model.head.weight"),
        ("model.head.*", "re:model.head.*"),
        (r"layers\.\d+$", r"re:layers\.\d+$"),
        ("a|b.*", "re:(?:a|b.*)"),
        ("layers.[0-2]", "re:(?:layers.[0-2]).*"),
    ],
)
def test_a_pattern_that_matches_the_start_of_a_name_matches_all_of_it(theirs: str, ours: str) -> None:
    assert pattern_of(theirs) == ours


PLAN: dict[str, Any] = {
    "fsdp_default_kwargs": {"reshard_after_forward": True, "act_ckpt": ["composable"]},
    "fsdp_plan": {
        r"model.layers.\d*$": {},
        "model.head": {"cpu_offload_policy": {}, "act_ckpt": ["wrapped_offload", None]},
    },
}


def test_a_plan_becomes_rules_that_choose_the_same_units() -> None:
    done = convert_values(PLAN)
    rules = done.values["parallelism"]["rules"]
    every = {"shard": True, "reshard_after_forward": True}
    assert rules == [
        {"match": r"re:model.layers.\d*$", **every, "act_ckpt": "composable"},
        {"match": "model.head", **every, "act_ckpt": "offload", "offload": True},
        {"match": "", **every},
    ]
    plan = plan_parallelism(
        Model(), ParallelismConfig.from_dict({"rules": rules[:1] + rules[2:]}), world_size=2
    )
    assert [unit.name for unit in plan.units] == ["", "model.layers.0", "model.layers.1"]


CLI: dict[str, Any] = {
    "seed_everything": 42,
    "trainer": {
        "max_epochs": 4,
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
        "limit_train_batches": 7,
        "callbacks": [
            {
                "class_path": "finetuning_scheduler.FinetuningScheduler",
                "init_args": {
                    "ft_schedule": "schedule.yaml",
                    "max_depth": 1,
                    "base_max_lr": 3e-5,
                    "restore_best": False,
                    "strategy_adapter_cfg": PLAN,
                },
            },
            {
                "class_path": "finetuning_scheduler.FTSEarlyStopping",
                "init_args": {"monitor": "val_loss", "patience": 2},
            },
            {
                "class_path": "finetuning_scheduler.FTSCheckpoint",
                "init_args": {"monitor": "acc", "mode": "max"},
            },
            {"class_path": "lightning.pytorch.callbacks.DeviceStatsMonitor"},
        ],
        "strategy": {
            "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
            "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1},
        },
    },
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-5}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
    "model": {"class_path": "mine.Module"},
}


def test_a_file_of_lightnings_command_line(tmp_path: Path) -> None:
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(CLI))
    done = convert_file(file)
    values = done.values
    until = {"metric": "loss/eval/total", "patience": 2, "at_most": "1ep"}
    last = {"metric": "loss/eval/total", "patience": 2}  # which ends the run
    assert [one.get("until") for one in values["phases"]["schedule"]] == [until, last]
    assert values["phases"]["restore_best"] is False
    assert values["checkpoints"] == {"monitor": "metrics/eval/acc", "mode": "max", "save_top_k": 1}
    assert values["trainer"] == {
        "max_duration": "4ep",
        "precision": "amp_bf16",
        "gradient_clipping": {"norm": 0.5},
        "train_subset_num_batches": 7,
        "step_schedulers_every_batch": False,  # Lightning's command line steps after each epoch
    }
    assert values["parallelism"]["mesh"] == {"dp_shard": 2, "tp": 1}
    assert len(values["parallelism"]["rules"]) == 3
    resolve_config(values["parallelism"])
    assert values["optimizer"] == {"name": "adamw", "lr": 1e-5}
    assert values["scheduler"] == {"name": "torch.optim.lr_scheduler.StepLR", "step_size": 1}
    assert {one.key for one in done.remarks if one.undecided} == {"model"}
    assert "trainer.callbacks.3" in {one.key for one in done.remarks}


def test_every_argument_of_the_callbacks_is_accounted_for() -> None:
    def callback(name: str, **arguments: Any) -> dict[str, Any]:
        return {"class_path": f"finetuning_scheduler.{name}", "init_args": arguments}

    phases = {0: {"params": ["a"]}, 1: {"params": ["b"]}}
    schedule = callback("FinetuningScheduler", ft_schedule=phases, unheard_of=1)
    stopping = callback("FTSEarlyStopping", stopping_threshold=0.1, check_finite=True)
    saving = callback("FTSCheckpoint", every_n_epochs=5, save_weights_only=True, dirpath="mine", filename="m")
    trainer = {"max_epochs": 30, "max_steps": 1000, "callbacks": [schedule, stopping, saving]}
    done = convert_values({"seed_everything": 1, "trainer": trainer})
    assert done.values["checkpoints"] == {"interval": "5ep", "weights_only": True, "folder": "mine"}
    assert done.values["trainer"]["max_duration"] == "1000ba"
    path = "trainer.callbacks.{}.init_args.{}"
    said = {one.key: one.undecided for one in done.remarks}
    assert said == {
        path.format(0, "unheard_of"): False,
        path.format(1, "stopping_threshold"): False,
        path.format(1, "check_finite"): False,
        path.format(2, "filename"): False,
        "trainer.max_steps": True,
    }


def test_defaults_that_lightnings_command_line_writes() -> None:
    options = {"process_group_backend": "gloo", "timeout": None, "static_graph": True}
    strategy = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": options}
    trainer = {"max_epochs": 1, "gradient_clip_val": 0.0, "strategy": strategy}
    done = convert_values({"seed_everything": True, "trainer": trainer})
    assert done.values == {
        "seed": 0,
        "trainer": {"max_duration": "1ep"},
        "parallelism": {"ddp": {"static_graph": True}},
    }
    assert [one.key for one in done.remarks] == ["trainer.strategy.init_args.process_group_backend"]
    assert "seed" not in convert_values({"seed_everything": False, "trainer": trainer}).values


@pytest.mark.parametrize(
    ("strategy", "parallelism"),
    [
        ("ddp_find_unused_parameters_true", {"ddp": {"find_unused_parameters": True}}),
        ("SHARD_GRAD_OP", {"fsdp2": {"reshard_after_forward": False}}),
        ("HYBRID_SHARD", {"fsdp2": {"reshard_after_forward": True}, "strategy": "hsdp"}),
        ("NO_SHARD", "ddp"),
    ],
)
def test_strategies_of_lightning(strategy: str, parallelism: Any) -> None:
    if strategy.isupper():
        options = {"sharding_strategy": strategy, "activation_checkpointing_policy": ["torch.nn.Linear"]}
        given: Any = {"class_path": "lightning.pytorch.strategies.FSDPStrategy", "init_args": options}
    else:
        given = strategy
    done = convert_values({"seed_everything": 1, "trainer": {"strategy": given}})
    assert done.values["parallelism"] == parallelism
    assert len(done.remarks) == strategy.isupper()  # of the policy


def test_epochs_alone(tmp_path: Path) -> None:
    options = {"ft_schedule": yaml.safe_load(SCHEDULE), "epoch_transitions_only": True}
    callback = {"class_path": "finetuning_scheduler.FinetuningScheduler", "init_args": options}
    done = convert_values({"seed_everything": 1, "trainer": {"callbacks": [callback]}})
    phases = [Phase.from_dict(one) for one in done.values["phases"]["schedule"]]
    assert [str(one.until) for one in phases] == ["1ep", "2ep", "None"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: {params: [a]}\n2: {params: [b]}\n", "number them from 0 without gaps"),
        ("0: {params: a}\n1: {params: [b]}\n", "x.yaml:1: 0: params must be a list"),
        ("0: {params: [a]}\n1: {params: ['b[']}\n", "x.yaml:2: 1.params: 'b[' is not a regular expression"),
        ("fsdp_plan: {a: {act_ckpt: [some]}}\n", "act_ckpt 'some' is not one of composable"),
        (
            "seed_everything: 1\ntrainer:\n  callbacks:\n  - class_path: f.FinetuningScheduler\n"
            "    init_args: {ft_schedule: gone.yaml}\n",
            "x.yaml:5: trainer.callbacks.0.init_args.ft_schedule: there is no file gone.yaml",
        ),
        ("seed_everything: 1\ntrainer:\n  precision: 8\n", "x.yaml:3: trainer.precision: 8 is not one of"),
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
