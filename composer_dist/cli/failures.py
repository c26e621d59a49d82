"""What a command that fails prints, and its exit status."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from composer_dist.errors import WRONG, ParallelismError, in_words

FAILED, WRONG_CALL = 1, 2
_WRONG_CALLS = (
    *WRONG,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_INSTALLED = {"site-packages", "dist-packages"}
"""The folders of packages, of the environment, the user and the system."""
_OTHERS = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
"""Where else code is that the user did not write."""


def status_of(error: BaseException) -> int:
    """2 if the call asks for what cannot be done, or names a file that cannot be used; else 1."""
    return WRONG_CALL if isinstance(error, _WRONG_CALLS) and not users_frames(error) else FAILED


def described(error: BaseException, command: str, debug: bool) -> str:
    """The text for standard error: a sentence, after the frames of the user's own code if it raised.

    Args:
        error: what ended the command.
        command: what the sentence begins with.
        debug: put the whole traceback first instead.
    """
    text = f"{command}: {in_words(error)}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    if debug:
        return "".join(traceback.format_exception(error)) + text
    if frames := users_frames(error):
        return (
            "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]) + text + notes
        )
    if not isinstance(error, ParallelismError | OSError):
        notes += "\nTo see where it comes from: composer-dist --debug ..."
    return text + notes


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own code, of the first error in the chain of causes that has any."""
    for cause in _causes(error):
        for raised in (traceback.extract_tb(cause.__traceback__), *_of_worker(cause)):
            if frames := [frame for frame in raised if _is_users(frame.filename)]:
                return frames
    return []


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


def _is_users(file: str) -> bool:
    path = Path(file).resolve()
    return not (file.startswith("<") or _INSTALLED.intersection(path.parts) or str(path).startswith(_OTHERS))
