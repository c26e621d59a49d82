"""What a command that fails prints, and its exit status."""

import traceback

from composer_dist.errors import WRONG, ParallelismError, in_words
from composer_dist.users_code import is_of_users_code, users_frames

FAILED, WRONG_CALL = 1, 2
_WRONG_CALLS = (
    *WRONG,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def status_of(error: BaseException) -> int:
    """2 if the call asks for what cannot be done, or names a file that cannot be used; else 1."""
    return WRONG_CALL if isinstance(error, _WRONG_CALLS) and not is_of_users_code(error) else FAILED


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
