"""The user's own code, neither installed nor ours: its frames in errors, and warnings about its calls."""

import inspect
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
"""The folders of packages, of the environment, the user and the system."""
_OTHERS = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (Path(__file__).parent, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
"""Where else code is that the user did not write."""
_BETWEEN = {"composer_dist", "torch", "contextlib", "functools"}
"""The packages whose frames may lie between a warning and the call that caused it."""


def warn(text: str) -> None:
    """Warn at the line that called this package, or the model that this package has prepared."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own code, of the first error in the chain of causes that has any."""
    for cause in _causes(error):
        here = [*traceback.extract_tb(cause.__traceback__), *_of_syntax(cause)]
        for raised in (here, *_of_worker(cause)):
            if frames := [frame for frame in raised if is_users_file(frame.filename)]:
                return frames
    return []


def is_of_users_code(error: BaseException) -> bool:
    """Whether the user's own code raised an error or one of its causes, on this rank or on another."""
    elsewhere = any(getattr(cause, "of_users_code", False) for cause in _causes(error))
    return elsewhere or bool(users_frames(error))


def _of_syntax(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """The line that Python could not read; no frame has it."""
    if isinstance(error, SyntaxError) and error.filename:
        yield traceback.FrameSummary(error.filename, error.lineno, "<module>")


def _of_worker(error: BaseException) -> Iterator[list[traceback.FrameSummary]]:
    """The frames of a DataLoader's worker, which torch writes into the error's text; those of causes last."""
    text = str(error.args[0]) if error.args else ""
    if re.match(r"Caught \w+ in .+\.\nOriginal ", text):
        for part in reversed(text.split("Traceback (most recent call last):\n")):
            found = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', part, re.MULTILINE)
            yield [traceback.FrameSummary(file, int(line), name) for file, line, name in found]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_users_file(file: str) -> bool:
    """Whether a source file is the user's own."""
    path = Path(file).resolve()
    if file.endswith((".pyx", ".pxi", ".pxd")):  # extension modules name their sources without a folder
        return False
    return not (file.startswith("<") or _INSTALLED.intersection(path.parts) or str(path).startswith(_OTHERS))
