"""The record of a prepared model, which is kept on the model itself, and the model's parameters by name.

A deep copy or pickle of a model keeps only those parts of its record that are true of the copy too: that it
is unusable, the original class of a batch norm, and the layers around a forward.

A *name* has no wrapper segments, and a parameter is the one that the optimizer holds: the shard. Between a
forward and the next reshard, FSDP2 registers gathered parameters on the modules (on the root after an
evaluation, on every unit with an int `reshard_after_forward`). Code that iterates over parameters therefore
uses `named_parameters_canonical`, which reshards first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.errors import CheckpointRuntimeError, ParallelismRuntimeError, ParallelismTypeError
from composer_dist.structure.names import canonical_name
from composer_dist.wording import kind_in_words

RECORD = "_composer_dist"
"""The attribute of a module or an optimizer that holds its record."""
ALREADY_SHARDED = (
    "The model is already sharded; prepare an unsharded model, once. For another trainer or mesh, "
    "unparallelize_model(model) makes a prepared one plain."
)
ADDED = (RECORD, "__composable", "checkpoint_fn")
"""How the attributes begin that this library and FSDP2 add to modules, besides `forward`."""


class Averaging(Protocol):
    """An object that averages gradients at the end of each backward."""

    sync: bool
    """Whether it is active; `no_sync` sets it."""


@dataclass
class Prepared:
    """What the library has done to a module, or to an optimizer."""

    unusable: str | None = None
    """Why it must not be used anymore; None if it may be."""
    original_class: type[nn.Module] | None = None
    """The class of a batch norm before it was synchronized."""
    mesh: Mesh | None = None
    """The whole mesh of the model; its parameters may be on a submesh."""
    plan: Any = None
    """The `ParallelPlan` that was carried out."""
    bucket_bytes: int = ParallelismConfig.bucket_bytes
    """Most bytes of weights that are sent at a time."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """The form in which a `CheckpointSaver` saves the model."""
    averagings: list[Averaging] = field(default_factory=list)
    """They average the gradients of parameters that are not sharded."""
    tables: list[torch.Tensor] = field(default_factory=list)
    """Buffers of which context parallelism has put this rank's part into the model, for now."""
    replica: object | None = None
    """The `Replica` that keeps the ranks' copies equal."""
    forward: Any = None
    """The `Layers` around the module's forward."""
    steps: int = field(default=0, compare=False)
    """How often optimizers have stepped that hold some of its shards or replicas."""
    proven: set[bool] = field(default_factory=set)
    """In which modes (training or not) context parallelism has verified that its sequence can be split."""
    changes: Any = None
    """The `Changes` in the modules, which `unparallelize_model` puts back."""
    follow: list[Callable[[], None]] = field(default_factory=list)
    """Called on all ranks alike: they give every rank rank 0's buffers, as the next forward would."""
    ends: list[Callable[[], None]] = field(default_factory=list)
    """Called before that, on all ranks alike: they end what features do outside of modules."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, (self.unusable, self.original_class), {"forward": self.forward}


def of(thing: nn.Module | Optimizer) -> Prepared | None:
    """The record of a model, or of one of its modules or optimizers; None if there is none."""
    found: Prepared | None = vars(thing).get(RECORD)
    return found


def record(thing: nn.Module | Optimizer) -> Prepared:
    """The record of `thing`, which is made if there is none."""
    found: Prepared = vars(thing).setdefault(RECORD, Prepared())
    return found


def tidy(thing: nn.Module) -> None:
    """Remove an empty record."""
    if of(thing) == Prepared():
        del vars(thing)[RECORD]


def prepared_mesh(model: nn.Module) -> Mesh | None:
    """The mesh for which this library has prepared `model`, or the first prepared module inside it."""
    known = (of(module) for module in model.modules())
    return next((one.mesh for one in known if one is not None and one.mesh is not None), None)


def device_mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh for which `model` was prepared, or over which it was sharded without this library, if any."""
    mesh = mesh_of(model)
    return None if mesh is None else mesh.device_mesh


def state_dict_type(model: nn.Module) -> Literal["sharded", "full"]:
    """The form in which a `CheckpointSaver` saves `model`, or the prepared module inside it."""
    known = (of(module) for module in model.modules())
    return "full" if any(one and one.state_dict_type == "full" for one in known) else "sharded"


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh for which `model` was prepared, or else the largest over which its user has sharded it."""
    if (mesh := prepared_mesh(model)) is not None:
        return mesh
    tensors = (*model.parameters(), *model.buffers())
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    return Mesh(max(meshes, key=lambda mesh: mesh.size())) if meshes else None


def mesh_of_world(model: nn.Module) -> Mesh | None:
    """The mesh of `model`, or one of replicas if it has none; None if this process is alone."""
    world, _ = process_group.world_and_rank()
    mesh = mesh_of(model)
    if mesh is None and world > 1:
        device_type = process_group.device_of_group().type
        mesh = Mesh(init_device_mesh(device_type, (world,), mesh_dim_names=("dp_replicate",)))
    return mesh


@contextmanager
def usable_or_marked(*things: nn.Module | Optimizer, agreement: Agreement | None = None) -> Iterator[None]:
    """Mark `things` as unusable if the body raises; tell the other ranks of `agreement`, if given."""
    try:
        yield
    except BaseException as error:
        for thing in things:
            mark_unusable(thing, str(error) or type(error).__name__)
        if agreement is not None:
            agreement.leave(error, "the preparation of the model")
        raise


def mark_unusable(thing: nn.Module | Optimizer, cause: str) -> None:
    """Make every later forward of a model or step of an optimizer raise an error with this cause."""
    record(thing).unusable = cause
    if isinstance(thing, Optimizer):
        thing.register_step_pre_hook(lambda one, args, kwargs: check_usable(one))
    else:
        thing.register_forward_pre_hook(lambda module, args: check_usable(module), prepend=True)


def check_module(model: object) -> None:
    """Raise a ParallelismTypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise ParallelismTypeError(f"model must be a torch.nn.Module, not {kind_in_words(model)}.")


def check_usable(thing: nn.Module | Optimizer) -> None:
    """Raise if preparing a model, or loading into a model or an optimizer, has failed halfway."""
    if not isinstance(thing, Optimizer):
        check_module(thing)
    found = of(thing)
    if found is None or found.unusable is None:
        return
    if isinstance(thing, Optimizer):
        raise CheckpointRuntimeError(
            f"This {type(thing).__name__} is unusable, because loading its state failed halfway; build a new "
            f"one. The cause: {found.unusable}"
        )
    raise ParallelismRuntimeError(
        "This model is unusable, because its preparation failed halfway; build a new one. "
        f"The cause: {found.unusable}"
    )


def refuse_copy(kind: type[nn.Module]) -> None:
    """Have copies and pickles of models whose class FSDP2 or DDP has made refused, with the remedy."""
    for name in ("__deepcopy__", "__reduce_ex__"):
        setattr(kind, name, _refuse_copy)


def _refuse_copy(module: nn.Module, _: object) -> None:
    raise ParallelismRuntimeError(
        f"A prepared {_torch.original_class(type(module)).__name__} cannot be copied (copy.deepcopy, "
        "AveragedModel) or pickled (torch.save), because torch's hooks and process groups belong to the one "
        "that was prepared. Save its values, full_model_state(model). Copy the model, or make its "
        "AveragedModel, before the preparation, and prepare both: parallelize_model(model, config), "
        "parallelize_model(averaged.module, config)."
    )


def follow_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's values of the buffers that forwards have changed; a collective."""
    for module in model.modules():
        for follow in getattr(of(module), "follow", ()):
            follow()


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter of `model` and register the shards again; see `check_usable`."""
    check_usable(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_parameters_canonical(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter (the shard) of all parameters of `model`, in registration order.

    Args:
        remove_duplicate: yield a tied parameter once, under its first name; False yields every name.
    """
    reshard(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield canonical_name(name), parameter


def named_buffers_canonical(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all buffers of `model`, including non-persistent ones."""
    for name, buffer in model.named_buffers():
        yield canonical_name(name), buffer
