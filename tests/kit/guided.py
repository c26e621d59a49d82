"""Bad input that coverage guides: atheris goes on from inputs that reach new branches of this library.

    python -m tests.kit.guided                             # 10,000 cases of each target, a row for each
    python -m tests.kit.guided test_runs --cases 500
    python -m tests.kit.guided test_runs --replay runs/fuzz/crash-0123

The targets are those of `tests/behavior/test_fuzz.py`. hypothesis makes a case of the bytes that atheris
chooses; bytes that are too few for a case are not counted. atheris ends its process, so each target has one.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/behavior/test_fuzz.py"
KEPT = ROOT / "runs/fuzz"
"""Where inputs that failed are kept."""
TARGETS = re.findall(r"^@cases\n@given.*\ndef (\w+)", FILE.read_text(), re.MULTILINE)


class Guided:
    """A plugin of pytest that gives a test of hypothesis to atheris, until so many cases have passed."""

    def __init__(self, count: int, options: list[str]) -> None:
        self.count, self.options = count, options

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> None:
        import atheris
        from hypothesis import given  # pytest wants to import its plugin itself

        from tests.kit.fuzzing import cases

        handle = pyfuncitem.obj.hypothesis
        test, asked = handle.inner_test, signature(handle.inner_test).parameters
        fixtures = {name: value for name, value in pyfuncitem.funcargs.items() if name in asked}
        drawing = given(**handle._given_kwargs)(lambda **drawn: test(**fixtures, **drawn))
        one, tried, start = cases(drawing).hypothesis.fuzz_one_input, 0, time.monotonic()

        def attempt(data: bytes) -> None:
            nonlocal tried
            tried += one(data) is not None
            if tried == self.count:
                print(f"{tried} cases passed, {time.monotonic() - start:.0f} s", flush=True)
                os._exit(0)  # libFuzzer has no other way to stop that is no failure

        atheris.Setup([sys.argv[0], *self.options], attempt)
        atheris.Fuzz()


def one_target(name: str, count: int, replay: Path | None) -> int:
    """Try one target in this process, which ends here if nothing goes wrong."""
    import atheris

    options = [str(replay)] if replay else ["-len_control=0", "-max_len=2048", "-verbosity=0"]
    # `Attack` limits time and memory, with the alarm that atheris would use.
    options += ["-timeout=86400", "-rss_limit_mb=0"]
    with atheris.instrument_imports(include=["composer_dist"]):
        arguments = ["-q", "-s", "-m", "", "-p", "no:cacheprovider", f"{FILE}::{name}"]
        return int(pytest.main(arguments, plugins=[Guided(count, options)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all, unless some are named")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try an input that failed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"no target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if arguments.replay and len(arguments.targets) != 1:
        parser.error("--replay needs the name of one target")
    if arguments.here or arguments.replay:
        return one_target(arguments.targets[0], arguments.cases, arguments.replay)
    failed = 0
    for name in arguments.targets or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.kit.guided", name, "--here", f"--cases={arguments.cases}"]
            path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            own = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
            run = subprocess.run(command, cwd=folder, env=own, text=True, capture_output=True)
            said = re.search(r"\d+ cases passed, \d+ s", run.stdout)
            print(f"{name}: {said[0] if said and not run.returncode else 'FAILED'}", flush=True)
            if run.returncode or not said:
                failed = 1
                print(run.stdout[-4000:], run.stderr[-4000:], sep="\n")
                KEPT.mkdir(parents=True, exist_ok=True)
                for one in Path(folder).glob("crash-*"):
                    print(f"Again: python -m tests.kit.guided {name} --replay {shutil.move(one, KEPT)}")
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
