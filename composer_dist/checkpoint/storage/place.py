"""The place of a checkpoint: a local path, or a URL of a file system that fsspec supports (`s3://`, `gs://`).

`Place` is the interface between checkpoints and stores. `local` and `remote` implement it.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Formatter
from typing import Protocol

from composer_dist.checkpoint.storage import local
from composer_dist.checkpoint.storage.local import LocalPlace
from composer_dist.checkpoint.storage.remote import RemotePlace
from composer_dist.errors import (
    CheckpointError,
    CheckpointRuntimeError,
    CheckpointValueError,
    ParallelismValueError,
)
from composer_dist.files.checked import Sink


class Place(Protocol):
    """The place of one checkpoint. The first rank reserves it and finishes; every rank may write files."""

    @property
    def path(self) -> Path | str:
        """Its path or URL."""

    def reserve(self, sharded: bool) -> str:
        """Check that a checkpoint may be put here; returns a token of this save."""

    def sink(self, token: str, name: str | None) -> Sink:
        """A new file of the checkpoint; None for the only one."""

    def finish(self, token: str, marks: dict[str, bytes]) -> None:
        """Complete the checkpoint and make it visible.

        Args:
            marks: files that are written last, in this order; empty for a single file.
        """

    def discard(self, token: str) -> None:
        """Remove the files of this save."""

    def read(self, name: str) -> bytes | None:
        """All of a file of the checkpoint; None if it does not exist."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint's directory has this file."""

    def inside(self) -> list[str]:
        """The complete checkpoints in this directory, newest first."""

    def incomplete(self) -> list[str]:
        """Directories in this one with data of checkpoints, but without the file that is written last."""

    def set_aside(self) -> str:
        """Rename the checkpoint, which is damaged: it is no longer found, replaced or removed."""

    def beside(self) -> list[str]:
        """The other complete checkpoints in the same directory, newest first."""

    def probe(self) -> None:
        """Write a file here, in a new directory if need be, and remove it."""

    def remove(self) -> None:
        """Remove the checkpoint that is here."""


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place of a path or URL; `file://` is a path.

    Raises:
        CheckpointValueError: it is empty.
    """
    text = os.fspath(path)
    if not text:
        raise CheckpointValueError("The path of the checkpoint is empty.")
    here = local_path(text)
    return RemotePlace(text) if here is None else LocalPlace(Path(os.path.abspath(here)))


def local_path(text: str) -> Path | None:
    """The path that a text is, also after `file://`; None if it is a URL of a file system that fsspec has."""
    if "://" in text and not text.startswith("file://"):
        return None
    return Path(text.removeprefix("file://"))


def complete(place: Place, token: str, marks: dict[str, bytes], keep: int | None) -> None:
    """Complete the checkpoint; with `keep`, remove older checkpoints in the same directory.

    Raises:
        CheckpointRuntimeError: the file system reports an error, such as a full disk.
    """
    with writing(place):
        place.finish(token, marks)
        remove_older(place, keep)


def remove_older(place: Place, keep: int | None, spare: Collection[str] = ()) -> None:
    """Remove the checkpoints beside a complete one, except the newest (in all `keep` stay) and `spare`."""
    if keep is not None:
        for old in place.beside()[max(keep - 1, 0) :]:
            if os.path.basename(old) not in spare:
                place_of(old).remove()


def point(folder: str, link: str, name: str) -> None:
    """Make `link` in a folder lead to the checkpoint `name` in it, atomically.

    It is a link, or a file with the name where links are impossible.
    """
    if (directory := local_path(folder)) is None:
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(f"{folder.rstrip('/')}/{link}", "w") as file:
            file.write(name)
        return
    path = directory / link
    aside = path.with_name(f".{link}.tmp")
    with suppress(FileNotFoundError):
        aside.unlink()
    try:
        aside.symlink_to(name)
    except OSError:  # a file system without links
        aside.write_text(name)
    os.replace(aside, path)


@contextmanager
def writing(place: Place) -> Iterator[None]:
    """Make errors of the file system name the checkpoint.

    Raises:
        CheckpointRuntimeError: such an error.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointRuntimeError(f"Cannot write {place.path}: {error.strerror or error}.") from error


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Make a directory for checkpoints, and write a file there and remove it.

    Raises:
        CheckpointValueError: it is impossible.
    """
    try:
        place_of(os.path.join(directory, ".writable")).probe()
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointValueError(
            f"Checkpoints cannot be written to {os.fspath(directory)}: {error.strerror or error}."
        ) from error


def vacate(folder: str, present: str, overwrite: bool) -> None:
    """Remove a folder's checkpoints, and links that lead nowhere then, but not the one named `present`.

    Args:
        folder: of a new run.
        present: the checkpoint with which the run begins, if it is there.
        overwrite: whether to remove other checkpoints, or else to raise.

    Raises:
        CheckpointValueError: names the folder and its newest checkpoint.
    """
    found = [one for one in place_of(folder).inside() if os.path.basename(one) != present]
    if found and not overwrite:
        raise CheckpointValueError(
            f"{folder} has checkpoints of another run (the newest is {found[0]}), and this run is a new one. "
            "Save to another folder, continue that run with autoresume=True, or remove its checkpoints with "
            "CheckpointSaver(overwrite=True)."
        )
    for one in found:
        place_of(one).remove()
    if found and (path := local_path(folder)) is not None:
        for link in path.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()


def name_from(filename: str, counts: Mapping[str, int]) -> str:
    """The name of a checkpoint.

    Args:
        filename: has fields for numbers, such as "ep{epoch}-ba{batch}".
        counts: the numbers.

    Raises:
        ParallelismValueError: the filename has other fields, or is not such a string.
    """
    try:
        return filename.format(**counts)
    except (KeyError, IndexError, AttributeError) as error:
        raise ParallelismValueError(
            f"filename={filename!r}: {error} is unknown. Valid keys: {', '.join(counts)}."
        ) from error
    except ValueError as error:
        raise ParallelismValueError(f"filename={filename!r}: {error}.") from error


def clear_folder(folder: str, filename: str) -> None:
    """Remove what killed saves left in a folder, if it is local; no save to it may be in progress.

    Args:
        filename: of the checkpoints, with fields for numbers; others stay.
    """
    parts = Formatter().parse(filename)
    names = re.compile("".join(re.escape(text) + "[0-9]+" * (field is not None) for text, field, *_ in parts))
    if (path := local_path(folder)) is None:
        return
    with suppress(OSError, CheckpointError):  # the save reports what is wrong with the folder
        for name in filter(names.fullmatch, local.unfinished(path)):
            local.clear_unfinished(path / name)
