"""The Fine-Tuning Scheduler: schedules, plans of sharding, and the callbacks of Lightning's files."""

import re
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


def is_schedule(values: Any) -> bool:
    """Whether these are phases by their numbers."""
    numbered = isinstance(values, dict) and all(str(key).isdigit() for key in values)
    return numbered and any(isinstance(one, dict) and "params" in one for one in values.values())


def convert_schedule(foreign: Foreign) -> None:
    """A file with a schedule, or with a plan, of its own."""
    if is_schedule(foreign.values):
        convert_phases(foreign, {}, {})
    else:
        convert_plan(foreign)


def convert_phases(
    foreign: Foreign, options: dict[str, Any], stopping: dict[str, Any], *path: str | int
) -> None:
    """The phases of a schedule.

    Args:
        foreign: the file.
        options: arguments of the FinetuningScheduler.
        stopping: arguments of its early stopping.
        path: where the schedule is in the file.
    """
    schedule = foreign.get(*path, default={})
    numbers = sorted(schedule, key=int)
    if list(map(int, numbers)) != list(range(len(numbers))):
        found = ", ".join(map(str, numbers))
        raise foreign.wrong(f"the phases are numbered {found}; number them from 0 without gaps", *path)
    depth = int(options.get("max_depth", -1))
    if 0 <= depth < len(numbers) - 1:
        for number in numbers[depth + 1 :]:
            foreign.drop(f"max_depth is {depth}, so this phase never begins", *path, number)
        numbers = numbers[: depth + 1]
    phases, begun = [], 0
    for number in numbers:
        here = (*path, number)
        phase: dict[str, Any] = {"params": _selected(foreign, *here)}
        rate = foreign.take(*here, "lr")
        if int(number) > 0:
            rate = options.get("base_max_lr", 1e-5) if rate is None else rate
            phase |= {} if rate is None else {"lr": float(rate)}
        elif rate is not None:
            foreign.remark("ignored there and here: optimizer.lr is phase 0's", *here, "lr", undecided=False)
        end = int(foreign.take(*here, "max_transition_epoch", default=-1))
        if number != numbers[-1]:
            phase["until"] = _until(foreign, end, begun, options, stopping, *here)
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


def _until(
    foreign: Foreign,
    end: int,
    begun: int,
    options: dict[str, Any],
    stopping: dict[str, Any],
    *here: str | int,
) -> Any:
    """How long a phase lasts: theirs counts epochs from the start of training, ours from its own."""
    length = f"{max(end - begun, 1)}ep" if end >= 0 else None
    if options.get("epoch_transitions_only"):
        if length is None:
            raise foreign.wrong(
                "epoch_transitions_only needs a max_transition_epoch of every phase; add it", *here
            )
        return length
    until: dict[str, Any] = {"metric": _metric(str(stopping.get("monitor", "val_loss")))}
    until["patience"] = int(stopping.get("patience", 3))
    if stopping.get("min_delta"):
        until["min_delta"] = abs(float(stopping["min_delta"]))
    if stopping.get("mode", "min") == "max" or not until["metric"].startswith("loss/"):
        until["mode"] = stopping.get("mode", "min")
    return until | ({"at_most": length} if length else {})


def _metric(name: str) -> str:
    """What Lightning's users log, by our name."""
    known = {"val_loss": "loss/eval/total", "train_loss": "loss/train/total", "loss": "loss/train/total"}
    return known.get(name, f"metrics/eval/{name}")


def convert_plan(foreign: Foreign, *path: str) -> None:
    """The plan of a strategy adapter: which modules `fully_shard` is applied to, and how."""
    default = _kwargs(
        foreign, foreign.take(*path, "fsdp_default_kwargs", default={}), *path, "fsdp_default_kwargs"
    )
    plan = foreign.take(*path, "fsdp_plan", default={})
    if not isinstance(plan, dict):
        raise foreign.wrong("fsdp_plan must map names or patterns of modules to options", *path, "fsdp_plan")
    rules = []
    for name, options in plan.items():
        own = _kwargs(foreign, options or {}, *path, "fsdp_plan", name)
        rules.append(
            {"match": _pattern(foreign, str(name), *path, "fsdp_plan"), "shard": True, **default, **own}
        )
    for name in foreign.take(*path, "awp_overrides", default=[]):
        rules.append({"match": name, "shard": True})
    if plan:
        root = {key: value for key, value in default.items() if key != "act_ckpt"}
        rules.append({"match": "", "shard": True, **root})
        foreign.remark(
            "a rule for the root is added, so that what lies in no other unit is sharded too; without it, it "
            "stays whole, as with fully_shard on the plan's modules only",
            *path, "fsdp_plan", undecided=False,
        )  # fmt: skip
    if rules:
        foreign.put(rules, "parallelism.rules", *path, "fsdp_plan")


def _kwargs(foreign: Foreign, given: dict[str, Any], *path: str) -> dict[str, Any]:
    """Options of `fully_shard`, and the two that the adapter adds, as fields of a Rule."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key == "reshard_after_forward":
            found[key] = value
        elif key == "cpu_offload_policy":
            found["offload"] = value is not None and value is not False
        elif key == "act_ckpt":
            mode, *rest = value if isinstance(value, list) else [value]
            if mode not in _MODES:
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
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for index, one in enumerate(foreign.get(*path, default=[])):
        name = str(one.get("class_path", "")).rpartition(".")[2]
        foreign.take(*path, index, "class_path")
        if name in (SCHEDULER, STOPPING, CHECKPOINT):
            found[name] = index, one.get("init_args") or {}
            foreign.take(*path, index, "init_args")
        else:
            foreign.take(*path, index)
            foreign.remark(
                f"composer-dist keys callbacks lists ours; not {name}", *path, index, undecided=False
            )
    if STOPPING not in found and "EarlyStopping" not in found and SCHEDULER in found:
        found[STOPPING] = 0, {}
    if SCHEDULER in found:
        _scheduler(foreign, found[SCHEDULER][1], found[STOPPING][1], *path, found[SCHEDULER][0], "init_args")
    if CHECKPOINT in found:
        index, given = found[CHECKPOINT]
        here: tuple[str | int, ...] = (*path, index, "init_args")
        if (monitor := given.get("monitor")) is not None:
            metric = _metric(str(monitor))
            foreign.put(metric, "checkpoints.monitor", *here)
            if not metric.startswith("loss/"):
                foreign.put(given.get("mode", "min"), "checkpoints.mode", *here)
            if (count := given.get("save_top_k", 1)) > 0:
                foreign.put(count, "checkpoints.save_top_k", *here)


def _scheduler(foreign: Foreign, options: dict[str, Any], stopping: dict[str, Any], *path: str | int) -> None:
    """The arguments of a FinetuningScheduler."""
    schedule = options.get("ft_schedule")
    if isinstance(schedule, dict):
        convert_phases(foreign, options, stopping, *path, "ft_schedule")
    elif schedule is not None:
        folders = [Path(), *Path(foreign.name).resolve().parents[:4]]
        files = [one for folder in folders if (one := folder / str(schedule)).is_file()]
        if not files:
            text = f"there is no file {schedule}, neither here nor beside {foreign.name} or above it"
            raise foreign.wrong(f"{text}; write its path", *path, "ft_schedule")
        inner = read_foreign(files[0])
        convert_phases(inner, options, stopping)
        inner.finish()
        foreign.remarks += inner.remarks
        foreign.put(inner.ours["phases"]["schedule"], "phases.schedule", *path, "ft_schedule")
    for theirs, ours in (("restore_best", "restore_best"), ("apply_lambdas_new_pgs", "apply_lambdas")):
        if theirs in options:
            foreign.put(options[theirs], f"phases.{ours}", *path, theirs)
    if options.get("frozen_bn_track_running_stats") is False:
        foreign.put("fixed", "phases.frozen_batch_norm", *path, "frozen_bn_track_running_stats")
    for key in set(_UNNEEDED).intersection(options):
        foreign.drop(_UNNEEDED[key], *path, key)
    if "strategy_adapter_cfg" in options:
        convert_plan(foreign, *path, "strategy_adapter_cfg")  # type: ignore[arg-type]
