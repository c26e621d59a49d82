"""The errors of this library.

Every error is a `ParallelismError` (or a `CheckpointError`, which is one too) and also the built-in
kind that Python's own conventions ask for, so that both `except ParallelismError` and
`except ValueError` catch it. The same error, with the same text, is raised on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class ParallelismError(Exception):
    """Anything that kept composer_dist from doing what it was asked to do."""

    of_users_code = False
    """Whether another rank raised it in the user's own code, which a model, a data set or a callback has."""

    def __str__(self) -> str:
        """The text, without control characters of files' contents; `KeyError` alone would quote it."""
        return printable(str(self.args[0]) if len(self.args) == 1 else super().__str__())


class ParallelismValueError(ParallelismError, ValueError):
    """A value, configuration or structure that cannot work."""


class ParallelismTypeError(ParallelismError, TypeError):
    """An object of the wrong kind."""


class ParallelismKeyError(ParallelismError, KeyError):
    """A name or option that does not exist."""


class ParallelismRuntimeError(ParallelismError, RuntimeError):
    """Something that failed while running: a peer, the network, the order of calls."""


class LostRankError(ParallelismRuntimeError):
    """Another rank has ended, or does not answer."""


class CheckpointError(ParallelismError):
    """A state or checkpoint that cannot be saved or loaded."""


class CheckpointValueError(CheckpointError, ValueError):
    """A checkpoint whose contents do not match what they are loaded into."""


class CheckpointKeyError(CheckpointError, KeyError):
    """A name that the checkpoint, or the model, does not have."""


class CheckpointRuntimeError(CheckpointError, RuntimeError):
    """Input or output that failed."""


class CheckpointIsADirectoryError(CheckpointError, IsADirectoryError):
    """A directory where a file is to be written."""


WRONG = (
    ParallelismValueError,
    ParallelismTypeError,
    ParallelismKeyError,
    CheckpointValueError,
    CheckpointKeyError,
    CheckpointIsADirectoryError,
)
"""What a call asks for cannot be done, or it names what cannot be used."""


class Faults(list[str]):
    """Everything that is wrong, collected inside of a `with` and raised at its end as one error.

    ```python
    with Faults("compile ", ".", "; ") as faults:
        faults += check_options(options)
        if clash:
            faults.append(f"cannot have {clash}")
    ```

    Nothing is raised if the list is empty. An error raised inside passes unchanged. A fault that is added
    twice is reported once.

    Args:
        before: how the message begins.
        after: how it ends.
        between: what separates the faults.
        kind: the error that is raised.
    """

    def __init__(
        self,
        before: str = "",
        after: str = "",
        between: str = "\n",
        kind: type[ParallelismError] = ParallelismValueError,
    ) -> None:
        super().__init__()
        self._before, self._after, self._between, self._kind = before, after, between, kind

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self:
            raise self._kind(self._before + self._between.join(dict.fromkeys(self)) + self._after)

    @contextmanager
    def catching(self, before: str = "") -> Iterator[None]:
        """Add an error that is raised inside, as `before` and its text, and continue."""
        try:
            yield
        except ParallelismError as error:
            self.append(f"{before}{error}")


_KINDS: tuple[type[ParallelismError], ...] = (
    CheckpointValueError,
    CheckpointKeyError,
    CheckpointRuntimeError,
    CheckpointIsADirectoryError,
    CheckpointError,
    ParallelismValueError,
    ParallelismTypeError,
    ParallelismKeyError,
    ParallelismRuntimeError,
    LostRankError,
)


def kind_of(error: BaseException) -> type[ParallelismError]:
    """The class with which `error` is raised on every rank: itself, or the kind nearest to it."""
    for kind in _KINDS:
        if type(error) is kind:
            return kind
    for builtin, kind in (
        (KeyError, ParallelismKeyError),
        (ValueError, ParallelismValueError),
        (TypeError, ParallelismTypeError),
    ):
        if isinstance(error, builtin):
            return kind
    return ParallelismRuntimeError


def kind_named(name: str) -> type[ParallelismError]:
    """The inverse of `kind_of(error).__name__`."""
    return next((kind for kind in _KINDS if kind.__name__ == name), ParallelismRuntimeError)


_NO_MEMORY = "no memory was left for it on this host"
_OF_WORKER = re.compile(r"\ACaught \w+ in .*Traceback \(most recent call last\):\n(?: [^\n]*\n)*", re.S)
"""Before the text of an error that torch's DataLoader raises again: the worker's traceback."""


def in_words(error: BaseException) -> str:
    """The text of an error, with its class where it is not one of ours; never empty.

    An error of a DataLoader's worker is as if it had arisen here.
    """
    if isinstance(error, Exception) and (worker := _OF_WORKER.match(said := printable(_said(error)))):
        name, colon, text = said[worker.end() :].strip().partition(": ")
        name = name.rpartition(".")[2]
        if name == "MemoryError" and not text:
            colon, text = ": ", _NO_MEMORY
        return text if colon and isinstance(error, ParallelismError) else f"{name}{colon}{text}"
    if isinstance(error, ParallelismError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    text = printable(_said(error))
    if isinstance(error, MemoryError) and not text:
        text = _NO_MEMORY
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"its text cannot be shown, because its __str__ raised {type(broken).__name__}"


def printable(text: str) -> str:
    """`text` with escapes in place of what a terminal would obey."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text
    )
