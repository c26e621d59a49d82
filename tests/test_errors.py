"""Errors are ours and Python's, and travel by name."""

from __future__ import annotations

import pytest

from composer_dist import errors
from composer_dist.errors import CheckpointError, ParallelismError, kind_named, kind_of

KINDS = [
    (errors.ParallelismValueError, ValueError),
    (errors.ParallelismTypeError, TypeError),
    (errors.ParallelismKeyError, KeyError),
    (errors.ParallelismRuntimeError, RuntimeError),
    (errors.CheckpointValueError, ValueError),
    (errors.CheckpointKeyError, KeyError),
    (errors.CheckpointRuntimeError, RuntimeError),
]


@pytest.mark.parametrize(("kind", "builtin"), KINDS)
def test_each_is_a_parallelism_error_and_a_builtin(kind: type[Exception], builtin: type[Exception]) -> None:
    error = kind("it's the 'text'")
    assert isinstance(error, (ParallelismError, builtin))
    assert isinstance(error, ParallelismError)
    assert isinstance(error, builtin)
    assert isinstance(error, CheckpointError) == kind.__name__.startswith("Checkpoint")
    assert str(error) == "it's the 'text'"
    assert kind_named(kind.__name__) is kind
    assert kind_of(error) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("a"), errors.ParallelismKeyError),
        (UnicodeError("a"), errors.ParallelismValueError),
        (TypeError("a"), errors.ParallelismTypeError),
        (OSError("a"), errors.ParallelismRuntimeError),
        (KeyboardInterrupt(), errors.ParallelismRuntimeError),
    ],
)
def test_any_error_has_a_nearest_kind(error: BaseException, kind: type[ParallelismError]) -> None:
    assert kind_of(error) is kind


def test_an_unknown_name_is_a_runtime_error() -> None:
    assert kind_named("SomethingElse") is errors.ParallelismRuntimeError
