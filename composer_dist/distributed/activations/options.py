"""Reads, checks and describes the user's options for activations: a mode and its options."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

from composer_dist.config.base import ActivationCheckpointing
from composer_dist.distributed.activations import selective
from composer_dist.errors import Faults, ParallelismTypeError, ParallelismValueError
from composer_dist.users_code import warn
from composer_dist.wording import near_miss

Mode = Literal["composable", "wrapped", "offload", "memory_budget"]
_CHECKPOINT = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")
_OURS = ("every", "save", "offload", "pin_memory")
_OPTIONS: Mapping[Mode, tuple[str, ...]] = {
    "composable": (*_CHECKPOINT, *_OURS),
    "wrapped": (*_CHECKPOINT, *_OURS, "checkpoint_impl"),
    "offload": ("every", "pin_memory"),
    "memory_budget": ("every", "budget"),
}
_SELECTIVE = "selective"
"""Short for "composable" with save="default"."""
_KNOWN = (*_OPTIONS, _SELECTIVE)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_FLAG: tuple[Callable[[Any], bool], str] = (lambda v: isinstance(v, bool), "True or False")
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "budget": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 (recompute all) to 1 (nothing)"),
    "checkpoint_impl": (
        lambda v: getattr(v, "name", v) in ("NO_REENTRANT", "REENTRANT"),
        "'NO_REENTRANT' or 'REENTRANT'",
    ),
    "context_fn": (callable, "a function"),
    "debug": _FLAG,
    "determinism_check": (lambda v: v in ("default", "none"), "'default' or 'none'"),
    "early_stop": _FLAG,
    "every": (lambda v: _is_number(v) and isinstance(v, int) and v > 0, "a positive integer"),
    "offload": _FLAG,
    "pin_memory": (lambda v: v is None or isinstance(v, bool), "True, False or None"),
    "preserve_rng_state": _FLAG,
    "save": (
        lambda v: (
            v == selective.DEFAULT
            or (isinstance(v, (list, tuple)) and bool(v) and all(isinstance(name, str) for name in v))
        ),
        "'default' or a list of operations such as ['aten.mm']",
    ),
}


def ac_mode(value: ActivationCheckpointing, *, strict: bool = True) -> tuple[Mode, dict[str, Any]] | None:
    """The mode and options that a user's value for activation checkpointing stands for.

    Args:
        value: None or False for none, True for "composable", a mode, or a pair of a mode and
            options (a mapping or None).
        strict: if False, an unknown mode gives a warning and "composable".
    """
    if value is None or value is False:
        return None
    if value is True:
        return "composable", {}
    name, given = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
    if not isinstance(name, str) or not (given is None or isinstance(given, Mapping)):
        raise ParallelismTypeError(
            "activation_checkpointing must be None, a bool, a mode, or a pair of a mode and its options, "
            f"not {value!r}."
        )
    if name not in _KNOWN:
        message = (
            f"There is no activation checkpointing mode {name!r}. Valid modes: "
            f"{', '.join(map(repr, _KNOWN))}.{near_miss(name, _KNOWN)}"
        )
        if strict:
            raise ParallelismValueError(message)
        warn(f"{message} Using 'composable'.")
        return "composable", {}
    options = dict(given or {})
    if name == _SELECTIVE:
        name, options = "composable", {"save": selective.DEFAULT, **options}
    mode = cast(Mode, name)
    with Faults(f"Activation checkpointing mode {mode!r} ", ".", "; ") as faults:
        faults += _option_faults(mode, options)
    return mode, options


def _option_faults(mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    unknown = [str(key) for key in options if key not in _OPTIONS[mode]]
    if unknown:
        yield f"has no option {', '.join(map(repr, unknown))}; valid options: {', '.join(_OPTIONS[mode])}"
    for key, value in options.items():
        if key in _OPTIONS[mode] and not _VALUES[key][0](value):
            yield f"needs {key} to be {_VALUES[key][1]}, not {value!r}"
    if mode == "memory_budget" and "budget" not in options:
        yield "needs a budget: ('memory_budget', {'budget': 0.5}) keeps half of the activations"
    if mode != "offload" and "pin_memory" in options and not options.get("offload"):
        yield "uses pin_memory only with offload; set offload=True, or leave it out"
    if "save" in options and "context_fn" in options:
        yield "accepts save or context_fn, not both; leave one out"
    if is_reentrant(options) and (idle := [key for key in ("context_fn", "debug", "save") if key in options]):
        yield f"does not support {', '.join(idle)} with REENTRANT; use NO_REENTRANT"
    selective.operators(options.get("save", ()))


def is_reentrant(options: Mapping[str, Any]) -> bool:
    """Whether the options ask for torch's older implementation of checkpoint."""
    implementation = options.get("checkpoint_impl")
    return bool(getattr(implementation, "name", implementation) == "REENTRANT")


def mode_in_words(mode: Mode, options: Mapping[str, Any]) -> str:
    """What happens to the activations of a module, for `explain`."""
    if mode == "memory_budget":
        return f"kept or recomputed by torch.compile within {options['budget']:.0%} of the memory"
    if mode == "offload":
        return "offloaded to the host"
    text = f"recomputed ({mode})"
    if "save" in options:
        default = options["save"] == selective.DEFAULT
        what = "matrix products, attention and collectives" if default else ", ".join(options["save"])
        text += f" except for the results of {what}"
    if options.get("offload"):
        text += "; saved tensors are kept on the host"
    return text
