"""Bad input: how it is made, and what must hold while it is read.

`FUZZ=fuzz` in the environment tries 10,000 random cases of each target (`make fuzz`); the default is 200,
the same ones in every run.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from composer_dist.errors import ParallelismError

settings.register_profile(
    "few",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "fuzz",
    settings.get_profile("few"),
    max_examples=10_000,
    derandomize=False,
    phases=[Phase.generate, Phase.shrink],
    print_blob=True,
)
cases = settings.get_profile(os.environ.get("FUZZ", "few"))
"""Of every test of bad input; for `make fuzz`, ten thousand that nobody has tried before."""

LIMIT = 10.0
"""Seconds after which a case counts as a hang; they take milliseconds."""
_ROOM = 1 << 30
"""Bytes that may be allocated beyond what the process has; every file here is smaller than a megabyte."""
_LONGEST = 20_000
"""Characters of an error."""

odd_text = st.sampled_from(
    [
        "",
        " ",
        "\t",
        "\0",
        "\u202e",
        "\ud800",
        "é" * 3,
        "x" * 3000,
        "../secret",
        "/etc/passwd",
        "~",
        "*",
        "${HOME}",
        "²",
        "1e999",
        "nan",
        "-1",
        "true",
        "null",
        "a.b",
        "a=b",
        "{",
        "%s",
        "{0}",
        "__class__",
        "re:(",
        "re:(a+)+$",
    ]
)
numbers = st.sampled_from(
    [
        0,
        -1,
        1,
        2,
        3,
        2**31,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        0.5,
        -0.0,
        1e308,
        1e-320,
        float("inf"),
        float("-inf"),
        float("nan"),
        True,
        False,
    ]
)
scalars = st.one_of(st.none(), numbers, odd_text)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(odd_text, scalars, max_size=2),
    st.just([[[[[[]]]]]]),
    st.just({"a": {"b": {"c": [1, {"d": None}]}}}),
)
"""What may stand where something else is expected; all of it can be written as JSON."""


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside of nested dictionaries and lists."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from paths_in(inner, (*path, key))


@st.composite
def altered(draw: st.DrawFn, value: Any) -> tuple[Any, tuple[Any, ...], str]:
    """A copy of nested data with one change, where it is, and its kind."""
    changed = deepcopy(value)
    path = draw(st.sampled_from(list(paths_in(value))))
    home = changed
    for key in path[:-1]:
        home = home[key]
    last = path[-1]
    kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add", "swap"]))
    if kind == "replace":
        home[last] = draw(values)
    elif kind == "remove":
        del home[last]
    elif kind == "rename" and isinstance(home, dict):
        home[draw(odd_text) + str(last)] = home.pop(last)
    elif kind == "add" and isinstance(home, dict):
        home[draw(odd_text)] = draw(values)
    elif kind == "add":
        home.append(draw(values))
    else:
        kind = "swap"
        other = draw(st.sampled_from(list(home) if isinstance(home, dict) else list(range(len(home)))))
        home[last], home[other] = home[other], home[last]
    return changed, path, kind


@st.composite
def damaged(draw: st.DrawFn, data: bytes, first: int = 0, last: int | None = None) -> bytes:
    """Other bytes between two places: changed, cut, doubled, put in or left out."""
    last = len(data) if last is None else last
    at = draw(st.integers(first, last - 1))
    size = draw(st.integers(1, 8))
    match draw(st.sampled_from(["change", "change", "flip", "cut", "insert", "leave out", "repeat"])):
        case "change":
            made = data[:at] + draw(st.binary(min_size=1, max_size=size)) + data[at + size :]
        case "flip":
            made = data[:at] + bytes([data[at] ^ (1 << (size - 1))]) + data[at + 1 :]
        case "cut":
            made = data[:at]
        case "insert":
            made = data[:at] + draw(st.binary(min_size=1, max_size=size)) + data[at:]
        case "leave out":
            made = data[:at] + data[at + size :]
        case _:
            made = data[: at + size] + data[at:]
    return made


class Watch:
    """Sees which files Python opens, removes and moves, and which programs it starts."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        """While it is set, nothing else is written, and nothing beside it is read."""
        self.wrong: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None or event not in _SEEN:
            return
        if event in _PROGRAMS:
            self.wrong.append(f"{event}{arguments}")
            return
        for one in arguments[: _SEEN[event]]:
            if not isinstance(one, str | bytes | os.PathLike):
                continue
            path = Path(os.path.abspath(os.fsdecode(one)))
            flags = arguments[2] or 0 if event == "open" else os.O_RDONLY if event in _LISTS else os.O_WRONLY
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "__pycache__" not in path.parts
            beside = path.is_relative_to(self.inside.parent) or path == Path("/etc/passwd")
            if (writes or beside) and not path.is_relative_to(self.inside):
                self.wrong.append(f"{event} {path}")


_PROGRAMS = {"os.system": 0, "subprocess.Popen": 0, "os.exec": 0, "os.posix_spawn": 0, "socket.connect": 0}
_SEEN = _PROGRAMS | {
    "open": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.mkdir": 1,
    "shutil.rmtree": 1,
}
_LISTS = {"os.listdir": 1, "os.scandir": 1}
_SEEN |= _LISTS | {"os.truncate": 1, "os.link": 2, "os.symlink": 2, "os.chmod": 1}
_watch: list[Watch] = []


class Attack:
    """Reads bad input in a folder, and sees to it that only that folder is touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder.parent / "secret"
        self.secret.write_text("kept")
        if not _watch:
            _watch.append(Watch())

    def __call__(self, read: Callable[[], Any], *names: str) -> tuple[Any, str | None]:
        """What `read` returns, or the text of its error, which has one of these names.

        Anything but an error of this library fails the test, as do a hang, gigabytes, and a file outside.
        """
        (watch,) = _watch
        watch.wrong.clear()
        watch.inside = self.folder
        try:
            with _limited():
                return read(), None
        except ParallelismError as error:
            text = str(error)
        finally:
            watch.inside = None
            assert watch.wrong == []
            assert self.secret.read_text() == "kept"
        assert any(name in text for name in names), f"none of {names} in {text!r}"
        assert len(text) < _LONGEST
        text.encode()
        return None, text


@contextmanager
def _limited() -> Iterator[None]:
    """An alarm after `LIMIT`, and little more memory than there is."""

    def ring(*_: Any) -> None:
        pytest.fail(f"still reading after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


def as_json(value: Any) -> bytes:
    """Its text in JSON, with NaN and lone surrogates as Python writes them."""
    return json.dumps(value).encode()
