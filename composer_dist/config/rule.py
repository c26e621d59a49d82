"""The configuration of single modules."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_dist.config.base import ActivationCheckpointing, FromDict, require
from composer_dist.errors import ParallelismTypeError, ParallelismValueError

Match = Any  # str | re.Pattern | type[nn.Module] | Callable[[str, nn.Module], bool] | list of these


@dataclass(frozen=True)
class Rule(FromDict):
    """Options for the modules that `match` selects.

    A field that is None is left to other rules, the policy, the attributes or the configuration. If several
    rules select a module, they are merged field by field, and the later rule wins. A rule that selects a
    ModuleList or ModuleDict selects its children (see `ParallelismConfig.containers`).
    """

    match: Match
    """An exact module name, "re:..." or a compiled pattern (both fullmatch), a module type or "type:..."
    (the name of a class or base class, for YAML), a callable `(name, module) -> bool`, or a list of these,
    each of which must match. "" is the root."""
    shard: bool | None = None
    """True makes each match a unit. False leaves all parameters below it replicated with averaged
    gradients, except in units that are chosen further down."""
    reshard_after_forward: bool | int | None = None
    """As in `FSDP2Config`, for these units. This and the next two are refused if no match is a unit."""
    mixed_precision: str | Mapping[str, Any] | None = None
    """As in `FSDP2Config`, for these units."""
    offload: bool | None = None
    """Keep these units' shards, gradients and optimizer state in host memory."""
    act_ckpt: ActivationCheckpointing = None
    """As `ParallelismConfig.activation_checkpointing`, for these modules; False leaves them out."""
    tp: Any = None
    """Tensor-parallel style."""
    optional: bool = False
    """Do not raise if nothing matches."""
    skippable: Literal["replicate", "root"] | None = None
    """Some ranks may skip these modules in a step (an image tower, for a batch without images), so nothing
    in them is a unit. "replicate" leaves their parameters whole on every rank, with averaged gradients;
    "root" adds them to the unit around them, which gathers them in every step."""
    compile: bool | Mapping[str, Any] | None = None
    """As `ParallelismConfig.compile`, for these modules; False leaves them out."""

    def __post_init__(self) -> None:
        check_match(self.match)
        require("skippable", self.skippable, (None, "replicate", "root"))
        for name in ("shard", "offload", "optional"):
            require(name, getattr(self, name), (None, False, True))
        if not isinstance(self.reshard_after_forward, (int, type(None))):
            raise ParallelismTypeError(
                "A rule's reshard_after_forward must be True, False or a number of ranks, not "
                f"{self.reshard_after_forward!r}."
            )


def check_match(match: Match, whose: str = "Rule") -> None:
    """Raise unless `match` is valid."""
    if isinstance(match, str) and match.startswith("re:"):
        compiled(match, whose)
    elif isinstance(match, (list, tuple)) and match:
        for part in match:
            check_match(part)
    elif isinstance(match, re.Pattern) and not isinstance(match.pattern, str):
        raise ParallelismTypeError(f"{whose} {match.pattern!r} is a pattern of bytes; names are text.")
    elif not (isinstance(match, (str, re.Pattern)) or callable(match)):
        raise ParallelismTypeError(
            "A rule's match must be a module name, 're:...', 'type:...', a compiled pattern, a module type, "
            f"a callable (name, module) -> bool, or a list of these, not {match!r}."
        )


def compiled(text: str, whose: str = "") -> re.Pattern[str]:
    """The pattern of "re:..."; raises if it is not a regular expression, or more than Python can compile."""
    try:
        return re.compile(text.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        shown = repr(text) if len(text) < 1000 else f"{text[:40]!r}..."
        raise ParallelismValueError(
            f"{whose} {shown} is an invalid regular expression: {error}.".lstrip()
        ) from None
