"""A mesh without processes, for steps on tensors without values."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Note = Callable[[str, str, int], None]
"""Called with a collective by the name that plans have, the mesh dimension and the bytes."""


class TracedGroup(dist.ProcessGroup):
    """Ranks that do not run: its collectives send nothing, and are noted.

    The functional collectives, which have only the group's name, are noted by `functional_collective`.
    """

    def __init__(self, name: str, ranks: int, rank: int, note: Note) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._name, self._noting = name, WeakMethod(note)

    @property
    def group_name(self) -> Any:
        """The mesh dimension."""
        return self._name

    def _note(self, collective: str, nbytes: int) -> None:
        if note := self._noting():
            note(collective, self._name, nbytes)

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """Note an all-reduce."""
        self._note("all_reduce", sum(one.nbytes for one in args[0]))

    def all_gather_single(self, output: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note an all-gather."""
        self._note("all_gather", output.nbytes)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, *args: Any) -> Any:
        """Note a reduce-scatter."""
        self._note("reduce_scatter", given.nbytes)

    _allgather_base: Any = all_gather_single  # before torch 2.13
    _reduce_scatter_base: Any = reduce_scatter_single


class TracedMesh(DeviceMesh):
    """One dimension of a mesh, as one rank of it sees it; it has no processes. Since torch 2.9.

    No other mesh is equal to it. DTensor's caches keep meshes, and would return one with processes for an
    equal one without, or the other way round.

    Args:
        note: a method; it is not kept alive.
    """

    def __init__(self, name: str, ranks: int, rank: int, note: Note) -> None:
        names = (name,)
        super().__init__("cpu", list(range(ranks)), mesh_dim_names=names, _init_backend=False, _rank=rank)
        self._group = TracedGroup(name, ranks, rank, note)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """The group that sends nothing."""
        return self._group

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The rank's place in the dimension."""
        return self._group.rank()


_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
}


def functional_collective(operation: Any, args: Sequence[Any], made: Any) -> tuple[str, str, int] | None:
    """What to note of an operation that may be one of torch's functional collectives; None if it is not."""
    if operation.namespace != "_c10d_functional":
        return None
    name = operation.__name__.partition(".")[0]
    if name not in _FUNCTIONAL:
        return None
    tensor = made if name == "all_gather_into_tensor" else args[0]
    names = [one.name for one in operation._schema.arguments]
    return _FUNCTIONAL[name], args[names.index("group_name")], tensor.nbytes
