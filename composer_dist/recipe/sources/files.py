"""The files that the data of a run is read from."""

import os
from collections.abc import Sequence
from glob import glob
from itertools import chain
from pathlib import Path

from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.schema import ChatData, PreferenceData

BUILT_IN = ("english", "python")
"""Texts that come with Python."""


def files_of(patterns: str | Sequence[str]) -> list[Path]:
    """The files that match or have that name, each once, however it is spelled.

    Raises:
        ParallelismValueError: a pattern matches nothing.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = {
        pattern: [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        for pattern in patterns
    }
    if empty := [pattern for pattern, files in found.items() if not files]:
        raise ParallelismValueError(
            f"No file matches {', '.join(map(repr, empty))} (in {Path.cwd()}). A text (data.source, or "
            "data.classes) is 'english' or 'python', which come with Python, or files by name or glob; rows "
            "are files."
        )
    each: dict[str, Path] = {}
    for file in chain(*found.values()):
        each.setdefault(os.path.abspath(file), Path(file))
    return [file for file in each.values() if file.is_file()]


def chat_template(data: ChatData | PreferenceData, folder: Path) -> str | None:
    """The text of the chat template, if the data has one; `folder` is the configuration's.

    Raises:
        ParallelismValueError: there is no such file, or it is not a text.
    """
    if data.chat_template is None:
        return None
    file = folder / data.chat_template
    if not os.path.isfile(file):  # unlike Path's, also of a name that is too long
        raise ParallelismValueError(f"data.chat_template: {file} does not exist, or is not a file.")
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParallelismValueError(f"data.chat_template: {file} cannot be read: {error}.") from None
