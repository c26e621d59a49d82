"""Backward through FSDP2's units: each one is right, or raises an error that names the parameter."""

import operator
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
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from composer_dist._torch.backward import (
    at_end_of_backward,
    current_backward,
    is_calling_grad,
    is_transforming,
)
from composer_dist._torch.data_writes import data_writes, watch_data, wrote_data
from composer_dist._torch.sharding import (
    fsdp_param_groups,
    fsdp_params,
    gathered_param,
    register_gathered,
    register_shards,
)
from composer_dist._torch.tensors import which_are_true, while_alive
from composer_dist._torch.unit_hooks import shorten_hooks
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.wording import listed


class _Versions:
    """Has autograd refuse gathered parameters that are no longer what the forward used.

    FSDP2 hides from autograd that it frees their memory, which would crash a reader, and that it gathers
    other values after a step. Autograd compares the version of each before it uses them in backward. Here it
    is a number of the parameter, and of the values that were gathered; another bit is set while they are
    freed. Since torch 2.4.
    """

    FREED, OURS, VALUES = 1 << 31, 1 << 30, 1 << 11
    """Bits of a version, of 32; and how many values of one parameter are distinguished."""
    units: ClassVar[WeakValueDictionary[int, "_Versions"]] = WeakValueDictionary()
    """Those of all units by identity, in the order in which they were made."""
    cut = False
    """Whether tensor parallelism has cut a parameter of any unit."""
    compared = 0
    """How many parameters are compared later."""
    _numbers = count()

    def __init__(self, group: Any) -> None:
        self._group = group
        numbers = [next(self._numbers) % (self.OURS // self.VALUES) for _ in group.fsdp_params]
        self.units[id(self)] = self
        self._now = [self.OURS + number * self.VALUES for number in numbers]
        """The versions of the parameters while they are gathered."""
        self._held: tuple[int, ...] = ()
        """The versions of `_tensors` while they are gathered, and while they are freed."""
        self._freed: tuple[int, ...] = ()
        self._none = [0] * len(numbers)
        self._gathered: list[torch.Tensor] = []
        """The gathered parameters."""
        self._tensors: tuple[torch.Tensor, ...] = ()
        """And this rank's parts of those that tensor parallelism has cut."""
        self._shards: list[int] = []
        """The versions of the shards that were gathered last."""
        self._parts: list[torch.Tensor] = []
        """Of the shards, as they were then: their memory."""
        self._shard_writes: list[int] = []
        """Through `.data` of the shards, when they were gathered."""
        self._writes: list[int] = []
        """Through `.data` of the gathered parameters, when they were gathered."""
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            setattr(group, name, partial(self._free, getattr(group, name)))
        group._to_unsharded = partial(self._gather, group._to_unsharded)

    def _free(self, to_sharded: Callable[[], None]) -> None:
        lost = self._lost()
        to_sharded()
        self._set(self._freed)
        self._refuse(lost)

    def _gather(self, to_unsharded: Callable[[], None]) -> None:
        lost = self._lost()
        to_unsharded()
        if not self._tensors:  # FSDP2 makes them once
            self._gathered = gathered = [param._unsharded_param for param in self._group.fsdp_params]
            self._cut = [index for index, one in enumerate(gathered) if isinstance(one, DTensor)]
            _Versions.cut |= bool(self._cut)
            self._tensors = *gathered, *(gathered[index]._local_tensor for index in self._cut)
            watch_data(gathered, are_freed=True)
        parts = [param.sharded_param._local_tensor for param in self._group.fsdp_params]
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            self._parts = parts
            watch_data(parts)
        self._writes = self._all_writes(self._gathered)
        if wrote_data():  # between a forward and its backward this is right: these are the new values
            self._shard_writes = self._all_writes(self._sharded())
        self.renew()
        self._refuse(lost)

    def numbered(self, number: int) -> Any:
        """FSDP2's record of the parameter with this number; None if the unit has none."""
        numbers = [version % self.OURS // self.VALUES for version in self._now]
        return self._group.fsdp_params[numbers.index(number)] if number in numbers else None

    def is_stale(self) -> bool:
        """Whether the shards have changed since FSDP2 gathered them, and it would compute without that."""
        return not self._group.is_sharded and self._versions_of_shards() != (self._shards, self._shard_writes)

    def renew(self) -> None:
        """Have autograd take the parameters for other ones if their shards have changed."""
        shards, writes = self._versions_of_shards()
        if (shards, writes) != (self._shards, self._shard_writes):
            before = zip(self._shards, self._shard_writes, strict=False)
            for index, (now, then) in enumerate(zip(zip(shards, writes, strict=True), before, strict=False)):
                if now != then:
                    first, value = divmod(self._now[index], self.VALUES)
                    self._now[index] = first * self.VALUES + (value + 1) % self.VALUES
            self._shards, self._shard_writes = shards, writes
            self._held = *self._now, *(self._now[index] for index in self._cut)
            self._freed = tuple(version + self.FREED for version in self._held)
        self._set(self._held)

    def outdate(self) -> None:
        """As `renew`, while the earlier values stay gathered; the next forward gathers others."""
        self.renew()
        self._shards = []

    def _sharded(self) -> list[Any]:
        return [param.sharded_param for param in self._group.fsdp_params]

    def _versions_of_shards(self) -> tuple[list[int], list[int]]:
        shards = self._sharded()
        return [one._version + one._local_tensor._version for one in shards], self._all_writes(shards)

    def _all_writes(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [data_writes(one) for one in tensors] if wrote_data() else self._none

    def _set(self, versions: tuple[int, ...]) -> None:
        if self._tensors:
            torch._C._autograd._unsafe_set_version_counter(self._tensors, versions)

    def refuse_lost(self) -> None:
        """Refuse changes of gathered parameters since they were last looked at."""
        self._refuse(self._lost())

    def _lost(self) -> list[str]:
        """Which parameters somebody has changed who found something else than the shard in its place."""
        if self._group.is_unsharded:
            if _Versions.compared and (other := self._differing()):
                return other
            versions, writes = [one._version for one in self._gathered], self._all_writes(self._gathered)
            if versions != self._now or writes != self._writes:
                found = zip(versions, writes, strict=True)
                before = zip(self._now, self._writes, strict=True)
                both = zip(self._group.fsdp_params, found, before, strict=True)
                return [param._param_fqn for param, now, then in both if now != then]
        elif self._group.is_sharded_post_forward:
            shards = [(one, one._sharded_post_forward_param) for one in self._group.fsdp_params]  # version 0
            return [param._param_fqn for param, one in shards if one._version + one._local_tensor._version]
        return []

    def _differing(self) -> list[str]:
        """Which parameters have other values, where they are compared."""
        held = [(one, vars(one)) for one in self._group.fsdp_params]
        checks = {one._param_fqn: values.pop(_DIFFERS) for one, values in held if _DIFFERS in values}
        _Versions.compared -= len(checks)
        return which_are_true({name: differs() for name, differs in checks.items()})

    def _refuse(self, lost: list[str]) -> None:
        if lost:
            raise ParallelismRuntimeError(
                f"{listed(lost)} changed in place between a forward and its backward, while FSDP2 keeps the "
                "gathered values, so the change would be lost. Change parameters after backward, or in "
                "summon_full_params(model, writeback=True)."
            )


_DIFFERS = "_composer_dist_differs"


def compare_later(param: Any, differs: Callable[[], torch.Tensor | None]) -> None:
    """Refuse the gathered values of an `FSDPParam` that are others when they are next used or freed."""
    _Versions.compared += _DIFFERS not in vars(param)
    setattr(param, _DIFFERS, differs)


def refused_parameter(error: RuntimeError) -> tuple[str, bool] | None:
    """The parameter that autograd refuses because of `_Versions`, and whether it is freed or has changed."""
    found = re.search(r"is at version (\d+); expected version (\d+)", str(error))
    now = int(found[1]) if found else 0
    number = now % _Versions.OURS // _Versions.VALUES
    units = reversed([*_Versions.units.values()]) if now & _Versions.OURS else ()
    param = next((one for unit in units if (one := unit.numbered(number)) is not None), None)
    return (param._param_fqn, now >= _Versions.FREED) if param else None


def is_refused_view(error: RuntimeError) -> bool:
    """Whether autograd refuses a view of a part of a parameter because of `_Versions`."""
    return _Versions.cut and is_changed_view(error)


def is_changed_view(error: RuntimeError) -> bool:
    """Whether autograd refuses a view of a tensor that has changed in place."""
    return "another view of its base has been modified inplace" in str(error)


def is_gathered(version: int) -> bool:
    """Whether FSDP2 has gathered the tensor of this version, which is one of `_Versions`."""
    return bool(version & _Versions.OURS)


def has_version(tensor: torch.Tensor, version: int) -> bool:
    """Whether `tensor` has the values that it had at `version`; FSDP2 may have freed it since."""
    return (tensor._version ^ version) & (_Versions.FREED - 1) == 0


class _SecondOrder:
    """Keeps a unit gathered after a backward with `create_graph=True`, until the next without it.

    The graph of the gradients reads the parameters again. The gradients that it adds to them are reduced
    at the end of that backward, whether or not it passes the unit's outputs.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._watched: set[torch.Tensor] = set()
        self._groups = fsdp_param_groups(module)
        self._versions = [_Versions(group) for group in self._groups]
        self._module, self._state = module, module._get_fsdp_state()
        self._pre_backward = self._state._pre_backward
        self._reshard: list[bool] | None = None
        of_tree = vars(self._state._comm_ctx).setdefault("_composer_dist_forwards", ([], []))
        self._inside: list[_SecondOrder] = of_tree[0]
        """The units of this tree whose forwards run."""
        self._gathered: list[_SecondOrder] = of_tree[1]
        """Those that they have left gathered; code after the outermost forward finds shards there too."""
        setattr(self._state, "_pre_backward", self.pre_backward)  # noqa: B010 - mypy takes it for a method
        cast(nn.Module, module).register_forward_pre_hook(self._before_forward, prepend=True)
        cast(nn.Module, module).register_forward_hook(self._after_forward, always_call=True)

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        groups = self._groups
        register_gathered(groups)
        for group in groups:
            group._composer_dist_synchronizes = group.reduce_grads and group.all_reduce_grads
        if torch.is_grad_enabled() and self._reshard is None:
            self._reshard = [group.reshard_after_backward for group in groups]
            self._set([False] * len(groups))
        elif not torch.is_grad_enabled():
            self._restore()
        if is_calling_grad():
            self._refuse_grad()
        for versions in self._versions:
            versions.refuse_lost()
            if versions.is_stale():
                versions.outdate()
        result: torch.Tensor = self._pre_backward(gradient)
        if self._reshard is not None:
            gathered = {param._unsharded_param for param in fsdp_params(self._module)} - self._watched
            for parameter in filter(lambda one: one.requires_grad, gathered):
                parameter.register_post_accumulate_grad_hook(while_alive(self._finish))
            self._watched |= gathered
            at_end_of_backward(partial(register_shards, groups))
        return result

    def _refuse_grad(self) -> None:
        """Refuse `torch.autograd.grad` of gathered parameters, whose gradients nobody would reduce."""
        if is_transforming():
            return  # torch.func differentiates its own arguments only
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

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self in self._inside:
            self._inside.remove(self)
        if not torch.is_grad_enabled() or current_backward() != -1:
            return
        if not all(group.is_sharded for group in self._groups):
            self._gathered.append(self)
        while not self._inside and self._gathered:
            register_shards(self._gathered.pop()._groups)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self)
        register_gathered(self._groups)
        for versions in self._versions:
            versions.refuse_lost()
        if self._reshard is not None and torch._C._current_graph_task_id() == -1:
            self._restore()
            self._module.reshard()
        elif any(versions.is_stale() for versions in self._versions):
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
        for group, value in zip(self._groups, values, strict=True):
            group.reshard_after_backward = value


def guard_backward(module: FSDPModule) -> None:
    """Make every backward through a unit right, or raise an error: see `_Versions` and `_SecondOrder`.

    FSDP2 makes the gathered parameters in the first forward; those that an evaluation under
    `torch.inference_mode()` has made could not be trained.
    """
    for param in fsdp_params(module):
        param.__class__ = _NotGatheredYet  # takes no memory, unlike a method of each object
    shorten_hooks(module)
    _SecondOrder(module)


class _NotGatheredYet(FSDPParam):
    """An `FSDPParam` until it has made its gathered parameter, which must not be an inference tensor."""

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        with torch.inference_mode(False):
            super().init_all_gather_outputs(*args, **kwargs)

    def init_unsharded_param(self) -> None:
        with torch.inference_mode(False):
            super().init_unsharded_param()  # type: ignore[no-untyped-call]
        self.__class__ = FSDPParam  # type: ignore[assignment]
