"""FSDP2: its records of units and parameters, its collectives and its state.

FSDP2 records each parameter in a private object, which the sharded module refers to. With these objects a
shard is allocated once, with the padding that the all-gather needs, and filled in place.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors

# FSDP2's record of a parameter. Since torch 2.4.
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

# The wrap policy of Composer and FSDP1; only its function is used. Since torch 2.1.
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy

from composer_dist.errors import ParallelismRuntimeError


def policy_function(policy: CustomPolicy) -> Callable[[nn.Module], bool | dict[str, Any]]:
    """The function of a wrap policy."""
    return policy._lambda_fn


def fsdp_param_groups(module: FSDPModule) -> list[Any]:
    """The communication groups of one FSDP2 module. Since torch 2.12, which may have several per module."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def fsdp_params(module: FSDPModule) -> list[Any]:
    """The `FSDPParam` objects of the unit that `module` leads."""
    return [param for group in fsdp_param_groups(module) for param in group.fsdp_params]


def fsdp_param_place(param: Any) -> tuple[nn.Module, str]:
    """The module and key of a parameter, by FSDP2's record."""
    return param._module_info.module, param._module_info.param_name


def sharded_param(param: Any) -> nn.Parameter:
    """This rank's part of the parameter of an `FSDPParam`, as the optimizer knows it. Since torch 2.4."""
    sharded: nn.Parameter = param.sharded_param
    return sharded


def registered_param(param: Any) -> nn.Parameter | None:
    """What stands in the place of the parameter of an `FSDPParam` now."""
    place = param._module_info
    found: nn.Parameter | None = place.module._parameters.get(place.param_name)
    return found


def gathered_param(param: Any) -> torch.Tensor | None:
    """The whole parameter of an `FSDPParam`, as a forward reads it; None if sharded. Since torch 2.4."""
    return param._unsharded_param if param.sharded_state == ShardedState.UNSHARDED else None


def padded_shard(param: Any) -> tuple[torch.Size, torch.dtype]:
    """Size and dtype of the storage for `materialize_shard`: a shard with FSDP2's padding."""
    return param.padded_sharded_param_size, param.sharded_param.dtype


def materialize_shard(param: Any, padded: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
    """Give an `FSDPParam` that was sharded on the meta device the storage `padded` (see `padded_shard`).

    Returns the registered parameter, a DTensor, and its local tensor: `(rows, ...)`, uninitialized. FSDP2's
    padding at the end of the storage is set to zero, so that no later step needs to copy the shard.
    """
    size, dim = param.padded_sharded_param_size, param.fsdp_placement.dim
    requires_grad = param.sharded_param.requires_grad
    length = param.sharded_size[dim] if param.sharded_size.numel() else 0
    if length < size[dim]:
        padded.narrow(dim, length, size[dim] - length).zero_()
    local = padded.narrow(dim, 0, length)
    return _register_shard(param, local, padded, requires_grad), local


def adopt_shard(param: Any, local: torch.Tensor) -> nn.Parameter:
    """Make `local`, of a class with all-gather extensions, the shard of an `FSDPParam`.

    The parameter may have been sharded as a plain tensor. Returns the registered one, a DTensor.
    """
    parameter = _register_shard(param, local, local, requires_grad=False)
    param._init_extensions()
    return parameter


def _register_shard(
    param: Any, local: torch.Tensor, storage: torch.Tensor, requires_grad: bool
) -> nn.Parameter:
    parameter = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=requires_grad)
    param._sharded_param_data = storage.view(-1)
    param.sharded_param = parameter
    param._setattr_on_modules(parameter)
    return parameter


def shard_home(param: Any, device: torch.device) -> tuple[torch.device, bool]:
    """The device of an `FSDPParam`'s shard (the host with offload), and whether its memory is pinned."""
    return torch.device("cpu") if param.offload_to_cpu else device, param.pin_memory


class _Watched:
    """A collective for FSDP2's `set_custom_all_gather` that first calls a function."""

    def __init__(self, collective: Any, tell: Callable[[int, Any], None]) -> None:
        self._collective, self._tell = collective, tell
        self.allocate = collective.allocate

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(input_tensor.numel(), group)
        return self._collective(output_tensor, input_tensor, group, *args, **kwargs)


def before_collectives(module: nn.Module, tell: Callable[[bool, int, list[Any]], None]) -> None:
    """Call `tell(reduces, numel, groups)` before each collective of the FSDP2 unit `module`.

    `numel` is the number of elements that this rank sends; `groups` are the groups of the collective,
    followed by the replicas' if gradients are all-reduced next. The current collectives still run; they are
    not public. Since torch 2.9.
    """
    for group in fsdp_param_groups(module) if isinstance(module, FSDPModule) else ():

        def gathers(numel: int, shards: Any) -> None:
            tell(False, numel, [shards])

        def reduces(numel: int, shards: Any, group: Any = group) -> None:
            replicas = group.all_reduce_grads and group.mesh_info.replicate_mesh_dim is not None
            tell(True, numel, [shards, group._all_reduce_process_group] if replicas else [shards])

        group._all_gather_comm = _Watched(group._all_gather_comm, gathers)
        group._reduce_scatter_comm = _Watched(group._reduce_scatter_comm, reduces)


def finish_lazily(root: FSDPModule) -> None:
    """Run FSDP2's lazy initialization now, so that its checks run before the first forward.

    This also fixes the root, so that a submodule that is called first (such as an encoder by `generate`) does
    not become a root.
    """
    root._get_fsdp_state()._lazy_init()


def gather_before_backward_of(module: FSDPModule, tensors: Iterable[torch.Tensor]) -> None:
    """Have FSDP2 gather a unit when the gradient of one of `tensors` arrives, as it does for its outputs.

    Since torch 2.4.
    """
    for tensor in tensors:
        tensor.register_hook(module._get_fsdp_state()._pre_backward)


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """The tensors of a unit's output before whose backward FSDP2 gathers the unit by itself."""
    return list(collect_grad_tensors(output))


class _Freed:
    """Has autograd refuse the gathered parameters of a group that FSDP2 has freed; reading them would crash.

    FSDP2 hides from autograd that it frees the memory. Here the version of a parameter is another one
    for as long, which autograd compares before each use in backward. Since torch 2.4.
    """

    FAR = 1 << 24
    """The difference, to which the parameter's number is added."""
    params: ClassVar[WeakValueDictionary[int, Any]] = WeakValueDictionary()
    """FSDP2's records by number."""
    _numbers = count()

    def __init__(self, group: Any) -> None:
        self._numbered = [(next(self._numbers), param) for param in group.fsdp_params]
        self.params.update(self._numbered)
        self._freed: list[tuple[torch.Tensor, int]] = []
        """What is freed now, with its true version."""
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            setattr(group, name, partial(self._free, getattr(group, name)))
        group._to_unsharded = partial(self._gather, group._to_unsharded)

    def _free(self, to_sharded: Callable[[], None]) -> None:
        to_sharded()
        if self._freed:
            return
        far = []
        for number, param in self._numbered:
            gathered = getattr(param, "_unsharded_param", None)
            if gathered is not None:
                self._freed.append((gathered, gathered._version))
                far.append((gathered, gathered._version + self.FAR + number))
        _set_versions(far)

    def _gather(self, to_unsharded: Callable[[], None]) -> None:
        _set_versions(self._freed)
        self._freed.clear()
        to_unsharded()


def freed_parameter(error: RuntimeError) -> str | None:
    """The name of the parameter that autograd refuses because of `_Freed`, if this is such an error."""
    found = re.search(r"is at version (\d+); expected version (\d+)", str(error))
    param = found and _Freed.params.get(int(found[1]) - int(found[2]) - _Freed.FAR)
    return param._param_fqn if param else None


def _set_versions(versions: Sequence[tuple[torch.Tensor, int]]) -> None:
    if versions:
        torch._C._autograd._unsafe_set_version_counter(*zip(*versions, strict=True))


class _SecondOrder:
    """Keeps a unit gathered after a backward with `create_graph=True`, until the next without it.

    The graph of the gradients reads the parameters again. The gradients that it adds to them are reduced
    at the end of that backward, whether or not it passes the unit's outputs.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._watched: set[torch.Tensor] = set()
        self._module, self._state = module, module._get_fsdp_state()
        self._pre_backward = self._state._pre_backward
        self._reshard: list[bool] | None = None
        setattr(self._state, "_pre_backward", self.pre_backward)  # noqa: B010 - mypy takes it for a method
        cast(nn.Module, module).register_forward_pre_hook(self._before_forward, prepend=True)

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        groups = self._state._fsdp_param_groups
        if torch.is_grad_enabled() and self._reshard is None:
            self._reshard = [group.reshard_after_backward for group in groups]
            self._set([False] * len(groups))
        elif not torch.is_grad_enabled():
            self._restore()
        self._refuse_grad()
        result: torch.Tensor = self._pre_backward(gradient)
        if self._reshard is not None:
            gathered = {param._unsharded_param for param in fsdp_params(self._module)} - self._watched
            for parameter in filter(lambda one: one.requires_grad, gathered):
                parameter.register_post_accumulate_grad_hook(self._finish)
            self._watched |= gathered
        return result

    def _refuse_grad(self) -> None:
        """Refuse `torch.autograd.grad` of gathered parameters, whose gradients nobody would reduce."""
        for param in fsdp_params(self._module):
            gathered = gathered_param(param)  # None in units that were sharded after forward
            if gathered is not None and gathered.requires_grad:
                try:
                    if torch._C._will_engine_execute_node(get_gradient_edge(gathered).node):
                        return  # it adds to `grad`, as it does for the others
                except RuntimeError:
                    raise ParallelismRuntimeError(
                        f"torch.autograd.grad returns this rank's gradient of {param._param_fqn}, which "
                        "FSDP2 does not reduce; call loss.backward() and read .grad."
                    ) from None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._reshard is not None and torch._C._current_graph_task_id() == -1:
            self._restore()
            self._module.reshard()

    def _finish(self, parameter: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            self._restore()
            self._state._register_root_post_backward_final_callback()

    def _restore(self) -> None:
        if self._reshard is not None:
            self._set(self._reshard)
            self._reshard = None

    def _set(self, values: Iterable[bool]) -> None:
        for group, value in zip(self._state._fsdp_param_groups, values, strict=True):
            group.reshard_after_backward = value


def guard_backward(module: FSDPModule) -> None:
    """Make every backward through a unit right, or an error: see `_Freed` and `_SecondOrder`.

    FSDP2 makes the gathered parameters in the first forward; those that an evaluation under
    `torch.inference_mode()` has made could not be trained.
    """
    for group in fsdp_param_groups(module):
        _Freed(group)
    for param in fsdp_params(module):
        for name in ("init_all_gather_outputs", "init_unsharded_param"):
            setattr(param, name, partial(_outside_inference, param, name))
    _SecondOrder(module)


def _outside_inference(param: Any, name: str, *args: Any, **kwargs: Any) -> None:
    delattr(param, name)  # the method of the class is called from now on, which finds what is made here
    with torch.inference_mode(False):
        getattr(param, name)(*args, **kwargs)
