"""What holds for every command of `composer-dist`."""

import errno
import importlib
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from torch._utils import ExceptionWrapper
from typer.testing import CliRunner

import composer_dist
from composer_dist import __version__, users_code
from composer_dist.cli import commands as cli
from composer_dist.cli import failures
from composer_dist.cli.main import main
from composer_dist.errors import CheckpointValueError

pytestmark = pytest.mark.promise(109)

FAILURES: dict[str, tuple[BaseException, int, str]] = {
    "ours": (CheckpointValueError("the file is cut short"), 2, "composer-dist fail: the file is cut short\n"),
    "os": (
        FileNotFoundError(2, "No such file or directory", "there.pt"),
        2,
        "composer-dist fail: there.pt: No such file or directory\n",
    ),
    "bug": (
        ZeroDivisionError("division by zero"),
        1,
        "ZeroDivisionError: division by zero\nTo see where it comes from: composer-dist --debug ...\n",
    ),
    "usage": (typer.BadParameter("neither one nor two"), 2, "neither one nor two"),
    "exit": (typer.Exit(7), 7, ""),
    "ctrl-c": (KeyboardInterrupt(), 130, ""),
}
"""What a command raises, its exit status, and what it prints to stderr."""


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(users_code, "is_users_file", lambda file: False)  # this file stands for ours
    made = typer.Typer(cls=cli.Commands, pretty_exceptions_enable=False)
    made.callback()(cli.options)

    @made.command()
    def fail(how: str) -> None:
        raise FAILURES[how][0]

    return made


def test_modules_in_the_working_directory_are_found_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_run.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    called = lambda prog_name: importlib.import_module("beside_the_run")  # noqa: E731
    monkeypatch.setattr("typer.main.get_command", lambda app: called)
    main()
    assert sys.path[-1] == ""
    assert sys.modules.pop("beside_the_run").__file__ == str(tmp_path / "beside_the_run.py")


@pytest.mark.parametrize("how", FAILURES)
def test_exit_statuses_and_errors_without_traceback(app: typer.Typer, how: str) -> None:
    result = CliRunner().invoke(app, ["fail", how])
    _, status, text = FAILURES[how]
    assert (result.exit_code, text in result.stderr) == (status, True), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "place", ["home/.local/lib/python3.11/site-packages/lib", "usr/lib/python3/dist-packages/lib", "project"]
)
def test_frames_of_installed_packages_are_not_the_users(tmp_path: Path, place: str) -> None:
    file = tmp_path / place / "code.py"
    error = ValueError("wrong")
    try:
        exec(compile("raise error", str(file), "exec"), {"error": error})
    except ValueError:
        found = [Path(frame.filename) for frame in users_code.users_frames(error)]
    assert (file in found) == (place == "project")
    assert (failures.status_of(CheckpointValueError("ours")), failures.status_of(error)) == (2, 1)
    assert not users_code.is_users_file(typer.__file__)
    assert not users_code.is_users_file("pyarrow/error.pxi")
    assert not users_code.is_users_file(subprocess.__file__)


def test_debug_shows_where_an_error_comes_from(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--debug", "fail", "ours"])
    assert isinstance(result.exception, CheckpointValueError)


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from composer_dist.cli.commands import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: print('status', end.code)\n"
        "print(*sys.modules)"
    )
    for option, expected in (("--help", "--debug"), ("--version", __version__)):
        command = [sys.executable, "-c", code, option]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert expected in shown.stdout
        assert "status 0" in shown.stdout
        assert {"torch", "transformers", "peft", "pydantic"}.isdisjoint(shown.stdout.split())


@pytest.mark.promise(110)
def test_the_entry_point_and_the_version_are_those_that_are_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"composer-dist": "composer_dist.cli.main:main"}
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"] == {"path": "composer_dist/__init__.py"}
    assert f'__version__ = "{__version__}"\n' in Path(composer_dist.__file__).read_text()


def test_a_fault_in_a_worker_shows_the_frames_of_the_user_only(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\nraise KeyError('a') from ZeroDivisionError('wrong: 1')\n")
    with pytest.raises(KeyError) as caught:
        exec(compile(file.read_text(), str(file), "exec"), {})
    frames = caught.tb
    while frames.tb_next is not None:  # without this file
        frames = frames.tb_next
    exception = KeyError, caught.value, frames
    wrapped = ExceptionWrapper(exception, where="in DataLoader worker process 0")
    with pytest.raises(KeyError) as caught:
        wrapped.reraise()
    error = caught.value
    error.__traceback__ = None  # which has frames of this file
    assert failures.status_of(error) == 1
    assert failures.described(error, "composer-dist train", debug=False) == (
        f'Traceback (most recent call last):\n  File "{file}", line 2, in <module>\n'
        "    raise KeyError('a') from ZeroDivisionError('wrong: 1')\ncomposer-dist train: KeyError: 'a'"
    )


SIGINT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "composer_dist"],
        ["-c", "from composer_dist.cli.main import main; main()"],
        ["-c", f"import composer_dist.cli.main; {SIGINT}"],
    ],
)
def test_ctrl_c_before_typer_is_there_ends_without_a_word(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, *command, "keys"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "command", [["doctor"], ["plan", "mine.yaml"], ["keys"], ["convert-config", "mine.yaml"]]
)
def test_ctrl_c_ends_a_command_though_an_import_swallows_it(tmp_path: Path, command: list[str]) -> None:
    swallowed = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "torch.py").write_text(f"{swallowed}except KeyboardInterrupt:\n    raise ImportError\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "composer_dist", *command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    text = f"\ncomposer-dist {command[0]}: interrupted.\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", text)


def test_a_closed_pipe_ends_a_command_without_a_word(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILURES, "pipe", (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""))
    result = CliRunner().invoke(app, ["fail", "pipe"])
    assert (result.exit_code, result.output) == (1, "")
