"""Resuming: what a run saves besides its model and optimizers, and how another process loads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composer_dist.checkpoint import latest_checkpoint
from composer_dist.checkpoint.latest import newest_intact
from composer_dist.checkpoint.load import check_loading, load_contents
from composer_dist.checkpoint.storage.place import place_of
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointValueError, ParallelismTypeError, ParallelismValueError
from composer_dist.files.read import file_system
from composer_dist.trainer.callbacks import Callback
from composer_dist.trainer.callbacks.checkpoint_saver import CheckpointSaver
from composer_dist.trainer.clock import check_keys
from composer_dist.trainer.data.position import check_position
from composer_dist.trainer.data.randomness import generator_states, set_generator_states
from composer_dist.trainer.loop import TrainingLoop
from composer_dist.trainer.resuming.ignored import Ignored
from composer_dist.trainer.resuming.settings import Options, Source, compare, settings_of
from composer_dist.trainer.state import WEIGHTS_ONLY, State, contents
from composer_dist.users_code import warn
from composer_dist.wording import listed


def run_state(state: State, loop: TrainingLoop, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """What a run saves besides its model and optimizers; every rank must ask."""
    states = {name: callback.state_dict() for name, callback in _numbered(callbacks).items()}
    return {
        "state": state.state_dict() | {"evaluated": dict(loop.evaluated), "settings": state.settings},
        "loss_scaler": state.loss_scaler.state_dict() if state.loss_scaler else None,
        "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
        "callbacks": {name: one for name, one in states.items() if one},
        "data": loop.place(),
        "generators": process_group.gather_objects(generator_states(state.device, loop.generators())),
    }


def load_run_state(
    state: State, loop: TrainingLoop, callbacks: Sequence[Callback], saved: Mapping[str, Any]
) -> None:
    """Loads what `run_state` returned; a callback that has no state there stays as it is.

    Call it before the optimizers' states are loaded: callbacks that change the optimizers' groups restore
    them here.
    """
    saved = dict(saved)
    place, generators = saved.pop("data", None), saved.pop("generators", [])
    check_keys("Trainer", saved, ("state", "loss_scaler", "schedulers", "callbacks"))
    _check_number(saved["schedulers"], state)
    named = _numbered(callbacks)
    if gone := [name for name in saved["callbacks"] if name not in named]:
        warn(f"The saved states of {', '.join(gone)} are not used: the Trainer has no such callbacks.")
    clock = dict(saved["state"])
    clock.pop("settings", None)
    loop.evaluated.clear()
    loop.evaluated.update(clock.pop("evaluated", {}))
    state.load_state_dict(clock)
    for name, callback in named.items():
        if name in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][name])
    if state.loss_scaler and saved["loss_scaler"]:
        state.loss_scaler.load_state_dict(saved["loss_scaler"])
    for scheduler, one in zip(state.schedulers, saved["schedulers"], strict=True):
        scheduler.load_state_dict(one)  # after the callbacks, which may add groups to the optimizers
    loop.go_to(place)
    if state.rank < len(generators):  # a rank that was not there draws as it was seeded
        set_generator_states(generators[state.rank], state.device)


def _check_number(saved: Sequence[Any], state: State) -> None:
    if len(saved) != len(state.schedulers):
        raise CheckpointValueError(
            f"The checkpoint's run had {len(saved)} of torch's schedulers, but the Trainer has "
            f"{len(state.schedulers)}: pass the same ones."
        )


def _numbered(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by class and number: `EarlyStopping/0`."""
    named: dict[str, Callback] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        named[f"{kind}/{counts.get(kind, 0)}"] = callback
        counts[kind] = counts.get(kind, 0) + 1
    return named


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where a Trainer begins; names are Composer's."""

    load_path: str | os.PathLike[str] | None = None
    """A checkpoint, or `latest` in a folder of them."""
    load_weights_only: bool = False
    """Take the model and nothing else: a new run with these weights."""
    load_strict_model_weights: bool = True
    """Names missing in the model or the checkpoint are an error; if False, whatever matches is loaded."""
    load_ignore_keys: Sequence[str] = ()
    """Globs of what not to load: `model.head.*`, `optimizer`, `schedulers`, `callbacks.EarlyStopping/0`,
    `data`, `generators`. Warns of a glob that matches nothing."""
    optimizer: Source = "checkpoint"
    """Whose options (the learning rate, the weight decay, ...) the optimizers have where they differ: the
    checkpoint's, or those of the Trainer's ("config"). With "config" an optimizer of another class than the
    checkpoint's starts without state; otherwise it is an error."""
    autoresume: bool = False
    """Resume from the newest complete checkpoint in the folder of the `CheckpointSaver`. If there is none
    yet, the run starts from `load_path`, if given, and then the fields above hold only for that."""

    def __post_init__(self) -> None:
        if isinstance(self.load_ignore_keys, str):
            raise ParallelismTypeError(f"load_ignore_keys is a list: write [{self.load_ignore_keys!r}].")
        if self.load_path is None and not self.autoresume:
            raise ParallelismValueError("Resume needs a load_path or autoresume=True.")
        if self.optimizer not in ("checkpoint", "config"):
            raise ParallelismValueError(f"optimizer is 'checkpoint' or 'config', not {self.optimizer!r}.")
        if self.load_path is None and self.load_weights_only:
            raise ParallelismValueError(
                "load_weights_only says what to load from load_path, which is None; autoresume loads a "
                "whole run."
            )

    @classmethod
    def of(
        cls,
        resume: Resume | str | os.PathLike[str] | bool | None,
        load_path: str | os.PathLike[str] | None = None,
        autoresume: bool = False,
    ) -> Resume | None:
        """`resume` itself; a path to load; True means autoresume. Or else from the other two arguments."""
        if isinstance(resume, bool | None):
            autoresume = autoresume or bool(resume)
            return cls(load_path=load_path, autoresume=autoresume) if load_path or autoresume else None
        if load_path is not None or autoresume:
            raise ParallelismValueError("Pass either resume, or load_path and autoresume.")
        return resume if isinstance(resume, Resume) else cls(load_path=resume)


def resume_run(
    resume: Resume,
    state: State,
    callbacks: Sequence[Callback],
    take_over: Callable[[Mapping[str, Any]], None],
) -> str | None:
    """Loads what `resume` asks for; a collective.

    Args:
        take_over: loads what `State.remember` once returned, before the optimizers get their states.

    Returns:
        The checkpoint's path; None where autoresume found none, and a new run begins.
    """
    path, chosen, damaged = _find(resume, callbacks)
    if damaged:

        def set_aside(ranks: list[str]) -> list[str]:
            return [place_of(one).set_aside() for one in damaged]

        moved = Agreement().reach("setting aside damaged checkpoints", "", set_aside)
        warn(f"Damaged checkpoints are kept as {listed(moved)}.")
    if path is None:
        return None
    verify = chosen is resume  # else it has been verified
    ignored = Ignored(chosen.load_ignore_keys)
    options = [Options(optimizer) for optimizer in state.optimizers]
    fresh: list[int] = []
    if not chosen.load_weights_only:
        fresh = _load_run(path, chosen, state, callbacks, ignored, take_over, verify)
    if wanted := _trained(chosen, state, ignored, fresh):
        load_contents(
            path,
            wanted,
            (),
            state.model,
            ignored,
            strict=chosen.load_strict_model_weights,
            verify=verify and chosen.load_weights_only,  # else it has been
        )
    if chosen.optimizer == "config" and not chosen.load_weights_only:
        for index, one in enumerate(options):
            one.restore(state.schedulers, index in fresh)
    ignored.warn()
    return path


def check_can_train(state: State) -> None:
    """Raises if the optimizers would start over in the middle of a run."""
    if state.weights_only is not None:
        raise ParallelismValueError(
            f"{state.weights_only} has no states of the optimizers (weights_only), so training cannot "
            "continue. Resume from an earlier checkpoint; or start a new run from these weights with "
            "Resume(load_path=..., load_weights_only=True) and another folder to save to; or let the "
            "optimizers start over with load_ignore_keys=['optimizer*']. In YAML these are keys of resume."
        )


def check_resume(resume: Resume, state: State, callbacks: Sequence[Callback], data: Any) -> str | None:
    """Raises what `resume_run` would, and `fit` after it with `data`.

    It loads the schedulers and the position only, so the model may be on the meta device.
    """
    path, chosen, _ = _find(resume, callbacks)
    if path is None:
        return None
    ignored, verify, fresh = Ignored(chosen.load_ignore_keys), chosen is resume, []
    if not chosen.load_weights_only and not ignored("state"):
        saved: dict[str, Any] = {key: None for key in ("state", "schedulers", "data") if not ignored(key)}
        rest = load_contents(path, saved, [WEIGHTS_ONLY], verify=verify)
        verify = False
        settings = saved["state"].get("settings", {})
        classes = {
            name: settings[name] for name in settings if re.fullmatch(r"(optimizer|scheduler)\d*", name)
        }
        state.settings = {name: now for name, now in settings_of(state, None, {}).items() if name in classes}
        fresh = compare(path, classes, state, chosen.optimizer, ignored)
        fresh = _without_states(path, rest, state, ignored) or fresh
        if "schedulers" in saved:
            _check_number(saved["schedulers"], state)
            for scheduler, one in zip(state.schedulers, saved["schedulers"], strict=True):
                scheduler.load_state_dict(one)
        if saved.get("data"):
            check_position(data, saved["data"])
    wanted = _trained(chosen, state, ignored, fresh)
    check_loading(path, wanted, chosen.load_strict_model_weights, ignored, verify)
    return path


def _find(resume: Resume, callbacks: Sequence[Callback]) -> tuple[str | None, Resume, list[str]]:
    """The checkpoint to begin with, how to load it, and newer ones that are damaged."""
    newest, damaged = _newest(callbacks) if resume.autoresume else (None, [])
    if newest is not None:
        ignore = () if resume.load_path else resume.load_ignore_keys
        return newest, Resume(load_path=newest, load_ignore_keys=ignore, optimizer=resume.optimizer), damaged
    return None if resume.load_path is None else _followed(os.fspath(resume.load_path)), resume, []


def _newest(callbacks: Sequence[Callback]) -> tuple[str | None, list[str]]:
    folders = [callback.folder for callback in callbacks if isinstance(callback, CheckpointSaver)]
    if not folders:
        raise ParallelismValueError("autoresume needs a CheckpointSaver, whose folder it looks in.")
    newest, damaged = newest_intact(folders[0])
    if newest is None and damaged:
        raise CheckpointValueError(
            f"All checkpoints in {folders[0]} are damaged: {listed(damaged)}. Restore one of them from a "
            "copy, or move them elsewhere to start over."
        )
    return newest, damaged


def _followed(path: str) -> str:
    """Where `latest` leads, a link or a file with a name; the newest checkpoint if that one is gone."""

    def follow(paths: list[str]) -> list[Any]:
        path = paths[0]
        name = _name_in(path)
        if name is not None:
            path = f"{path.rpartition('/')[0]}/{name}" if "/" in path else name
        link = name is not None or os.path.islink(path)
        return [path, link and not _exists(path)]

    path, lost = Agreement().reach("the checkpoint to load", path, follow)
    return (latest_checkpoint(os.path.dirname(path)) if lost else None) or path


def _name_in(path: str) -> str | None:
    """The content of a small text file, if it is one."""
    try:
        if "://" in path:
            system, root = file_system(path)
            text = system.cat_file(root).decode() if system.isfile(root) and system.size(root) < 1000 else ""
        else:
            file = Path(path)
            text = file.read_text() if file.is_file() and file.stat().st_size < 1000 else ""
    except UnicodeDecodeError:
        return None
    text = text.strip()
    named = text not in ("", ".", "..") and text.isprintable() and text == os.path.basename(text)
    return text if named else None


def _exists(path: str) -> bool:
    if "://" in path:
        system, root = file_system(path)
        return bool(system.exists(root))
    return os.path.exists(path)


def _load_run(
    path: str,
    resume: Resume,
    state: State,
    callbacks: Sequence[Callback],
    ignored: Ignored,
    take_over: Callable[[Mapping[str, Any]], None],
    verify: bool,
) -> list[int]:
    """Everything but model and optimizers, except what is ignored; returns which optimizers start afresh."""
    now = state.remember()
    saved = {key: value for key, value in now.items() if not ignored(key)}
    if "callbacks" in saved:
        fills = {name: one.state_to_fill() for name, one in _numbered(callbacks).items()}
        saved["callbacks"] = saved["callbacks"] | {name: one for name, one in fills.items() if one}
    rest = load_contents(path, saved, [WEIGHTS_ONLY], state.model, verify=verify)
    fresh: list[int] = []
    if settings := saved.get("state", {}).get("settings"):
        fresh = compare(path, settings, state, resume.optimizer, ignored)
    if "callbacks" in saved:
        theirs = {name: one for name, one in saved["callbacks"].items() if not ignored(f"callbacks.{name}")}
        mine = {name: one for name, one in now["callbacks"].items() if name not in theirs}
        saved["callbacks"] = mine | theirs
    take_over(now | saved)
    return _without_states(path, rest, state, ignored) or fresh


def _without_states(path: str, rest: Mapping[str, Any], state: State, ignored: Ignored) -> list[int]:
    """The optimizers, if the checkpoint has no states of them: `fit` refuses to continue with new ones."""
    if not rest.get(WEIGHTS_ONLY):
        return []
    if not ignored("optimizer"):
        state.weights_only = path
    return list(range(len(state.optimizers)))


def _trained(
    resume: Resume, state: State, ignored: Ignored, fresh: Collection[int]
) -> dict[str, nn.Module | Optimizer]:
    """The model, and the optimizers unless weights alone are wanted; not those that start afresh."""
    afresh = {f"optimizer{index or ''}" for index in fresh}
    return {
        key: value
        for key, value in contents(state, run=False).items()
        if (key == "model" or not resume.load_weights_only) and key not in afresh and not ignored(key)
    }
