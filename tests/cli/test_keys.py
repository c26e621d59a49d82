"""`composer-dist keys` and `composer-dist schema`."""

import inspect
import itertools
import json
from functools import partial
from typing import Any

import jsonschema
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from typer.testing import CliRunner

from composer_dist.cli.commands import app
from composer_dist.cli.init import PRESETS
from composer_dist.config.yaml import parse
from composer_dist.recipe.keys import LIMITS, json_schema, sections
from composer_dist.trainer import CheckpointSaver, GradientClipping

pytestmark = pytest.mark.promise(110)

BEYOND = {"minimum": -1.0, "maximum": 2.0, "exclusiveMinimum": 0, "exclusiveMaximum": 1.0}
OPTIMIZERS = "AdamW Adam SGD Adagrad RMSprop"


def printed(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="composer-dist")
    return result.exit_code, result.stdout, result.stderr


def test_every_key_has_a_type_and_a_default() -> None:
    found = {name: {entry.key: entry for entry in entries} for name, entries in sections().items()}
    assert {"out", "model", "trainer", "resume"} <= found[""].keys()
    lr = found["optimizer.adamw"]["lr"]
    assert (lr.default, "learning rate" in lr.text) == ("0.001", True)
    duration = found["trainer"]["max_duration"]
    assert (duration.type, duration.default) == ("str | int", "required")
    assert duration.text.startswith("where `fit` ends")
    assert found["data (kind: text)"]["context"].text == "Tokens in a sample."
    assert found["callbacks.early_stopping"]["monitor"].default == "required"
    texts = [entry.text for entries in sections().values() for entry in entries]
    assert [text for text in texts if text.count("(") != text.count(")")] == []
    silent = [key for key, entry in (found["trainer"] | found["checkpoints"]).items() if not entry.text]
    assert silent == []


@pytest.mark.parametrize("kind", [getattr(torch.optim, name) for name in OPTIMIZERS.split()])
def test_limits_of_optimizers_are_those_of_torch(kind: Any) -> None:
    arguments = inspect.signature(kind).parameters.keys()
    for keys, limit in LIMITS[OPTIMIZERS].items():
        for bound, key in itertools.product(limit, arguments & set(keys.split())):
            with pytest.raises(ValueError, match=r"[Ii]nvalid"):
                kind([torch.zeros(1)], **{key: (0.5, BEYOND[bound]) if key == "betas" else BEYOND[bound]})
            kind([torch.zeros(1)], **{key: (0.0, 0.5) if key == "betas" else 0.0})


def test_every_limit_is_of_a_key() -> None:
    classes = json_schema()["$defs"]
    for kinds, limits in LIMITS.items():
        keys = {key for kind in kinds.split() for key in classes[kind]["properties"]}
        assert set(" ".join(limits).split()) <= keys


@pytest.mark.parametrize(
    ("make", "kind", "keys"),
    [
        (partial(CheckpointSaver, "folder", monitor="loss"), "CheckpointSaver", "keep save_top_k"),
        (partial(GradientClipping, norm=1.0), "GradientClipping", "norm norm_type value"),
        (partial(OneCycleLR, torch.optim.SGD([torch.zeros(1)]), 1.0, 10), "OneCycleLR", "pct_start"),
    ],
)
def test_other_limits_are_those_of_the_classes(make: Any, kind: str, keys: str) -> None:
    for bound, key in itertools.product(LIMITS[kind][keys], keys.split()):
        with pytest.raises(ValueError, match=key):
            make(**{key: BEYOND[bound]})
        make(**{key: 0.5 if kind == "OneCycleLR" else 1})


def test_one_section_is_shown_and_an_unknown_one_names_the_others() -> None:
    status, shown, _ = printed("keys", "checkpoints")
    assert (status, "interval" in shown, "max_duration" in shown) == (0, True, False)
    status, _, told = printed("keys", "chekpoints")
    assert status == 2
    assert "'chekpoints'" in told


def test_one_key_is_shown_and_a_misspelled_one_is_told_the_closest() -> None:
    status, shown, _ = printed("keys", "trainer.max_duration")
    assert (status, [line for line in shown.splitlines() if not line.startswith("      ")]) == (
        0,
        ["", "trainer:", "  max_duration (str | int, required)"],
    )
    assert printed("keys", "seed")[1].startswith("\nThe top of the file:\n  seed (")
    assert printed("keys", "optimizer.lr")[1].count("  lr (") == 5
    assert "Did you mean 'optimizer'?" in " ".join(
        printed("keys", "optimizr")[2].replace("\u2502", "").split()
    )
    status, _, told = printed("keys", "trainer.max_duratoin")
    assert (
        status,
        "Did you mean 'trainer.max_duration'?" in " ".join(told.replace("\u2502", "").split()),
    ) == (2, True)


def test_no_key_or_type_is_cut_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = printed("keys", "trainer")[1].splitlines()
    assert max(map(len, lines)) <= 60
    at = lines.index("  device_train_microbatch_size (int | auto | null, default")
    assert lines[1] == "trainer:"
    assert lines[at + 1 : at + 3] == ["  null)", "      the most samples in one forward and backward"]


@pytest.mark.slow
def test_the_presets_match_the_schema_and_mistakes_do_not() -> None:
    status, shown, _ = printed("schema")
    assert status == 0
    schema: Any = json.loads(shown)
    jsonschema.Draft202012Validator.check_schema(schema)
    for file in sorted(PRESETS.glob("*.yaml")):
        values = json.loads(json.dumps(parse(file.read_text()).values))
        jsonschema.validate(values, schema)
        for section, key in (("trainer", "max_epochs"), ("data", "sorce"), ("model", "pretraind")):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(values | {section: values[section] | {key: 1}}, schema)
