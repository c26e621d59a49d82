"""Every private torch import of this library, each with why it is needed and since when it exists.

Nothing else imports a name with an underscore from torch. `tests/test_torch.py` imports each one and
says which feature falls if it goes. Code that differs by torch version lives here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# A wrap policy as Composer and FSDP1 users write it; only its function is read. Since torch 2.1.
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy

# The store behind the default process group: ranks agree through it, because a store answers where a
# collective would hang on a dead peer. Since torch 2.0.
from torch.distributed.distributed_c10d import Store as Store
from torch.distributed.distributed_c10d import _get_default_store as _get_default_store

# The group that an operation of the dispatcher names. Since torch 2.2.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group as _resolve_process_group,
)

# Activation checkpointing by a wrapper module, as Composer, Lightning and torchtune users know it.
# Since torch 1.12; the path is private, the function universal.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper as CheckpointWrapper,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)

# Data parallelism by hooks, over DDP's reducer, and the class that it mixes into a module's own.
# Since torch 2.0.
from torch.distributed._composable.replicate import DDP as ComposableDDP
from torch.distributed._composable.replicate import replicate as replicate

# How DTensor says that a dimension is cut in several equal groups, each by itself: query, key and value in
# one matrix. FSDP2 has its own use for it. Since torch 2.5.
from torch.distributed.tensor.placement_types import _StridedShard as _StridedShard

# What a DTensor is made of: the one way to look at memory that is there as a DTensor without moving it
# (`DTensor.from_local` copies a shard in host memory to the mesh's device). Since torch 2.0.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Fused elementwise kernels over lists of tensors; torch.nn.utils.clip_grad uses them, and offers no
# public way to ask for the dtype of a norm. `dtype=` since torch 2.2.
from torch import _foreach_lerp_ as _foreach_lerp_
from torch import _foreach_mul_ as _foreach_mul_
from torch import _foreach_norm as _foreach_norm

# Divides gradients and notes infinities in one pass; torch.amp.GradScaler uses it. Since torch 1.10.
from torch import (
    _amp_foreach_non_finite_check_and_unscale_ as _amp_foreach_non_finite_check_and_unscale_,
)

# The mode under which an operation's arguments are seen: how initializers are traced. Since torch 1.13.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


# The switch that says whether torch's ring attention expects the balanced order of positions; the public
# context manager around the ring has no argument for it. Since torch 2.4, at this path since 2.6.
from torch.distributed.tensor.experimental._attention import _cp_options

# Applies a function to what is of one type in an operation's results. Since torch 1.13.
from torch.utils._pytree import tree_map_only as tree_map_only

# Applies a function to every tensor in a module's output, however it is nested; FSDP2 casts outputs with
# it. Since torch 1.13.
from torch.distributed.utils import _apply_to_tensors as _apply_to_tensors


# The collectives on whole tensors, which torch 2.13 has renamed; the old names warn there.
_before_2_13 = not hasattr(torch.distributed, "all_gather_single")
all_gather_single: Callable[..., Any] = getattr(
    torch.distributed, "all_gather_into_tensor" if _before_2_13 else "all_gather_single"
)
reduce_scatter_single: Callable[..., Any] = getattr(
    torch.distributed, "reduce_scatter_tensor" if _before_2_13 else "reduce_scatter_single"
)


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The communication groups of one FSDP2 module, none where it manages no parameter.

    Since torch 2.4; several groups per module since 2.12.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper, or the module itself."""
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module


# Collectives that return a new tensor; there is no public way to call them. Since torch 2.2.


def all_reduced(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of `tensor`, contiguous, over the ranks of the group of this name."""
    functional: Any = torch.ops._c10d_functional
    return _waited(functional.all_reduce(tensor, "sum", group))


def all_gathered(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The tensors of all ranks, contiguous and alike, one after the other along dimension 0."""
    functional: Any = torch.ops._c10d_functional
    return _waited(functional.all_gather_into_tensor(tensor, size, group))


def reduce_scattered(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's part, along dimension 0, of the sum of `tensor`, contiguous, over the ranks."""
    functional: Any = torch.ops._c10d_functional
    return _waited(functional.reduce_scatter_tensor(tensor, "sum", size, group))


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    functional: Any = torch.ops._c10d_functional
    waited: torch.Tensor = functional.wait_tensor(tensor)
    return waited


def gradient_sync_flags(module: nn.Module) -> list[tuple[object, str, bool]]:
    """Where `module` itself keeps whether backward synchronizes its gradients.

    FSDP2 and composable replicate have a setter for it but no public way to read it back.

    Returns:
        (owner, attribute, the value that means yes), for FSDP2, DDP and composable replicate.
    """
    flags: list[tuple[object, str, bool]] = []
    if isinstance(module, FSDPModule):
        for group in fsdp_param_groups(module):
            flags += [(group, "reduce_grads", True), (group, "all_reduce_grads", True)]
    if isinstance(module, DistributedDataParallel):
        flags.append((module, "require_backward_grad_sync", True))
    if isinstance(module, ComposableDDP):
        flags.append((replicate.state(module), "_no_sync", False))
    return flags


def is_replicated(module: nn.Module) -> bool:
    """Whether composable replicate has been at work on `module`."""
    return isinstance(module, ComposableDDP)


def serve_in_place(model: nn.Module, ddp: DistributedDataParallel) -> None:
    """Let composable replicate's hooks, set at the first call, run `ddp` around the forward of `model`.

    By itself replicate makes its DDP in the first forward, and over a bare ParameterList, which knows
    neither buffers nor sparse embeddings nor names. The state's fields are the same since torch 2.2.
    """
    if not is_replicated(model):
        replicate(model)
    state: Any = replicate.state(model)
    state.module, state.has_initialized = model, True
    state._init_args, state._init_kwargs = (), {}
    state._ddp = ddp


def register_late_hooks(model: nn.Module) -> None:
    """Register what the user has given to composable replicate's `register_comm_hook` since the start."""
    replicate.state(model).register_comm_hook()


class InPlaceDDP(DistributedDataParallel):
    """DDP that composable replicate's hooks call; a subclass says what happens around its steps.

    The hooks call what DDP's own forward calls, `_pre_forward` and `_post_forward`. Since torch 2.0.
    """

    def before_forward(self) -> None:
        """A forward begins."""

    def on_error(self, error: RuntimeError) -> None:
        """DDP refuses to begin a forward; may raise an error of its own."""

    def wants_backward(self, output: Any) -> bool:
        """Whether the reducer is to average the next backward; asked after a forward that synchronizes."""
        raise NotImplementedError

    is_nested = False
    """Whether the present forward runs inside of another one of the same module, which settles all."""

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_nested:
            return args, kwargs
        self.before_forward()
        try:
            return super()._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.on_error(error)
            raise

    def _post_forward(self, output: Any) -> Any:
        if self.is_nested:
            return output
        sync = self.require_backward_grad_sync and torch.is_grad_enabled()
        self.require_backward_grad_sync = ready = sync and self.wants_backward(output)
        # Of a static graph the first output starts the reducer in backward, asked for or not.
        if ready or not self.static_graph or self._static_graph_delay_allreduce_enqueued:
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        self.require_forward_param_sync = sync  # broadcast buffers in the next forward
        return output


@contextmanager
def ddp_ignores(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Inside, a DDP that is built around `model` leaves out the parameters and buffers called so.

    The attribute is how DDP is told, and has been since torch 1.7. It joins module and parameter by a dot
    in one place even for the root's own, so those are named both ways.
    """
    key = "_ddp_params_and_buffers_to_ignore"
    before = vars(model).get(key)
    vars(model)[key] = [*names, *(f".{name}" for name in names if "." not in name)]
    try:
        yield
    finally:
        del vars(model)[key]
        if before is not None:
            vars(model)[key] = before


def accumulated_nbytes(module: FSDPModule) -> int:
    """Bytes of a unit's whole gradients, in the dtype in which FSDP2 adds them up. Since torch 2.4."""
    return sum(
        param._orig_size.numel() * (group.mp_policy.reduce_dtype or param.sharded_param.dtype).itemsize
        for group in fsdp_param_groups(module)
        for param in group.fsdp_params
        if param.sharded_param.requires_grad
    )


def current_backward() -> int:
    """The number of the backward pass that this thread is in, -1 outside. Since torch 2.1."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once when the current backward pass is over, before it returns.

    DDP and FSDP2 finish their gradients this way; callbacks run in the order in which they were
    queued, on the streams of the caller. Since torch 1.0; there is no public name for it.
    """
    Variable._execution_engine.queue_callback(callback)


# FSDP2 keeps what it knows of each parameter in private objects, reachable from the sharded module.
# They are what lets a shard be allocated once, padded as the all-gather wants it, and filled in place.


def fsdp_params(module: FSDPModule) -> list[Any]:
    """The `FSDPParam` objects of the unit that `module` is, or leads."""
    return [param for group in fsdp_param_groups(module) for param in group.fsdp_params]


def fsdp_param_place(param: Any) -> tuple[nn.Module, str]:
    """The module, and the key there, under which FSDP2 knows a parameter."""
    return param._module_info.module, param._module_info.param_name


def padded_shard(param: Any) -> tuple[torch.Size, torch.dtype]:
    """Size and dtype of the storage that `materialize_shard` needs: a shard with FSDP2's padding."""
    return param.padded_sharded_param_size, param.sharded_param.dtype


def materialize_shard(param: Any, padded: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
    """Give an `FSDPParam` that was sharded on the meta device the storage `padded`, as `padded_shard` says.

    Returns the registered parameter, a DTensor, and its local tensor: `(rows, ...)`, uninitialized.
    The storage ends in FSDP2's padding, zeroed, so that no later step has to copy the shard.
    """
    size, dim = param.padded_sharded_param_size, param.fsdp_placement.dim
    requires_grad = param.sharded_param.requires_grad
    length = param.sharded_size[dim] if param.sharded_size.numel() else 0
    if length < size[dim]:
        padded.narrow(dim, length, size[dim] - length).zero_()
    local = padded.narrow(dim, 0, length)
    parameter = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=requires_grad)
    param._sharded_param_data = padded.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    return parameter, local


class _Watched:
    """An FSDP2 collective, such as `set_custom_all_gather` takes, that tells somebody before it starts."""

    def __init__(self, collective: Any, tell: Callable[[int, Any], None]) -> None:
        self._collective, self._tell = collective, tell
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(input_tensor.numel(), group)
        return self._collective(output_tensor, input_tensor, group, *args, **kwargs)


def before_collectives(module: nn.Module, tell: Callable[[bool, int, list[Any]], None]) -> None:
    """Have `tell(reduces, numel, groups)` called before each collective of the FSDP2 unit `module`.

    `numel` is the length of what this rank sends; `groups` are those over which it goes, the replicas' after
    the shards' where gradients are all-reduced next. The present collectives are kept inside, to which
    there is no public way. Since torch 2.9.
    """
    for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():

        def gathers(numel: int, shards: Any) -> None:
            tell(False, numel, [shards])

        def reduces(numel: int, shards: Any, group: Any = group) -> None:
            replicas = group.all_reduce_grads and group.mesh_info.replicate_mesh_dim is not None
            tell(True, numel, [shards, group._all_reduce_process_group] if replicas else [shards])

        group._all_gather_comm = _Watched(group._all_gather_comm, gathers)
        group._reduce_scatter_comm = _Watched(group._reduce_scatter_comm, reduces)


def forget_iteration(model: nn.Module) -> None:
    """Bring FSDP2 below `model` back to where a forward may begin, after one or a backward has raised.

    Whole gradients that were waiting to be reduced are dropped too, which torch's own reset leaves in
    place. `reset_iter_state` is public since torch 2.13; of older versions there is none.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()
        for param in fsdp_params(unit):
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


forgets_iterations = hasattr(FSDPModule, "reset_iter_state")
"""Whether `forget_iteration` works in this version of torch."""


def group_of_collective(operation: Any, arguments: Sequence[Any]) -> torch.distributed.ProcessGroup | None:
    """The group over which an operation of the dispatcher communicates, if it does.

    The objects of torch.distributed's collectives are boxed; functional ones name their group. Since
    torch 2.5.
    """
    if operation.namespace == "c10d":
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                group = torch.distributed.ProcessGroup.unbox(argument)
                return _resolve_process_group(group.group_name)
    if operation.namespace == "_c10d_functional":
        names = [one.name for one in operation._schema.arguments]
        if "group_name" in names:
            return _resolve_process_group(arguments[names.index("group_name")])
    return None


def adopt_shard(param: Any, local: torch.Tensor) -> nn.Parameter:
    """Let `local`, of a class with all-gather extensions, be the shard of an `FSDPParam`.

    The parameter may have been sharded as a plain tensor. Returns the registered one, a DTensor.
    """
    parameter = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=False)
    param._sharded_param_data = local.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    param._init_extensions()
    return parameter


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], parts: int) -> DTensor:
    """`local`, where it is, as a DTensor of `parts` times as many rows; nothing is copied or sent."""
    shape = torch.Size([*(rows * parts for rows in local.shape[:1]), *local.shape[1:]])
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def shard_home(param: Any, device: torch.device) -> tuple[torch.device, bool]:
    """Where an `FSDPParam` keeps its shard, and whether in pinned memory: host memory with offload."""
    return torch.device("cpu") if param.offload_to_cpu else device, param.pin_memory


def finish_lazily(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialization now, so that its checks speak before the first forward.

    It also settles which module is the root, so that a submodule may be called first (an encoder by
    `generate`, say) without becoming a root of its own.
    """
    root._get_fsdp_state()._lazy_init()


# Meshes cut and joined: FSDP2 shards over data and context parallel ranks together, and wants a part of
# the mesh whose other parts tensor parallelism uses. Slicing by a flattened name is deprecated in favor of
# keeping the flattened mesh, which only these make. `_flatten` since torch 2.5, `_concatenate` since 2.10.


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of several dimensions as one of a single dimension; the same one at every call."""
    return mesh._flatten(name)


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """The mesh with the dimensions of several disjoint parts of one mesh, over the parts' groups."""
    return DeviceMesh._concatenate(list(meshes))


@contextmanager
def ring_attention(mesh: DeviceMesh, length: int, balanced: bool) -> Iterator[None]:
    """Inside, scaled-dot-product attention is torch's ring over the ranks of `mesh` (1-D).

    Torch's context also cuts tensors, one of them at least, from which it reads the sequence's length.
    """
    from torch.distributed.tensor.experimental import context_parallel

    before = _cp_options.enable_load_balance
    _cp_options.enable_load_balance = balanced
    lengthwise = torch.empty(length, device=mesh.device_type)
    try:
        with context_parallel(
            mesh, buffers=[lengthwise], buffer_seq_dims=[0], no_restore_buffers={lengthwise}
        ):
            yield
    finally:
        _cp_options.enable_load_balance = before


def _overwrite(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.zero_()


@contextmanager
def all_initializers_write() -> Iterator[None]:
    """Inside, every function of `nn.init` writes to meta tensors too, so that tracing sees that it does.

    Since torch 2.13 these four return at once for them. Their code is exchanged rather than their
    names, because initializers import them by name.
    """
    init = nn.init
    silent = [init._no_grad_trunc_normal_, init.orthogonal_, init.sparse_, init.dirac_]
    before = [(function, function.__code__, function.__defaults__) for function in silent]
    try:
        for function in silent:
            function.__code__, function.__defaults__ = _overwrite.__code__, None
        yield
    finally:
        for function, code, defaults in before:
            function.__code__, function.__defaults__ = code, defaults


def one_side_effect() -> AbstractContextManager[None]:
    """Inside, what a checkpointed forward changes about objects does not keep it from being compiled.

    Tensor parallelism exchanges parameters for their parts and back, say. Compiled, such a change happens
    in forward and not again in backward. Since torch 2.10; torchtitan sets it too.
    """
    from torch._dynamo import config

    patch: AbstractContextManager[None] = config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    return patch


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without its autograd history, sharing memory and version: a change in place shows.

    Beneath autograd, as in a dispatch mode, a plain `detach` shares no version. Since torch 2.1; torch's
    own selective checkpointing does the same.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def inductor_modes() -> list[str]:
    """The values of torch.compile's `mode`. Since torch 2.0."""
    from torch._inductor import list_mode_options

    return sorted(list_mode_options())


def inductor_options() -> list[str]:
    """The keys of torch.compile's `options`. Since torch 2.0."""
    from torch._inductor import list_options

    return list_options()


def backend_within(
    budget: float, backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[[Any, Any], Any]:
    """A backend for torch.compile that keeps at most a share `budget` of the activations.

    The setting is global in torch, so it holds while this backend compiles and no longer. Since torch
    2.4; torch 2.13 has `torch.autograd.graph.region_activation_memory_budget`, which is to be traced.
    """
    from torch._functorch import config

    if backend == "inductor":
        compiler: Any = torch._TorchCompileInductorWrapper(mode, options, dynamic)
    else:
        compiler = torch._TorchCompileWrapper(backend, mode, options, dynamic)

    def compile_within_budget(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs)

    return compile_within_budget


def operators() -> dict[str, list[str]]:
    """Every operation that the dispatcher knows, as "aten.mm", with its overloads. Since torch 1.5."""
    found: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        found.setdefault(base.replace("::", "."), []).append(overload or "default")
    return found


def is_composite(operator: Any) -> bool:
    """Whether torch replaces an operation by others before a dispatch mode sees it. Since torch 1.12."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(operator.has_kernel_for_dispatch_key(key))


def original_class(sharded: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before `fully_shard` or `replicate` put two of theirs in front of it."""
    return sharded.__mro__[2]


def clear_dtensor_caches() -> None:
    """Forgets the meshes that DTensor's sharding propagation has seen; called on `destroy`.

    The caches are keyed by equality of meshes, which leaves out the groups, and hand back the mesh
    they saw first. After `destroy_process_group` and a new `init_process_group` an equal mesh has
    groups of other names, so the first redistribution fails or talks to the wrong ranks. Torch's own
    tests call this for the same reason. In torch 2.11 to 2.13 it clears the C++ cache too.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def collective_timeout() -> timedelta:
    """How long a collective of the default group may take: what `init_process_group` was given.

    Backends keep it in their options, to which there is no public way. Since torch 2.6.
    """
    group = torch.distributed.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types] if group else []
    return max((backend.options._timeout for backend in backends), default=timedelta(minutes=30))


def optimizers_were_made() -> bool:
    """Whether this process has made any optimizer so far.

    Each class's `step` is marked when its first object is made (`Optimizer._patch_step_function`, by
    another name before torch 2.0), which saves a search through all objects. Since torch 1.5.
    """
    kinds = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and first corner of a DTensor's local part, by DTensor's own account. Since torch 2.2."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, `torch.load` makes tensors without memory that know their place in the file. Since 2.7."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def offset_in_file(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor that was loaded `without_values` begins in its file, in bytes."""
    return int(tensor.untyped_storage()._checkpoint_offset or 0)


def storage_info(path: str, offset: int, length: int) -> Any:
    """How `torch.distributed.checkpoint` notes where an item lies, inside of `.metadata`. Since torch 2.0."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)
