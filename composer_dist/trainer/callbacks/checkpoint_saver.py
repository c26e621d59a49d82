"""Saves the run at an interval, at its end, and when the process is asked to end."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

from composer_dist.checkpoint import PendingSave, save_checkpoint
from composer_dist.checkpoint.background import finish_another
from composer_dist.checkpoint.kinds.optimizer_names import parameter_names
from composer_dist.checkpoint.storage.lock import FolderLock
from composer_dist.checkpoint.storage.place import (
    check_writable,
    clear_folder,
    local_path,
    name_from,
    place_of,
    point,
    remove_older,
    vacate,
)
from composer_dist.config.base import require
from composer_dist.distributed.prepared import state_dict_type
from composer_dist.distributed.ranks import process_group
from composer_dist.errors import (
    CheckpointError,
    CheckpointRuntimeError,
    ParallelismError,
    ParallelismValueError,
    in_words,
)
from composer_dist.trainer.callbacks.base import Callback
from composer_dist.trainer.callbacks.best_checkpoints import BestCheckpoints
from composer_dist.trainer.clock import Time, Timestamp
from composer_dist.trainer.events import Every
from composer_dist.trainer.improvement import Mode, check_measured
from composer_dist.trainer.logger import Logger
from composer_dist.trainer.signals import EXIT_STATUS, SigtermWatch
from composer_dist.trainer.state import State, contents

_log = logging.getLogger("composer_dist")
_PATIENCE = 60.0
"""Seconds that training waits for a save in the background that is still written when the next one is due."""


class CheckpointSaver(Callback):
    """Saves the whole run, so that another process can resume it exactly.

    A checkpoint holds the model, the optimizers, and what `Trainer.state_dict` returns: clock, schedulers,
    callbacks, the position in the data, each rank's random generators. It is a directory to which every rank
    writes its part, or with `FSDP2Config(state_dict_type="full")` a single file.

    One process at a time may save to a folder; others are refused (but not at a URL, which cannot be locked).
    If the disk is full, read-only or gone, one warning says so, training continues, and the next save tries
    again; `fit` raises at its end if the last save has failed. Where a save in the background has not ended a
    minute after the next one was due, that one is skipped, with a warning.

    While `fit` runs, SIGTERM does not end the process: all ranks finish the present batch or the next one,
    save, and exit with `SystemExit(143)`. Then the previous handler is restored.

    Args:
        folder: where checkpoints go, a path that all ranks see or an fsspec URL.
        interval: how often; an integer means epochs. None: only at the end.
        filename: of a checkpoint; `{epoch}`, `{batch}`, `{sample}` and `{token}` are filled in.
        keep: how many of the newest to keep, including those of earlier processes; None keeps all.
        monitor: a metric such as "loss/eval/total": the link `best` leads to the best checkpoint by it, and
            the `save_top_k` best ones are kept too. Checkpoints count that are saved after an evaluation.
        mode: whether "min" or "max" of it is good; None: "min" for a loss, an error or a perplexity.
        save_top_k: how many of the best to keep.
        weights_only: leave out the optimizers, which are most of a checkpoint: never, always (True), or in
            the one at the end ("final"). Training cannot continue from such a checkpoint.
        asynchronous: continue training while a checkpoint is written; at most one at a time.
        latest: name of a link in the folder to the newest checkpoint, or of a file with its name if links are
            impossible. None makes none.
        on_sigterm: save and exit on SIGTERM.
        overwrite: remove the checkpoints of another run from the folder when a new run begins.

    Raises:
        ParallelismValueError: the interval, `keep` or `save_top_k` is not positive; a filename that never
            changes, or is in another folder.
        CheckpointValueError: from `fit`: a new run, and the folder has checkpoints of another one.
        ParallelismKeyError: from `fit`, at its end: nothing has logged `monitor`.
        CheckpointRuntimeError: from `fit`, at its end or after SIGTERM: the last save failed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        interval: Time | str | int | None = "1ep",
        *,
        filename: str = "ep{epoch}-ba{batch}",
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Mode | None = None,
        save_top_k: int = 1,
        weights_only: bool | Literal["final"] = False,
        asynchronous: bool = True,
        latest: str | None = "latest",
        on_sigterm: bool = True,
        overwrite: bool = False,
    ) -> None:
        self.folder = os.fspath(folder)
        self._every = None if interval is None else Every("CheckpointSaver's interval", interval)
        self._filename = filename
        if keep is not None and not (isinstance(keep, int) and keep > 0):
            raise ParallelismValueError(
                f"keep={keep!r}: the newest checkpoint is always kept; None keeps all."
            )
        if monitor is None and (mode is not None or save_top_k != 1):
            raise ParallelismValueError("mode and save_top_k need a monitor, such as 'loss/eval/total'.")
        if not (isinstance(save_top_k, int) and save_top_k > 0):
            raise ParallelismValueError(f"save_top_k must be a positive integer, not {save_top_k!r}.")
        self._best = None if monitor is None else BestCheckpoints(monitor, mode, save_top_k)
        require("weights_only", weights_only, (False, True, "final"))
        self._weights_only = weights_only
        for option, name in (("filename", self._name(Timestamp())), ("latest", latest)):
            if name and name != os.path.basename(name).lstrip("."):
                raise ParallelismValueError(
                    f"{option}={name!r} must be a name in the folder, without '/' and without '.' in front."
                )
        if self._name(Timestamp()) == self._name(Timestamp(epoch=1, batch=1, sample=1, token=1)):
            raise ParallelismValueError(
                f"filename={filename!r} would be the same for all checkpoints; put {{batch}} into it."
            )
        self._keep, self._latest = keep, latest
        self._asynchronous = asynchronous
        self._on_sigterm = on_sigterm
        self._overwrite, self._new = overwrite, True
        self._sharded = True
        self._sigterm: SigtermWatch | None = None
        self._pending: PendingSave | None = None
        self._writing: str = ""
        """The path of the last save that was begun."""
        self._saved: tuple[Timestamp, int] | None = None
        """The time of the last save, and how often weights had been restored before it."""
        self._failure: CheckpointError | None = None
        """Why the last save failed, which has been reported."""
        self._slow = False
        """Whether it has been reported that a save takes long."""
        self._lock: FolderLock | None = None
        if (path := local_path(self.folder)) is not None:
            self._lock = FolderLock(path, f"the folder of checkpoints {path}", "another folder")

    def init(self, state: State, logger: Logger) -> None:
        """Finds out now whether the folder can be written, and not at the first save.

        Raises:
            ParallelismValueError: single files at a URL, from which they cannot be loaded; another process
                saves to the folder.
        """
        self._sharded = state_dict_type(state.model) == "sharded"
        if not self._sharded and local_path(self.folder) is None:
            raise ParallelismValueError(
                f'FSDP2Config(state_dict_type="full"): no run can be resumed from single files at a URL '
                f'({self.folder}). Use state_dict_type="sharded", or a folder.'
            )
        with process_group.together("the folder of checkpoints"):
            if state.rank == 0:
                check_writable(self.folder)
                self._take_lock()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Watches for SIGTERM; what has passed of the interval counts as saved."""
        with process_group.together("the folder of checkpoints"):
            if state.rank == 0:
                self._take_lock()
                if self._new and not state.timestamp.batch:
                    vacate(self.folder, self._name(state.timestamp), self._overwrite)
        self._new = False
        if self._best is not None:
            check_measured("CheckpointSaver", self._best.monitor, state)
        for optimizer in state.optimizers:
            parameter_names(state.model, optimizer)  # raises now if it cannot be saved
        if self._every is not None:
            self._every.start(state)
        if self._on_sigterm:
            self._sigterm = SigtermWatch(state.raise_alarm)
            self._sigterm.install()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if it is time; ends the process if it has been asked to."""
        if state.alarmed:
            self._finish()
            self._end_if_asked(state)
        if state.timestamp.batch_in_epoch != state.train_length:  # else the epoch ends now and is saved
            self._save_if_due(state)
        if self._pending is not None and self._pending.done:
            state.raise_alarm()  # all ranks finish it together, after the next batch

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._best is not None:
            self._best.evaluated(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._save_last(state, final=True)
        if self._sigterm is not None:
            self._sigterm.restore()
        self._end_if_asked(state)
        self._release_lock()
        if self._best is not None:
            self._best.check(state)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._best.values} if self._best is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._best is not None:
            self._best.values = dict(state.get("values", {}))

    def close(self, state: State, logger: Logger) -> None:
        """Waits for the present save, and restores the signal handler."""
        if self._sigterm is not None:
            self._sigterm.restore()
        try:
            self._wait()
        except ParallelismError as error:  # another error may be propagating
            _log.error("The last checkpoint was not saved: %s", error)
        self._release_lock()

    def _take_lock(self) -> None:
        if self._lock is not None:
            self._lock.take()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _save_if_due(self, state: State) -> None:
        if self._every is not None and self._every.passed(state) and not self._is_slow():
            self._save(state, final=state.finished or process_group.any_rank(state.stop_requested))

    def _is_slow(self) -> bool:
        """Whether the present save still takes long; all ranks ask."""
        if self._pending is None:
            return False
        done = self._pending.done_within(0 if self._slow else _PATIENCE)
        slow = process_group.any_rank(not done)
        if slow and not self._slow:
            self._slow = True
            self._warn(f"{self._writing} is still being written. Training continues without the next one.")
        return slow

    def _save(self, state: State, final: bool = False) -> None:
        now = replace(state.timestamp, seconds=0.0)
        self._finish()
        saves = now, state.restored
        if self._saved == saves:
            return
        self._writing = path = f"{self.folder.rstrip('/')}/{self._name(now)}"
        if self._best is not None:
            self._best.measure(os.path.basename(path), state)
        saved = contents(state, optimizers=not (self._weights_only if final else self._weights_only is True))
        finish_another()
        with self._or_later():
            with process_group.together("the folder of checkpoints"):
                if state.rank == 0 and self._lock is not None:
                    self._lock.check()
                    clear_folder(self.folder, self._filename)
            self._pending = save_checkpoint(
                path, saved, sharded=self._sharded, asynchronous=self._asynchronous
            )
            self._saved = saves
            if self._pending is None:
                self._complete()

    def _save_last(self, state: State, final: bool = False) -> None:
        """Save, and raise if that fails."""
        self._save(state, final)
        self._finish()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def _or_later(self) -> Iterator[None]:
        """A failed write is reported once, the same on all ranks, and the next save tries again."""
        try:
            yield
        except CheckpointRuntimeError as error:
            if self._failure is None:
                self._warn(f"Not saved: {error} Training continues, and the next save tries again.")
            self._failure, self._saved = error, None
            if self._best is not None:
                self._best.forget(os.path.basename(self._writing))

    def _warn(self, text: str) -> None:
        """Rank 0 logs the text, and from where the run could be resumed."""
        if process_group.world_and_rank()[1] == 0:
            found: list[str] = []
            with suppress(Exception):  # the disk may be gone
                found = place_of(self.folder).inside()
            _log.warning("%s The last complete checkpoint: %s.", text, found[0] if found else "none is found")

    def _finish(self) -> None:
        """Wait until the present save is complete or has failed."""
        with self._or_later():
            self._wait()

    def _wait(self) -> None:
        """Wait until the present save is complete; then point `latest` to it, and remove the oldest."""
        if self._pending is None:
            return
        try:
            self._pending.wait()
        except Exception:  # not Ctrl-C, after which `close` waits again
            self._pending = None
            raise
        self._pending = None
        self._complete()

    def _complete(self) -> None:
        """The last save is complete: point `latest` to it, and remove the oldest."""
        path = self._writing
        if process_group.world_and_rank()[1] == 0:
            if self._failure is not None or self._slow:
                _log.warning("Saving works again: %s is complete.", path)
            try:
                if self._latest:
                    point(self.folder, self._latest, path.rpartition("/")[2])
                there = [os.path.basename(one) for one in (path, *place_of(path).beside())]
                spare = [] if self._best is None else self._best.among(there)
                if spare:
                    point(self.folder, "best", spare[0])
                remove_older(place_of(path), self._keep, spare)
            except (OSError, CheckpointError) as error:
                _log.warning(
                    "%s is complete, but %r or the oldest ones could not be changed: %s",
                    *(path, self._latest, in_words(error)),
                )
        self._failure, self._slow = None, False

    def _end_if_asked(self, state: State) -> None:
        """All ranks save and end, if SIGTERM has come to any of them."""
        asked = self._sigterm is not None and self._sigterm.received
        if not process_group.any_rank(asked):
            return
        self._save_last(state)
        if state.rank == 0:
            text = "SIGTERM: checkpoint saved in %s, exiting with status %d. Run the same command to resume."
            _log.warning(text, self.folder, EXIT_STATUS)
        raise SystemExit(EXIT_STATUS)

    def _name(self, now: Timestamp) -> str:
        return name_from(self._filename, {k: getattr(now, k) for k in ("epoch", "batch", "sample", "token")})
