"""The Fine-Tuning Scheduler: schedules, plans of sharding, and the callbacks of Lightning's files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_dist.recipe.converting.foreign import Foreign, read_foreign

SCHEDULER, STOPPING, CHECKPOINT = "FinetuningScheduler", "FTSEarlyStopping", "FTSCheckpoint"
_PLANS = ("fsdp_plan", "fsdp_default_kwargs", "awp_overrides")
_NEW = (
    "one optimizer and one schedule of rates are for all phases; lr is the rate of a phase's own parameters"
)
_MODES = {"composable": "composable", "wrapped": "wrapped", "wrapped_offload": "offload"}
_UNNEEDED = {
    "reinit_optim_cfg": _NEW,
    "reinit_lr_cfg": _NEW,
    "gen_ft_sched_only": "phases: {write_to: FILE} writes the schedule of a run",
    "custom_strategy_adapters": "has no counterpart, and none is needed",
    "allow_untested": "has no counterpart, and none is needed",
    "logging_level": "has no counterpart: set the level of the logger `composer_dist` in Python",
    "enforce_phase0_params": "phases: {reduce_optimizers: false} leaves the optimizer's groups alone",
    "log_dir": "phases: {write_to: FILE}",
}


@dataclass(frozen=True)
class SchedulerOptions:
    """What a FinetuningScheduler and its early stopping say about all phases, with their defaults."""

    max_depth: int = -1
    base_max_lr: float | None = 1e-5
    epochs_only: bool = False
    monitor: str = "val_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: str = "min"
    ends_run: bool = False
    """Whether the last phase ends as the others do, and training with it."""


def is_schedule(values: Any) -> bool:
    """Whether these are phases by their numbers."""
    numbered = isinstance(values, dict) and all(str(key).isdigit() for key in values)
    return numbered and any(isinstance(one, dict) and "params" in one for one in values.values())


def convert_schedule(foreign: Foreign) -> None:
    """A file with a schedule, or with a plan, of its own."""
    if is_schedule(foreign.values):
        convert_phases(foreign, SchedulerOptions())
    else:
        convert_plan(foreign)


def convert_phases(foreign: Foreign, options: SchedulerOptions, *path: str | int) -> None:
    """The phases of the schedule at a path."""
    schedule = foreign.mapping(*path)
    if not is_schedule(schedule):
        raise foreign.wrong("expected phases by their numbers: 0: {params: [...]}", *path)
    numbers = sorted(schedule, key=int)
    if list(map(int, numbers)) != list(range(len(numbers))):
        found = ", ".join(map(str, numbers))
        raise foreign.wrong(f"the phases are numbered {found}; number them from 0 without gaps", *path)
    if 0 <= options.max_depth < len(numbers) - 1:
        for number in numbers[options.max_depth + 1 :]:
            foreign.drop(f"max_depth is {options.max_depth}, so this phase never begins", *path, number)
        numbers = numbers[: options.max_depth + 1]
    phases, begun = [], 0
    for number in numbers:
        here = (*path, number)
        foreign.mapping(*here)
        phase: dict[str, Any] = {"params": _selected(foreign, *here)}
        rate = foreign.number(options.base_max_lr if int(number) else None, *here, "lr")
        if int(number) and rate is not None:
            phase["lr"] = rate
        elif rate is not None:
            foreign.remark("ignored there and here: optimizer.lr is phase 0's", *here, "lr", undecided=False)
        end = foreign.number(-1, *here, "max_transition_epoch")
        if number != numbers[-1]:
            phase["until"] = _until(foreign, end, begun, options, *here)
        elif options.ends_run and not options.epochs_only:
            phase["until"] = _until(foreign, -1, begun, options, *here)
        begun = end if end >= 0 else begun
        for key in ("new_optimizer", "new_lr_scheduler"):
            foreign.drop(_NEW, *here, key, undecided=True)
        phases.append(phase)
    foreign.put(phases, "phases.schedule", *path)


def _selected(foreign: Foreign, *here: str | int) -> str | list[str]:
    """Names, and patterns that match from the start of a name as theirs do."""
    params = foreign.take(*here, "params", default=[])
    if not isinstance(params, list) or not params:
        raise foreign.wrong("params must be a list of names and patterns of parameters", *here)
    found = [_pattern(foreign, str(name), *here, "params") for name in params]
    return found[0] if len(found) == 1 else found


def _pattern(foreign: Foreign, name: str, *path: str | int) -> str:
    try:
        re.compile(name)
    except re.error as error:
        raise foreign.wrong(f"{name!r} is not a regular expression ({error}); correct it", *path) from None
    return pattern_of(name)


def pattern_of(name: str) -> str:
    """Their name or pattern as ours: theirs matches the start of a name, ours all of it."""
    if re.fullmatch(r"[\w.]+", name):
        return name
    if name.endswith((".*", "$")):
        return f"re:{name}" if "|" not in re.sub(r"\([^()]*\)", "", name) else f"re:(?:{name})"
    return f"re:(?:{name}).*"


def _until(foreign: Foreign, end: int, begun: int, options: SchedulerOptions, *here: str | int) -> Any:
    """How long a phase lasts: theirs counts epochs from the start of training, ours from its own."""
    length = f"{max(end - begun, 1)}ep" if end >= 0 else None
    if options.epochs_only:
        if length is None:
            raise foreign.wrong(
                "epoch_transitions_only needs a max_transition_epoch of every phase; add it", *here
            )
        return length
    until: dict[str, Any] = {"metric": _metric(options.monitor), "patience": options.patience}
    if options.min_delta:
        until["min_delta"] = abs(options.min_delta)
    if options.mode == "max" or not until["metric"].startswith("loss/"):
        until["mode"] = options.mode
    return until | ({"at_most": length} if length else {})


def _metric(name: str) -> str:
    """What Lightning's users log, by our name."""
    known = {"val_loss": "loss/eval/total", "train_loss": "loss/train/total", "loss": "loss/train/total"}
    return known.get(name, f"metrics/eval/{name}")


def convert_plan(foreign: Foreign, *path: str | int) -> None:
    """The plan of a strategy adapter: which modules `fully_shard` is applied to, and how."""
    default = _kwargs(foreign, *path, "fsdp_default_kwargs")
    rules = []
    plan = foreign.mapping(*path, "fsdp_plan")
    for name in plan:
        match = _pattern(foreign, str(name), *path, "fsdp_plan")
        rules.append({"match": match, "shard": True, **default, **_kwargs(foreign, *path, "fsdp_plan", name)})
    for number, name in enumerate(foreign.entries(*path, "awp_overrides")):
        if not isinstance(name, str):
            raise foreign.wrong(
                f"expected the name of a module, got {name!r}", *path, "awp_overrides", number
            )
        rules.append({"match": name, "shard": True})
    for key in _PLANS:
        foreign.take(*path, key)
    if plan:
        root = {key: value for key, value in default.items() if key != "act_ckpt"}
        rules.append({"match": "", "shard": True, **root})
        text = (
            "a rule for the root is added, so that what lies in no other unit is sharded too; without it, it "
            "stays whole, as with fully_shard on the plan's modules only"
        )
        foreign.remark(text, *path, "fsdp_plan", undecided=False)
    if rules:
        foreign.put(rules, "parallelism.rules", *path, "fsdp_plan")


def _kwargs(foreign: Foreign, *path: str | int) -> dict[str, Any]:
    """Options of `fully_shard`, and the two that the adapter adds, as fields of a Rule."""
    found: dict[str, Any] = {}
    for key, value in foreign.mapping(*path).items():
        if key == "reshard_after_forward":
            found[key] = value
        elif key == "cpu_offload_policy":
            found["offload"] = value is not None and value is not False
        elif key == "act_ckpt":
            mode, *rest = value if isinstance(value, list) and value else [value]
            if str(mode) not in _MODES:
                raise foreign.wrong(f"act_ckpt {mode!r} is not one of {', '.join(_MODES)}", *path, key)
            options = rest[0] if rest and rest[0] else {}
            found[key] = [_MODES[mode], options] if options else _MODES[mode]
        elif key == "mp_policy" and isinstance(value, dict):
            found["mixed_precision"] = value.get("init_args", value)
        else:
            foreign.remark("has no counterpart in a file: pass your own mesh in Python", *path, key)
    return found


def convert_callbacks(foreign: Foreign, *path: str) -> None:
    """The callbacks of a file of Lightning's command line."""
    found: dict[str, tuple[str | int, ...]] = {}
    for index in range(len(foreign.entries(*path))):
        here: tuple[str | int, ...] = (*path, index)
        name = str(foreign.mapping(*here).get("class_path", "")).rpartition(".")[2]
        foreign.take(*here, "class_path")
        if name in (SCHEDULER, STOPPING, CHECKPOINT):
            found[name] = (*here, "init_args")
            foreign.mapping(*found[name])
        else:
            foreign.take(*here)
            foreign.remark(f"composer-dist keys callbacks lists ours; not {name}", *here, undecided=False)
    if (here := found.get(SCHEDULER, ())) != ():
        _scheduler(foreign, _options(foreign, here, found.get(STOPPING)), *here)
    if (here := found.get(STOPPING, ())) != ():
        foreign.drop("callbacks: {nan_monitor: {}}", *here, "check_finite")
    if (here := found.get(CHECKPOINT, ())) != ():
        _checkpoints(foreign, *here)


def _checkpoints(foreign: Foreign, *path: str | int) -> None:
    """The arguments of an FTSCheckpoint."""
    if (monitor := foreign.take(*path, "monitor")) is not None:
        metric = _metric(str(monitor))
        mode = foreign.take(*path, "mode", default="min")
        foreign.put(metric, "checkpoints.monitor", *path)
        if not metric.startswith("loss/"):
            foreign.put(mode, "checkpoints.mode", *path)
        if (count := foreign.number(1, *path, "save_top_k")) > 0:
            foreign.put(count, "checkpoints.save_top_k", *path)
    for theirs, unit in (("every_n_epochs", "ep"), ("every_n_train_steps", "ba")):
        if (interval := foreign.number(0, *path, theirs)) > 0:
            foreign.put(f"{interval}{unit}", "checkpoints.interval", *path, theirs)
    foreign.move("checkpoints.folder", *path, "dirpath")
    foreign.move("checkpoints.weights_only", *path, "save_weights_only")
    foreign.drop("checkpoints.filename, with other names in braces", *path, "filename")
    foreign.drop("automatic: `latest` leads to the newest checkpoint", *path, "save_last")


def _options(
    foreign: Foreign, here: tuple[str | int, ...], stopping: tuple[str | int, ...] | None
) -> SchedulerOptions:
    """The options of both callbacks; the early stopping may be missing."""
    depth = foreign.number(-1, *here, "max_depth")
    rate = foreign.number(1e-5, *here, "base_max_lr")
    epochs = foreign.take(*here, "epoch_transitions_only", default=False) is True
    if stopping is None:
        return SchedulerOptions(depth, rate, epochs, ends_run=True)
    return SchedulerOptions(
        depth,
        rate,
        epochs,
        monitor=str(foreign.take(*stopping, "monitor", default="val_loss")),
        patience=foreign.number(3, *stopping, "patience"),
        min_delta=foreign.number(0.0, *stopping, "min_delta"),
        mode=foreign.one_of(("MIN", "MAX"), "", *stopping, "mode", default="min").lower(),
        ends_run=True,
    )


def _scheduler(foreign: Foreign, options: SchedulerOptions, *path: str | int) -> None:
    """The arguments of a FinetuningScheduler."""
    schedule = foreign.get(*path, "ft_schedule")
    if isinstance(schedule, dict):
        convert_phases(foreign, options, *path, "ft_schedule")
    elif foreign.take(*path, "ft_schedule") is not None:
        folders = [Path(), *Path(foreign.name).resolve().parents[:4]]
        files = [one for folder in folders if (one := folder / str(schedule)).is_file()]
        if not files:
            text = f"there is no file {schedule}, neither here, next to {foreign.name}, nor above it"
            raise foreign.wrong(f"{text}; write its path", *path, "ft_schedule")
        inner = read_foreign(files[0])
        convert_phases(inner, options)
        inner.finish()
        foreign.remarks += inner.remarks
        foreign.put(inner.ours["phases"]["schedule"], "phases.schedule", *path, "ft_schedule")
    for theirs, ours in (("restore_best", "restore_best"), ("apply_lambdas_new_pgs", "apply_lambdas")):
        foreign.move(f"phases.{ours}", *path, theirs)
    if foreign.take(*path, "frozen_bn_track_running_stats") is False:
        foreign.put("fixed", "phases.frozen_batch_norm", *path, "frozen_bn_track_running_stats")
    for key, text in _UNNEEDED.items():
        foreign.drop(text, *path, key, undecided=key in ("reinit_optim_cfg", "reinit_lr_cfg"))
    if foreign.get(*path, "strategy_adapter_cfg") is not None:
        convert_plan(foreign, *path, "strategy_adapter_cfg")
