"""A logger that writes a file of JSON lines."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.logger import Row
from composer_dist.trainer.loggers.writing import WritingLogger
from composer_dist.users_code import warn

_TIMES = ("epoch", "batch", "sample", "token", "seconds")
_LONGEST = 1 << 26
"""Characters of a line; a file with a longer one may be larger than memory."""


_MOST = 100_000
"""Lines that wait for a disk that is full; the newest ones."""


class FileLogger(WritingLogger):
    """Writes one JSON object a line: the time and all that was logged then, by name.

    `pandas.read_json(path, lines=True)` reads it. Values that JSON does not know are the strings "nan", "inf"
    and "-inf". A table has a line of its own with `table` and `rows`, hyperparameters one with
    `hyperparameters`.

    A resumed run continues the same file, without the lines of batches that it repeats. A new run renames an
    existing file to `<name>.1<suffix>` and so on. A resumed one keeps a copy under such a name, and warns, if
    the file has lines that it cannot read. Lines that a full disk does not take are written later.

    Args:
        path: the file; its directory is made.
        interval: how often to write; see `WritingLogger`.
    """

    def __init__(self, path: str | os.PathLike[str], interval: Time | str | int = "5sec") -> None:
        super().__init__(interval)
        self._path = Path(path)
        self._last = 0.0
        """The batch of the last line."""
        self._waiting: list[str] = []
        """Lines that could not be written, on a full disk for example; the next write has them too."""

    def _open(self, start: Timestamp, id: str | None) -> str:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not start.batch and id is None and self._path.exists() and self._path.stat().st_size:
            self._path.rename(_free(self._path))
        self._path.touch()
        self._last = math.inf  # of an earlier process, until somebody has looked
        return str(self._path)

    def _rewind(self, now: Timestamp) -> None:
        """Removes the lines of later batches, and a last line that was cut off."""
        self._waiting = [line for line in self._waiting if _batch_of(line) <= now.batch]
        if now.batch >= self._last:
            return
        self._last = now.batch
        whole = self._path.with_name(f"{self._path.name}.new")
        dropped, strange = False, 0
        with whole.open("w", errors="surrogateescape") as file:
            for number, line in enumerate(self._lines(), 1):
                batch = _batch_of(line)
                if 0 <= batch <= now.batch:
                    file.write(line)
                else:
                    dropped, strange = True, strange or (batch < 0) * number
        if not dropped:
            whole.unlink()
            return
        if strange:
            aside = self._path.rename(_free(self._path))
            warn(
                f"{self._path}, line {strange}, is not a line of a FileLogger. Such lines are "
                f"left out; {aside.name} is the file as it was."
            )
        whole.replace(self._path)

    def _write_metrics(self, entries: Sequence[tuple[Timestamp, Mapping[str, float]]]) -> None:
        self._write([{**_time(time), **values} for time, values in entries])
        self._last = max(self._last, entries[-1][0].batch)

    def _write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Writes them, unless an earlier process has written the same."""
        line = {"hyperparameters": dict(hyperparameters)}
        if _spell(line) not in self._lines():
            self._write([line])

    def _write_table(self, time: Timestamp, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self._write([{**_time(time), "table": name, "rows": named}])

    def _lines(self) -> Iterator[str]:
        """The lines; the last of them is the first that is too long for one of a logger."""
        with self._path.open(errors="surrogateescape") as file:
            while line := file.readline(_LONGEST):
                yield line
                if len(line) == _LONGEST:
                    return

    def _write(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Appends all of them, and what could not be written before, or nothing."""
        self._waiting = [*self._waiting, *map(_spell, objects)][-_MOST:]
        size = None
        try:
            with self._path.open("ab") as file:
                size = file.tell()
                file.write("".join(self._waiting).encode())
        except OSError:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self._path, size)
            raise
        self._waiting = []

    def _shut(self) -> None:
        if self._waiting:
            self._write([])


def _spell(line: Mapping[str, Any]) -> str:
    return f"{json.dumps(_plain(line), allow_nan=False)}\n"


def _time(time: Timestamp) -> dict[str, float]:
    return {name: getattr(time, name) for name in _TIMES}


def _batch_of(line: str) -> float:
    """The batch of a line; infinity if the line is cut off, -1 if it is not one of this logger."""
    try:
        cut_off = not line.endswith("\n") and len(line) < _LONGEST
        batch = math.inf if cut_off else json.loads(line).get("batch", 0)
        return batch if batch >= 0 else -1
    except (ValueError, AttributeError, TypeError, RecursionError):
        return -1


def _plain(value: Any) -> Any:
    """`value` in what JSON knows; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _free(path: Path) -> Path:
    """The next unused name next to `path`."""
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return other
