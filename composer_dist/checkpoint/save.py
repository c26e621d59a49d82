"""Saves checkpoints: by name, each byte once, and in one atomic step."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from composer_dist.checkpoint.background import PendingSave, finish_pending, in_background, stage
from composer_dist.checkpoint.format.sharded import Saving
from composer_dist.checkpoint.format.single_file import SavingFile
from composer_dist.checkpoint.kinds.contents import (
    Filters,
    check_contents,
    check_same_call,
    extract,
    kind_of,
    kinds_in,
    models_in,
)
from composer_dist.checkpoint.kinds.optimizer_names import check_alike, model_of, plain_hashes
from composer_dist.checkpoint.storage.place import Place, place_of
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.replication.replica import settle
from composer_dist.errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError
from composer_dist.files.checkpoint_format import Kind


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    sharded: bool = True,
    filter: Filters = None,
    asynchronous: bool = False,
    keep: int | None = None,
    model: nn.Module | None = None,
) -> PendingSave | None:
    """Save models, optimizers and whatever else a run consists of, on all ranks together.

    The checkpoint appears at `path` in one step, when all of it is on the disk. An older one stays valid
    until then; other files in its directory stay.

    Args:
        path: a path that all ranks see, or an fsspec URL such as `s3://...`; the first rank's is used.
        state: what to save, by key. A model is saved by its `state_dict()` names, an optimizer by its
            parameters' names, an object with `state_dict` and `load_state_dict` by its state. Tensors and
            plain values are saved as they are on the first rank.
        sharded: write a directory in the format of torch.distributed.checkpoint, to which every rank
            writes what it holds. Otherwise the first rank writes one file, which `torch.load` reads.
        filter: `(name, value) -> bool` selects what is saved of the models; or such functions by key.
        asynchronous: return once everything has been copied to host memory, and write in the background.
            The next save waits for it; `PendingSave.check` and `wait` raise its error.
        keep: how many of the newest checkpoints in the same directory to keep, this one included.
        model: the model that an optimizer belongs to, if the state has no model.

    Returns:
        With `asynchronous`, the save in progress.

    Raises:
        CheckpointValueError: there is nothing to save or no (parallel) model, the ranks differ, a value
            cannot be pickled, or a single file is to be written at a URL.
        CheckpointIsADirectoryError: not `sharded`, and the path is a directory that is not a checkpoint.
        CheckpointRuntimeError: it cannot be written.
    """
    finish_pending()
    agreement = Agreement()
    place, token = _reserve(path, state, sharded, filter, keep, model, agreement)
    try:
        models = models_in(state, model)
        settle(*models)
        contents: dict[str, tuple[Kind, Any]] = {}

        def take() -> dict[str, int]:
            for key, value in state.items():
                contents[key] = kind_of(value), extract(key, value, models, filter, whole=not sharded)
            optimizers = {key: value for key, (kind, value) in contents.items() if kind == "optimizer"}
            pairs = [(model_of(state[key], models), value["state"]) for key, value in optimizers.items()]
            return {name: one for pair in pairs for name, one in plain_hashes(*pair).items()}

        agreement.each("the states to save", take, check_alike)
        job: Saving | SavingFile
        if sharded:
            job = Saving.plan(place, token, keep, contents, agreement)
        else:
            values = {key: value for key, (_, value) in contents.items()}
            job = SavingFile.gather(place, token, keep, values, agreement)
        if asynchronous:
            stage(job)
    except BaseException:
        if agreement.rank == agreement.ranks[0]:
            place.discard(token)
        raise
    if asynchronous:
        return in_background(job)
    job.run(agreement)
    return None


def _reserve(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    sharded: bool,
    filters: Filters,
    keep: int | None,
    model: nn.Module | None,
    agreement: Agreement,
) -> tuple[Place, str]:
    """Reserve the first rank's place, with a token of this save; if this raises, nothing has changed."""
    error: Exception | None = None
    post: list[Any] = []
    try:
        check_contents(state, model, filters)
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise CheckpointValueError(f"keep={keep!r}: pass how many checkpoints to keep, at least 1.")
        post = [os.fspath(path), {"sharded": sharded, "keep": keep}, kinds_in(state)]
    except Exception as caught:
        error = caught

    def decide(posts: list[list[Any]]) -> list[str]:
        check_same_call("save", posts)
        try:
            where = place_of(posts[0][0])
            return [os.fspath(where.path), where.reserve(sharded)]
        except OSError as failed:
            if isinstance(failed, CheckpointError):
                raise
            raise CheckpointRuntimeError(
                f"Cannot save to {posts[0][0]}: {failed.strerror or failed}."
            ) from failed

    agreed, token = agreement.reach("the place of the checkpoint", post, decide, error)
    return place_of(agreed), token
