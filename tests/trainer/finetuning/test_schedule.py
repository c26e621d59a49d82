"""Schedules as objects and as files."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from composer_dist.errors import ParallelismValueError
from composer_dist.trainer import NoImprovement, Phase, Time, default_phases, dump_schedule, load_schedule
from composer_dist.trainer.finetuning.schedule import phases_of
from tests.kit.phases import net

NAN = float("nan")
LOSS = {"metric": "loss/eval/total"}
SCHEDULE = (
    Phase("head", until="2ep"),
    Phase(["re:layers\\.1", "norm"], lr=1e-4, until=NoImprovement(metric="loss/eval/total", patience=3)),
    Phase("embed", until=NoImprovement(metric="metrics/a/F1", mode="max", min_delta=0.01, at_most="1h30m")),
    Phase("rest", lr=3e-5),
)


@pytest.mark.promise(76)
def test_the_default_schedule_goes_in_pairs_from_the_output() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    phases = default_phases(model, until="3ba")
    assert [phase.params for phase in phases] == [("1.bias", "1.weight"), ("0.bias", "0.weight")]
    assert [phase.until for phase in phases] == [Time.parse("3ba"), None]


@pytest.mark.promise(76)
def test_of_an_odd_number_the_last_is_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    assert [p.params for p in default_phases(model)] == [("1.bias", "1.weight"), ("0.weight",)]
    model[1].bias.requires_grad_(False)
    assert [p.params for p in default_phases(model)] == [("1.weight", "0.weight")]
    with pytest.raises(ParallelismValueError, match="no trainable parameter"):
        default_phases(model.requires_grad_(False))


@pytest.mark.promise(76)
@pytest.mark.parametrize("schedule", [SCHEDULE, default_phases(net())])
def test_dump_and_load_give_the_same_phases(tmp_path: Path, schedule: Any) -> None:
    path = tmp_path / "new" / "phases.yaml"
    dump_schedule(schedule, path)
    assert load_schedule(path) == phases_of(str(path)) == tuple(schedule)
    assert load_schedule(path) == phases_of(yaml.safe_load(path.read_text()))


@pytest.mark.promise(76)
def test_a_file_may_number_its_phases_and_write_numbers_as_everybody_does(tmp_path: Path) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text("1: {params: rest, lr: 1e-5}\n0:\n  params: [head]\n  until: 2ep\n")
    assert load_schedule(path) == (Phase("head", until="2ep"), Phase("rest", lr=1e-5))


@pytest.mark.promise(76)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: {params: a, until: 1ep}\n0: {params: c}\n", ":2: duplicate key '0', first on line 1"),
        ("- params: a\n  lr: 1\n  lr: 2\n", ":3: duplicate key 'lr', first on line 2"),
        ("- params: [a\n", ":2: not valid YAML"),
        ("- {params: a, until: " + "9" * 400 + "ep}", ": phase 0: .*9ep' is not a valid duration"),
        ("\udcff", ": not a text file"),
        ("params", ": a schedule is a list of phases or a mapping"),
        ("", ": a schedule is a list of phases or a mapping"),
    ],
)
def test_duplicate_keys_and_what_is_no_schedule_are_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ParallelismValueError, match=rf"phases.yaml{message}"):
        load_schedule(path)


@pytest.mark.promise(71)
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *((Phase, {"lr": lr}, "lr is a positive number") for lr in (0, -1e-3, NAN, math.inf, "fast", True)),
        (NoImprovement, {"metric": "metrics/eval/F1"}, "'max' if a greater metrics/eval/F1 is better"),
        *((NoImprovement, {"patience": n}, "patience is a positive number") for n in (0, True)),
        (NoImprovement, {"min_delta": -1.0}, "min_delta"),
        (NoImprovement, {"mode": "less"}, "mode is"),
    ],
)
def test_bad_options_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    required = {"params": "head"} if kind is Phase else LOSS
    with pytest.raises(ParallelismValueError, match=message):
        kind(**required | options)


@pytest.mark.promise(71)
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([{"params": "a", "until": {**LOSS, "patince": 2}}], "Did you mean 'patience'"),
        (
            [{"params": "a", "lr": -1, "until": "1ep"}, {"params": "b", "until": {**LOSS, "patience": 0}}],
            r"phase 0: .*lr is(.|\n)*phase 1: .*patience is",
        ),
        ({0: {"params": "a", "until": "1ep"}, 2: {"params": "b"}}, "numbered 0, 2; number them from 0"),
        ([], "at least one phase"),
        ([{"params": "a"}, {"params": "b"}], "phase 0 has no 'until', so phase 1 would never begin"),
        ([{"params": "a", "learning": 1}], "phase 0: Phase.learning: unknown key.*Valid keys: params, lr"),
        ([{"params": "a", "until": "2 weeks"}], "phase 0: .*'2 weeks' is not a valid duration"),
        ([{"params": "a", "until": "0ep"}], "phase 0: .*positive time"),
        ([{"params": []}], "phase 0: .*params needs names"),
        (["head"], "expected params, lr and until"),
    ],
)
def test_bad_schedules_are_refused_before_there_is_a_model(schedule: Any, message: str) -> None:
    with pytest.raises(ParallelismValueError, match=message):
        phases_of(schedule)
