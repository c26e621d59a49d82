"""Errors are ours and Python's, and travel by name."""

import pytest

from composer_dist import errors
from composer_dist.errors import CheckpointError, Faults, ParallelismError, kind_named, kind_of

KINDS = [
    (errors.ParallelismValueError, ValueError),
    (errors.ParallelismTypeError, TypeError),
    (errors.ParallelismKeyError, KeyError),
    (errors.ParallelismRuntimeError, RuntimeError),
    (errors.LostRankError, RuntimeError),
    (errors.CheckpointValueError, ValueError),
    (errors.CheckpointKeyError, KeyError),
    (errors.CheckpointRuntimeError, RuntimeError),
]


@pytest.mark.parametrize(("kind", "builtin"), KINDS)
def test_each_is_a_parallelism_error_and_a_builtin(kind: type[Exception], builtin: type[Exception]) -> None:
    error = kind("it's the 'text'")
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
    assert kind_named("SomethingElse") is errors.ParallelismRuntimeError


def _collect(faults: Faults, last: Exception) -> None:
    with faults:
        assert not faults
        faults.append("one")
        faults += ["two", "one"]
        with faults.catching(before="three: "):
            raise last
        assert faults


def test_faults_are_raised_together() -> None:
    with pytest.raises(errors.ParallelismValueError, match=r"^one\ntwo\nthree: late$"):
        _collect(Faults(), errors.ParallelismTypeError("late"))
    faults = Faults("Wrong: ", ". Fix them.", "; ", errors.CheckpointKeyError)
    with pytest.raises(errors.CheckpointKeyError, match=r"^Wrong: one; two; three: late\. Fix them\.$"):
        _collect(faults, errors.ParallelismTypeError("late"))


def test_another_error_takes_precedence_over_faults_and_none_is_needed() -> None:
    with pytest.raises(ZeroDivisionError):
        _collect(Faults(), ZeroDivisionError())
    with Faults():
        pass


class MuteError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise TypeError


@pytest.mark.promise(108)
def test_any_error_can_be_put_in_words() -> None:
    assert (
        errors.in_words(MuteError())
        == "MuteError: its text cannot be shown, because its __str__ raised TypeError"
    )
    assert errors.in_words(ValueError("a\x1b[2J\nb")) == "ValueError: a\\x1b[2J\nb"
    assert errors.in_words(MemoryError()) == "MemoryError: no memory was left for it on this host"
    worker = (
        "Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    )
    assert errors.in_words(MemoryError(f"{worker}  File ...\nMemoryError\n")) == errors.in_words(
        MemoryError()
    )
