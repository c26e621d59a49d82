"""Where a rank stands: what it does, its Python stack, and the collectives that it has entered."""

import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from composer_dist import _torch

State = Literal["runs", "left", "failed", "ended", "stopped", "blocked", "silent"]
"""Of a rank: its threads run, it has left the guarded part or failed there, its process has ended or is
stopped, a call in C holds the GIL, or nothing is known but that it does not answer."""


class Frame(NamedTuple):
    """A line that runs."""

    file: str
    line: int
    function: str


class Entered(NamedTuple):
    """How many collectives a rank has entered in a process group."""

    ranks: Sequence[int]
    number: int


@dataclass(frozen=True)
class Stand:
    """Where one rank stands."""

    rank: int
    doing: str = ""
    seconds: float = 0.0
    """Since it last made progress."""
    state: State = "runs"
    stack: Sequence[Frame] = ()
    """Of the main thread, the innermost frame last."""
    entered: Mapping[str, Entered] = field(default_factory=dict)
    """By the name of the group."""

    def packed(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> "Stand":
        """The inverse of `packed`."""
        stack = [Frame(*one) for one in packed["stack"]]
        entered = {name: Entered(*one) for name, one in packed["entered"].items()}
        return cls(**{**packed, "stack": stack, "entered": entered})

    def in_data(self) -> bool:
        """Whether it waits for a data loader."""
        return any("/torch/utils/data/" in frame.file for frame in self.stack)

    def collective(self) -> str | None:
        """What of torch.distributed the main thread runs, or "backward"; None if it is elsewhere."""
        found = None
        for frame in reversed(self.stack):
            if not _WITHIN.search(frame.file):
                return found
            if "/torch/distributed/" in frame.file and frame.function not in _WRAPPERS:
                found = found or frame.function
                if frame.file.endswith("/distributed_c10d.py"):
                    return frame.function
            elif frame.function == "_engine_run_backward":
                found = found or "backward"
        return found


_WITHIN = re.compile(r"/torch/|/composer_dist/|/threading\.py$|/contextlib\.py$|/functools\.py$")
_WRAPPERS = ("wrapper", "_fn", "__torch_dispatch__", "__torch_function__")


def stand_here(rank: int, doing: str, seconds: float) -> Stand:
    """Of this process."""
    entered = {name: Entered(*one) for name, one in _torch.collectives_entered().items()}
    return Stand(rank, doing, seconds, "runs", main_stack(), entered)


def main_stack() -> list[Frame]:
    """Of this process's main thread."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.StackSummary.extract(traceback.walk_stack(main), lookup_lines=False) if main else []
    return [Frame(one.filename, one.lineno or 0, one.name) for one in reversed(lines)]


def stack_in(dump: str) -> list[Frame]:
    """The main thread's stack of what faulthandler has written: that of the thread that began first."""
    last = re.split(r"^(?:Current thread|Thread) .*:$", dump, flags=re.MULTILINE)[-1]
    found = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', last, flags=re.MULTILINE)
    return [Frame(file, int(line), function) for file, line, function in reversed(found)]
