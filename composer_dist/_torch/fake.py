"""Tensors without values, which know their shapes and devices, and a mesh without processes for them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Note = Callable[[str, str, int], None]
"""Called with a collective by the name that plans have, the mesh dimension and the bytes."""


def fake_mode() -> Any:
    """A mode in which operators make tensors without values, which know their shapes and devices."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values(error: BaseException) -> bool:
    """Whether an operator could not do without the values of tensors."""
    from torch._subclasses import fake_tensor as fake

    kinds = fake.DataDependentOutputException, fake.DynamicOutputShapeException
    return isinstance(error, (*kinds, fake.UnsupportedOperatorException))


class Unvalued:
    """Runs operators on tensors of `fake_mode`, also those that need values to decide.

    What asks whether all elements, or any, are true finds true and false: masks that hide nothing, and
    numbers that are finite. A grouped matrix product, which torch only knows in bfloat16 there, has its
    inputs' dtype.
    """

    def __init__(self) -> None:
        self._any: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return args[0].untyped_storage() not in self._any
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            low = [one.to(torch.bfloat16) for one in args[:2]]
            return func(*low, *args[2:], **kwargs).to(args[0].dtype)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        made = func(*args, **kwargs)
        if func.overloadpacket is aten.any:
            self._any.add(made.untyped_storage())
        return made


class TracedGroup(dist.ProcessGroup):
    """Ranks that do not run: its collectives send nothing, and are noted.

    The functional collectives, which have only the group's name, are noted by `functional_collective`.
    """

    def __init__(self, name: str, ranks: int, rank: int, note: Note) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._name, self._noting = name, weakref.WeakMethod(note)

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
