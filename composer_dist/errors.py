"""The errors of this library.

Every error is a `ParallelismError` (or a `CheckpointError`, which is one too) and also the built-in
kind that Python's own conventions ask for, so that both `except ParallelismError` and
`except ValueError` catch it. The same error, with the same text, is raised on every rank.
"""


class ParallelismError(Exception):
    """Anything that kept composer_dist from doing what it was asked to do."""

    def __str__(self) -> str:
        """The text as written; `KeyError` alone would quote it."""
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class ParallelismValueError(ParallelismError, ValueError):
    """A value, configuration or structure that cannot work."""


class ParallelismTypeError(ParallelismError, TypeError):
    """An object of the wrong kind."""


class ParallelismKeyError(ParallelismError, KeyError):
    """A name or option that does not exist."""


class ParallelismRuntimeError(ParallelismError, RuntimeError):
    """Something that failed while running: a peer, the network, the order of calls."""


class CheckpointError(ParallelismError):
    """A state or checkpoint that cannot be saved or loaded."""


class CheckpointValueError(CheckpointError, ValueError):
    """A checkpoint whose contents do not fit what they are loaded into."""


class CheckpointKeyError(CheckpointError, KeyError):
    """A name that the checkpoint, or the model, does not have."""


class CheckpointRuntimeError(CheckpointError, RuntimeError):
    """Input or output that failed."""


class CheckpointIsADirectoryError(CheckpointError, IsADirectoryError):
    """A directory where a file is to be written."""


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
