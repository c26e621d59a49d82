"""The configuration of tensor parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_dist.config.base import FromDict, names_of, require
from composer_dist.config.rule import check_match
from composer_dist.errors import ParallelismTypeError


@dataclass(frozen=True, kw_only=True)
class TPConfig(FromDict):
    """Tensor parallelism: how matrices are cut among the ranks of the mesh's "tp" dimension."""

    plan: Literal["auto"] | Mapping[str, Any] = "auto"
    """"auto" uses a Hugging Face model's own plan, or infers one from names and sizes, assuming elementwise
    operations between two matrices and attention head by head. Otherwise module name (or "re:...") to
    style: a name in `distributed.tensor_parallel.styles`, or a torch style object. `Rule(tp=...)` overrides
    both."""
    sequence_parallel: bool = False
    """Cut the sequence too, between attention and feed-forward: less memory for activations. Lengths must
    be multiples of tp."""
    loss_parallel: bool = False
    """Leave the logits cut over the vocabulary, for `parallel_cross_entropy`; Hugging Face's causal
    language models then use it."""
    head_attributes: tuple[str, ...] = ()
    """Attributes to divide by tp in modules whose projections are cut, besides the known names of head
    counts and widths. A module may list its own in `tensor_parallel_attributes`."""

    def __post_init__(self) -> None:
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ParallelismTypeError(
                f"TPConfig.plan must be 'auto' or a mapping of module name to style, not {self.plan!r}."
            )
        for match in self.plan if isinstance(self.plan, Mapping) else ():
            check_match(match, "TPConfig.plan's")
        object.__setattr__(self, "head_attributes", names_of("head_attributes", self.head_attributes))
        for name in ("sequence_parallel", "loss_parallel"):
            require(name, getattr(self, name), (False, True))
