"""What the plans of all features have in common."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import torch

from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.errors import ParallelismValueError
from composer_dist.structure.structure import Structure, TensorInfo
from composer_dist.wording import listed

Moment = Literal[
    "start-up",
    "begin",
    "gradient",
    "compute",
    "allocate",
    "free",
    "send",
    "before forward",
    "after forward",
    "before backward",
    "before reduction",
    "after reduction",
    "after backward",
    "no gradient",
]
"""What training consists of; "start-up" is before the first step.

Between "before reduction" and "after reduction" a unit's gradients are freed. "gradient": a parameter's
gradient is complete. "no gradient": a trainable parameter has none after the backward. "compute": an operator
runs, with `work`. "send": the model's own operators communicate, with `sent`."""


Kind = Literal["gathered", "communication", "gradients", "activations", "logits", "host"]
"""What memory is used for during a step; "host" is that of the host, all others are the device's."""


class Work(NamedTuple):
    """What an operator computes."""

    flops: int
    """By the formulas of torch.utils.flop_counter."""
    nbytes: int
    """Of its tensors."""
    dtype: torch.dtype
    recomputed: bool
    """Whether backward computes it a second time."""


class StepEvent(NamedTuple):
    """A moment of a step of training."""

    moment: Moment
    phase: str
    """"start-up", "forward", "backward" or "step"."""
    unit: str
    """The innermost unit that runs, "" being the root."""
    nbytes: int = 0
    """What is allocated or freed."""
    kind: Kind = "activations"
    name: str = ""
    """Of the parameter."""
    work: Work | None = None
    sent: "Transfer | None" = None


class Change(NamedTuple):
    """Memory that is allocated, or freed if the number is negative."""

    kind: Kind
    nbytes: int


Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "read"]
"""What ranks do together; "read" is not a collective: the memory of another process, or files."""


class Transfer(NamedTuple):
    """One collective that a rank takes part in."""

    collective: Collective
    dimension: str
    """Of the mesh."""
    ranks: int
    """In the group."""
    nbytes: int
    """Of an all-gather's output, a reduce-scatter's input, or the tensor that is reduced or sent."""
    early: bool = False
    """Whether it is for a later unit."""
    stride: int = 0
    """Ranks between neighbors in the group; 0 stands for those of the dimension."""


@dataclass(frozen=True)
class Rank:
    """One rank of a mesh, and its parts of the model's tensors."""

    sizes: Mapping[str, int]
    """Mesh dimension to size, all four of them."""
    at: Coordinate
    replica: int
    """Its place along "dp_replicate"."""
    device_type: str
    tensors: Mapping[str, TensorInfo]
    """By first name."""
    layouts: Mapping[str, Layout]
    """How each parameter is cut, by first name."""


def sent_along(dimension: str) -> Callable[[StepEvent], Iterator[Transfer]]:
    """A function that says what the model's own operators send along a dimension of the mesh."""

    def follow(event: StepEvent) -> Iterator[Transfer]:
        if event.sent is not None and event.sent.dimension == dimension:
            yield event.sent

    return follow


class FeaturePlan:
    """The plan of one feature; a frozen dataclass."""

    def memory(self, rank: Rank) -> Callable[[StepEvent], Iterator[Change]] | None:
        """A function that says what the feature allocates and frees at each event of a step, in order."""
        return None

    def communication(self, rank: Rank) -> Callable[[StepEvent], Iterator[Transfer]] | None:
        """A function that says what the feature sends at each event of a step, in order."""
        return None

    def explain(self, module: str) -> str:
        """A description of what happens to a module ("" is the root); empty if nothing does."""
        return ""

    def notes(self) -> Iterator[str]:
        """Lines for the plan as text."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """The decisions in plain types, equal on ranks that are about to do the same."""
        found: dict[str, Any] = in_plain_types(self)
        return found


def in_plain_types(value: Any) -> Any:
    """A value for JSON: dataclasses become mappings of their shown fields, and functions their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: in_plain_types(getattr(value, one.name)) for one in fields(value) if one.repr}
    if isinstance(value, Mapping):
        return {str(key): in_plain_types(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_plain_types(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(in_plain_types, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if repr(value) == object.__repr__(value):  # its repr has an address, which differs by rank
        return [type(value).__name__, in_plain_types(vars(value))]
    return str(value)


def refuse_compiled(structure: Structure, owners: Iterable[str]) -> None:
    """Refuse to cut the parameters of modules that torch.jit has scripted or traced.

    Raises:
        ParallelismValueError: names the modules.
    """
    modules = structure.modules
    if found := [name for name in dict.fromkeys(owners) if isinstance(modules[name], torch.jit.ScriptModule)]:
        raise ParallelismValueError(
            f"{listed(found)}: torch.jit has compiled what computes with their parameters, so nothing can "
            "cut or gather these. Leave the modules whole, with Rule(..., shard=False) and without a "
            "tensor-parallel style; use DDP; or compile with compile=True instead."
        )
