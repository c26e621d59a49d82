"""What `composer-dist train` says before it imports anything heavy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_dist.cli.announce import announcement, say

pytestmark = pytest.mark.promise(109)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "mine.yaml").write_text("trainer: {max_duration: 3ep}\n")
    return Path("mine.yaml")


def test_a_new_run(file: Path) -> None:
    assert announcement(file, ["trainer.max_duration=60ba"], 2).splitlines() == [
        "composer-dist train mine.yaml",
        "  out     runs/mine",
        "  ranks   2",
        "  device  cpu",
        "  steps   until 60ba",
        "  start   a new run",
    ]


def test_what_takes_seconds_is_said_on_a_terminal_by_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal, rank in ((False, "0"), (True, "1"), (True, "0")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("RANK", rank)
        say(f"Planning ... {terminal} {rank}")
    assert capsys.readouterr() == ("", "Planning ... True 0\n")


def test_a_bare_number_is_of_epochs_as_the_trainer_takes_it(file: Path) -> None:
    assert "  steps   until 10ep" in announcement(file, ["trainer.max_duration=10"], None).splitlines()


@pytest.mark.parametrize("link", [True, False])
def test_a_run_that_resumes(file: Path, link: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("there/checkpoints")
    folder.mkdir(parents=True)
    if link:
        (folder / "latest").symlink_to("ep0-ba20")
    else:
        (folder / "latest").write_text("ep0-ba20")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = announcement(file, ["out=there", "trainer.device=meta"], None)
    assert "ranks   4, from the launcher\n  device  meta\n" in said
    assert said.endswith("start   resume from there/checkpoints/ep0-ba20")
    if not link:
        os.truncate(folder / "latest", 1 << 40)
        assert announcement(file, ["out=there"], None).endswith(
            f"start   resume from the newest checkpoint in {folder}"
        )
    elsewhere = announcement(file, ["out=nowhere", f"checkpoints.folder={folder}"], None)
    assert f"start   resume from {'the newest checkpoint in ' * (not link)}{folder}" in elsewhere
    given = announcement(file, ["out=there", "checkpoints=null", "resume={load_path: other/ep1}"], None)
    assert given.endswith("start   from other/ep1")


def test_what_cannot_be_read_is_left_to_the_checks(file: Path) -> None:
    assert announcement(Path("nowhere.yaml"), [], None) == ""
    assert announcement(file, ["nonsense"], None) == ""
    file.write_text("a: [")
    assert announcement(file, [], None) == ""


def test_it_needs_nothing_heavy(file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from composer_dist.cli.announce import announcement\n"
        "print(announcement(Path('mine.yaml'), [], None)); print(*sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "runs/mine" in shown
    assert {"torch", "transformers", "pydantic"}.isdisjoint(shown.split())
