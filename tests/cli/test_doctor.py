"""What doctor finds."""

import os
import resource
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from composer_dist.cli import doctor
from composer_dist.cli.commands import app
from composer_dist.cli.self_test import SelfTest, self_test
from composer_dist.distributed.ranks import process_group
from tests.kit.world import World


def _by_name() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.survey()}


def test_this_machine_is_described() -> None:
    found = _by_name()
    assert found["torch"] == doctor.Finding("torch", torch.__version__)
    assert "gloo" in found["backends"].found
    assert f"{len(os.sched_getaffinity(0))} CPU core" in found["devices"].found
    assert found["threads"].found == f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"


def test_what_is_wrong_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 8192))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = _by_name()
    assert found["torch"].verdict == "fault"
    assert found["torch"].remedy == "Install torch >= 2.12, < 2.16."
    assert "torch>=2.12,<2.16" in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    files = found["open files"]
    assert (files.verdict, files.remedy) == ("warning", "Raise it: ulimit -n 8192.")
    assert found["interface"].found == "GLOO_SOCKET_IFNAME=nowhere0, but this host has no such interface"
    assert found["launcher"].verdict == "fault"


def test_ranks_measure_what_lies_between_them(world2: World) -> None:
    first, second = world2(self_test, 1 << 12)
    assert first == second
    assert (first.backend, first.device, first.right) == ("gloo", "cpu", True)
    assert first.pairs[0][0] == first.pairs[1][1] == 0
    assert min(first.pairs[0][1], first.pairs[1][0], first.all_reduce) > 0


@pytest.mark.parametrize(
    ("changed", "verdicts"),
    [
        ({}, ["ok", "ok", "ok"]),
        ({"right": False}, ["fault", "ok", "ok"]),
        ({"pairs": [[0, 8e9], [1e9, 0]]}, ["ok", "warning", "ok"]),
    ],
)
def test_the_self_test_is_judged(changed: dict[str, object], verdicts: list[str]) -> None:
    sound = {"backend": "gloo", "device": "cpu", "hosts": ["a", "a"], "pairs": [[0, 2e9], [1e9, 0]]}
    sound |= {"all_reduce": 1e9, "right": True, "memory": [True, False]}
    found = doctor.described(SelfTest(**(sound | changed)))
    assert [finding.verdict for finding in found] == verdicts
    assert found[2].found == "weights go through sockets"


def test_one_screen_one_verdict_and_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "talk", lambda n: [doctor.Finding("self-test", f"{n} ranks")])
    small = doctor.Finding("/dev/shm", "64 MiB", "warning", "More.")
    monkeypatch.setattr(doctor, "survey", lambda: iter([small]))
    wide = doctor.Finding("/dev/shm", "words " * 12, "warning", "More.")
    for columns, widest in (("", 110), ("40", 40)):
        with monkeypatch.context() as changed:
            changed.setenv("COLUMNS", columns) if columns else changed.delenv("COLUMNS", raising=False)
            changed.setattr(doctor, "survey", lambda: iter([wide]))
            lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
        assert 40 - 6 < max(map(len, map(str.rstrip, lines))) <= widest
        assert (len(lines) > 5) == bool(columns)
    done = CliRunner().invoke(app, ["doctor", "-n", "3"])
    assert done.exit_code == 0
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "warning  /dev/shm   64 MiB",
        "                    More.",
        "ok       self-test  3 ranks",
        "Training works here; 1 warning.",
    ]
    monkeypatch.setattr(doctor, "survey", lambda: iter([doctor.Finding("torch", "1.0", "fault", "Newer.")]))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "1 fault: training will not work here."
    assert not process_group.is_distributed()
