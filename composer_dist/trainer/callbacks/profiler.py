"""Traces of some batches, by torch.profiler."""

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

from composer_dist._torch import dump_memory_history, record_memory_history
from composer_dist.errors import ParallelismValueError
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.state import State

_log = logging.getLogger("composer_dist")


class Profiler(Callback):
    """Records some batches with `torch.profiler` and writes traces, which https://ui.perfetto.dev shows.

    After `skip_first` batches, of each window of `wait + warmup + active` batches the last `active` ones are
    recorded, in `<folder>/rank<rank>-ba<last batch>.json.gz`.

    Args:
        folder: where the traces go; made if it does not exist.
        skip_first: batches before the first window.
        wait: batches of a window that are left alone.
        warmup: batches that the profiler watches without recording them.
        active: batches that are recorded.
        repeat: how many windows; 0: until the end of the fit.
        ranks: which ones record; None: all.
        record_shapes: record the shapes of operators' inputs.
        profile_memory: record what operators allocate.
        with_stack: record where in the code operators are called.
        memory_snapshot: also write `<the same name>.memory.pickle`, a CUDA device's memory and every
            allocation of the fit so far, for https://pytorch.org/memory_viz.

    Raises:
        ParallelismValueError: a negative number of batches, none to record, or a rank that does not exist; a
            snapshot of the memory on a device that keeps no history of it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "profile",
        *,
        skip_first: int = 2,
        wait: int = 0,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        ranks: Sequence[int] | int | None = (0,),
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        memory_snapshot: bool = False,
    ) -> None:
        self._batches = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active}
        wrong = {name: count for name, count in (self._batches | {"repeat": repeat}).items() if count < 0}
        if wrong or not active:
            name, count = next(iter(wrong.items()), ("active", active))
            least = "positive" if name == "active" else "0 or more"
            raise ParallelismValueError(f"Profiler: {name} must be {least}, not {count}.")
        self._repeat, self._folder = repeat, Path(folder)
        self._ranks = (ranks,) if isinstance(ranks, int) else ranks
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._memory_snapshot = memory_snapshot
        self._profile: profile | None = None
        self._batch, self._written = 0, 0

    def init(self, state: State, logger: Logger) -> None:
        if strangers := [rank for rank in self._ranks or () if rank not in range(state.world_size)]:
            raise ParallelismValueError(
                f"Profiler: there is no rank {strangers[0]}; the ranks are 0 to {state.world_size - 1}."
            )
        if self._memory_snapshot and state.device.type != "cuda":
            raise ParallelismValueError(
                f"Profiler(memory_snapshot=True): {state.device.type!r} keeps no history of its memory, only "
                "'cuda' does. Use profile_memory=True."
            )

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts to count batches."""
        if self._ranks is not None and state.rank not in self._ranks:
            return

        def write(profiled: profile) -> None:
            self._write(profiled, state.rank)

        self._folder.mkdir(parents=True, exist_ok=True)
        self._written = 0
        self._profile = profile(
            schedule=schedule(repeat=self._repeat, **self._batches), on_trace_ready=write, **self._options
        )
        if self._memory_snapshot:
            record_memory_history()
        self._profile.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch = state.timestamp.batch
        if self._profile is not None:
            with warnings.catch_warnings():
                # It says that each trace has the events of its own window only.
                warnings.filterwarnings("ignore", ".*Profiler clears events", UserWarning)
                self._profile.step()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Warns if the fit was too short to record anything."""
        recording = self._profile is not None
        self._stop()
        if recording and not self._written:
            counts = ", ".join(f"{name}={count}" for name, count in self._batches.items())
            _log.warning("Profiler: the fit ended before there was anything to record (%s).", counts)

    def close(self, state: State, logger: Logger) -> None:
        self._stop()

    def _stop(self) -> None:
        profiled, self._profile = self._profile, None
        if profiled is not None:
            profiled.stop()
            if self._memory_snapshot:
                record_memory_history(None)

    def _write(self, profiled: Any, rank: int) -> None:
        name = f"rank{rank}-ba{self._batch}"
        profiled.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        if self._memory_snapshot:
            dump_memory_history(str(self._folder / f"{name}.memory.pickle"))
        self._written += 1
        _log.info("Profiler: wrote %s.", self._folder / f"{name}.json.gz")
