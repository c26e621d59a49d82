"""Where a run writes; known without torch."""

import os
import tempfile
from pathlib import Path

from composer_dist.errors import ParallelismValueError
from composer_dist.recipe.named import PLACES
from composer_dist.recipe.schema import Run

EXPORTS = ("model", "model.pt", "adapter")
_LINKS = (*EXPORTS, "checkpoints", "base", PLACES["tensorboard"]["log_dir"])
"""What a link could make the run write, replace or remove elsewhere."""


def check_places(run: Run) -> None:
    """Checks that the run can write its files, as far as that is known without making a folder.

    Raises:
        ParallelismValueError: it cannot.
    """
    for name in _LINKS:
        link, target = run.out / name, Path(os.path.realpath(run.out / name))
        if os.path.islink(link) and not target.is_relative_to(os.path.realpath(run.out)):
            raise ParallelismValueError(
                f"{link} is a link that leads out of out, to {target}. Remove the link; for another place "
                "of the checkpoints set checkpoints.folder."
            )
    places = {"out": run.out, "checkpoints.folder": (run.checkpoints or {}).get("folder")}
    for logger, key in (("file", "path"), ("tensorboard", "log_dir")):
        places[f"loggers.{logger}.{key}"] = (run.loggers.get(logger) or {}).get(key)
    places["callbacks.profiler.folder"] = (run.callbacks.get("profiler") or {}).get("folder")
    places["phases.write_to"] = (run.phases or {}).get("write_to")
    for key, place in places.items():
        if not place or "://" in str(place):
            continue
        path, is_file = Path(str(place)).absolute(), key.endswith(("path", "write_to"))
        try:
            above = next(one for one in (path, *path.parents)[is_file:] if one.exists())
        except OSError as error:  # a name that is too long, say
            raise ParallelismValueError(f"{key}={place} cannot be written: {error.strerror}.") from None
        try:
            tempfile.TemporaryFile(dir=above).close()  # permissions do not say it of every file system
        except OSError:
            raise ParallelismValueError(
                f"{key}={place} cannot be written: {above} is not a folder to write to."
            ) from None
        if is_file and path.is_dir():
            raise ParallelismValueError(f"{key}={place} is a folder: give the name of a file in it.")
