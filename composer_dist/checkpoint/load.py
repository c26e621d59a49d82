"""Loads checkpoints onto any mesh: every rank reads its own part."""

import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer_dist.checkpoint.background import finish_pending
from composer_dist.checkpoint.format.opened import Opened, open_checkpoint
from composer_dist.checkpoint.kinds.contents import (
    KINDS,
    check_same_call,
    kind_of,
    kinds_in,
    models_in,
    stored_kind,
)
from composer_dist.checkpoint.kinds.kind import Loading, Restore
from composer_dist.distributed.prepared import usable_or_marked
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.weights.disk import check_same_files
from composer_dist.errors import CheckpointError, CheckpointValueError
from composer_dist.users_code import warn

BARE = "the state"


def load_checkpoint(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any] | nn.Module | Optimizer | None = None,
    *,
    strict: bool = True,
    model: nn.Module | None = None,
    ignore: Callable[[str], bool] = lambda name: False,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Restore the contents of `state` from a checkpoint, on all ranks together, on any mesh.

    Models and optimizers get their values in place, whatever mesh they were saved on; parameters on the
    meta device become real. Objects with `load_state_dict` are restored by it; other values of the mapping
    are replaced. Everything is checked before anything is changed.

    Args:
        path: a directory or file of `save_checkpoint`, or a single file of Composer, Lightning Fabric or
            PyTorch Lightning; the first rank's is used.
        state: what to restore, by key; or a single model or optimizer, for a file with the bare state of one;
            None restores nothing and returns everything, with full tensors.
        strict: raise if a requested name is missing, or if the model has no place for a saved one.
            Otherwise load what matches and list the rest in a warning.
        model: the model that an optimizer belongs to, if the state has no model.
        ignore: a function that returns whether to skip a name such as "model.head.weight".
        verify: compare all bytes with their checksums first; every rank does a share.
        allow_pickle: let the checkpoint's pickles run any code; only for sources that you trust.

    Returns:
        The other values in the checkpoint, by key; states of models and optimizers only if `state` is None.
        A single file does not record which are models: there, it is the mapping of tensors named "model".

    Raises:
        CheckpointKeyError: names that are missing or unexpected, all of them.
        CheckpointValueError: there is no checkpoint, it is damaged, shapes differ, or it has different values
            for tensors that the model ties.
        CheckpointRuntimeError: a file cannot be read. If loading had begun, the models and optimizers are
            unusable.
    """
    options = {"strict": strict, "verify": verify, "allow_pickle": allow_pickle}
    return load_contents(path, state, None, model, ignore, **options)


def load_contents(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any] | nn.Module | Optimizer | None,
    rest: Collection[str] | None,
    model: nn.Module | None = None,
    ignore: Callable[[str], bool] = lambda name: False,
    *,
    strict: bool = True,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Load as `load_checkpoint` does, and read only some of the other values.

    Args:
        rest: the keys of other values to return, if the checkpoint has them; None means all.
    """
    finish_pending()
    agreement = Agreement()
    options = {"strict": strict, "verify": verify, "allow_pickle": allow_pickle}
    where = _agreed_path(path, state, options, agreement)
    opened = _open(where, allow_pickle, verify, agreement)
    if state is None:
        with agreement.together("reading the checkpoint"):
            return {key: opened.value(code) for key, code in opened.structure.items()}
    if isinstance(state, (nn.Module, Optimizer)):
        opened = _as_bare(opened)
        state = {BARE: state}
    with agreement.together("matching the checkpoint"):
        loadings = _match(Restore(opened, state, models_in(state, model), ignore), where, strict)
        for loading in loadings:
            loading.prepare()
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    with usable_or_marked(*optimizers, *models_in(state, None)):
        for loading in loadings:
            loading.load(agreement)
    return _rest(opened, state, rest)


def check_loading(
    path: str, state: MutableMapping[str, Any], strict: bool, ignore: Callable[[str], bool], verify: bool
) -> None:
    """Raise what `load_checkpoint` would before it changes anything; models may be on the meta device."""
    agreement = Agreement()
    opened = _open(path, False, verify, agreement)
    with agreement.together("matching the checkpoint"):
        _match(Restore(opened, state, models_in(state, None), ignore), path, strict)


def _agreed_path(path: Any, state: Any, options: dict[str, bool], agreement: Agreement) -> str:
    """The first rank's path; the ranks make the same call, or all raise."""
    error: Exception | None = None
    post: list[Any] = []
    try:
        if path is None:
            raise CheckpointValueError(
                "There is no checkpoint to load: the path is None. latest_checkpoint returns None if it "
                "finds none; start over then."
            )
        post = [os.fspath(path), options, kinds_in(state if isinstance(state, Mapping) else {BARE: state})]
    except Exception as caught:
        error = caught

    def decide(posts: list[list[Any]]) -> Any:
        check_same_call("load", posts)
        return posts[0][0]

    agreed: str = agreement.reach("the place of the checkpoint", post, decide, error)
    return agreed


def _open(agreed: str, allow_pickle: bool, verify: bool, agreement: Agreement) -> Opened:
    """Open and verify the checkpoint, which must be the same on all ranks."""
    opened: Opened

    def open_here() -> str:
        nonlocal opened
        opened = open_checkpoint(agreed, allow_pickle)
        return opened.digest()

    def compare(digests: list[str]) -> None:
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise CheckpointValueError(f"Ranks 0 and {rank} see different checkpoints at {agreed}.")

    agreement.each("opening the checkpoint", open_here, compare)
    if not opened.stored and isinstance(opened.root, Path):  # other libraries' files have no checksums
        check_same_files(opened.root, opened.index, agreement)
    if verify:
        with agreement.together("verifying the checkpoint"):
            opened.verify(agreement.ranks.index(agreement.rank), len(agreement.ranks))
    return opened


def _match(restore: Restore, where: str, strict: bool) -> list[Loading]:
    """Plan the loading of each key; raises, or warns of what is left out, once for all keys."""
    state, mismatch = restore.state, restore.mismatch
    known = [key for key in state if key in restore.opened.structure]
    mismatch.missing += [key for key in state if key not in known]
    loadings = [KINDS[kind_of(state[key])].plan(restore, key) for key in known]
    mismatch.check(f"{where} does not match", strict)
    if names := mismatch.names():
        warn(f"{where} was loaded in part. {'. '.join(names)}.")
    return loadings


def _as_bare(opened: Opened) -> Opened:
    """A file with the state of one model or optimizer, as a checkpoint with a single key."""
    if opened.sharded:
        raise CheckpointValueError(
            f"{opened.where} is a directory with keys ({', '.join(opened.structure)}), and not a file with "
            'the bare state of one model or optimizer; load_checkpoint(path, {"key": ...}).'
        )
    opened.structure = {BARE: {"dict": [[key, code] for key, code in opened.structure.items()]}}
    return opened


def _rest(opened: Opened, state: Mapping[str, Any], wanted: Collection[str] | None) -> dict[str, Any]:
    """Other values that `state` does not have; warns of values that only an unsafe reader could read."""
    rest: dict[str, Any] = {}
    for key, code in opened.structure.items():
        kind = stored_kind(opened, key)
        known = key in opened.kinds or key == "model" or kind == "optimizer"
        if key in state or (kind != "value" and known) or (wanted is not None and key not in wanted):
            continue
        try:
            rest[key] = opened.value(code)
        except CheckpointError as error:
            warn(f"{key!r} of the checkpoint is left out: {error}")
    return rest
