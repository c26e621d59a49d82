"""Checks that everything an adapter's configuration names is in the model; peft checks that something is."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from peft import PeftConfig
from torch import nn

from composer_dist.errors import Faults
from composer_dist.wording import listed, near_miss

_MODULES = ("target_modules", "modules_to_save", "exclude_modules", "feedforward_modules")
_PATTERNS = ("rank_pattern", "alpha_pattern")


def check_targets(model: nn.Module, config: PeftConfig) -> None:
    """Refuses names that match nothing.

    Args:
        model: without the adapter.
        config: the adapter's, as the user wrote it.

    Raises:
        ParallelismValueError: names all of them, and what there is.
    """
    modules = [name for name, _ in model.named_modules()]
    linear = sorted(
        {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    )
    with Faults() as faults:
        for field, missing in _unmatched(config, modules, [name for name, _ in model.named_parameters()]):
            if not missing:
                continue
            near = near_miss(missing[0], {name.rpartition(".")[2] for name in modules})
            faults.append(
                f"{type(config).__name__}.{field}: {listed([repr(name) for name in missing])} matches "
                f"nothing in {type(model).__name__}.{near} Its linear layers are called "
                f"{listed(sorted(linear), 20)}."
            )


def _unmatched(
    config: PeftConfig, modules: Collection[str], parameters: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Fields of the configuration with what matches nothing."""
    for field, names in (*((field, modules) for field in _MODULES), ("target_parameters", parameters)):
        given = getattr(config, field, None)
        if isinstance(given, Iterable) and not isinstance(given, str):
            yield field, [one for one in given if not any(f".{name}".endswith(f".{one}") for name in names)]
    for field in _PATTERNS:
        if isinstance(given := getattr(config, field, None), Mapping):
            yield field, [one for one in given if not any(re.match(rf"(.*\.)?({one})$", n) for n in modules)]
    layers = getattr(config, "layers_to_transform", None)
    known = {part for name in modules for part in name.split(".") if part.isdecimal()}
    wanted = [layers] if isinstance(layers, int) else layers or ()
    yield "layers_to_transform", [str(one) for one in wanted if str(one) not in known]
