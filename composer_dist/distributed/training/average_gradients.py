"""Averages tensors and gradients over ranks, in few collectives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.distributed.before_steps import Check, before_every_step, end_checks
from composer_dist.distributed.moving.messages import in_buckets
from composer_dist.distributed.ranks.process_group import device_for_facts
from composer_dist.distributed.ranks.reports import lost_named
from composer_dist.distributed.training.gradient_hooks import GradientHooks
from composer_dist.distributed.training.local_gradients import LocalGradients
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError
from composer_dist.structure.blocks import called_parts
from composer_dist.tensors.nested import tensors_in


def average_plain_gradients(
    root: nn.Module, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None
) -> PlainGradientAveraging:
    """Average the gradients of parameters that nothing shards, over all ranks of `mesh`.

    This happens once per backward through an output of `root`, after all local gradients are computed, in
    one all-reduce per dtype and mesh dimension. All ranks must run that backward. A parameter that this
    rank did not use counts as zero; one that no rank used gets no gradient. `no_sync` postpones the
    averaging to the next synchronized backward.

    Args:
        root: the module whose outputs the loss is computed from; of a bare container, the parts.
        parameters: plain parameters by name, the same on every rank, none of them a DTensor.
        mesh: the data-parallel mesh, of any number of dimensions; None is the whole world.

    Returns:
        A handle; its `remove()` ends the averaging.

    Raises:
        ParallelismTypeError: a parameter is sharded.
        ParallelismRuntimeError: from backward, if it reached a parameter but no output of `root`.
    """
    if sharded := [name for name, p in parameters.items() if isinstance(p, DTensor)]:
        raise ParallelismTypeError(
            f"{', '.join(sharded)} are DTensors, whose gradients FSDP2 reduces; pass plain parameters only."
        )
    return PlainGradientAveraging(root, parameters, mesh)


class PlainGradientAveraging:
    """The handle of `average_plain_gradients`.

    It uses one callback per backward instead of hooks per parameter: ranks may produce gradients in
    different orders, or not at all, but the callback runs once on each. It is queued when the gradient
    reaches an output of the root, where FSDP2 queues its own. Hooks of a tensor run in the order of
    registration, so all ranks run the same collectives in the same order.
    """

    sync: bool = True
    """Whether backward averages; `no_sync` sets it."""

    def __init__(
        self, root: nn.Module, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None
    ) -> None:
        self._names: dict[torch.Tensor, str] = {p: name for name, p in parameters.items()}
        self._mesh = mesh
        self._began, self._backward = -1, -1
        self._pending = False
        averaged = parameters if groups_of(mesh) else {}
        self._local = LocalGradients(averaged)
        before_every_step(self, PlainGradientAveraging._check_of)
        self._hooked: set[torch.Tensor] = set()
        self._leaves = WeakTensorKeyDictionary()
        """The handles of the hooks on outputs that are leaves."""
        self._handles: list[RemovableHandle] = [
            part.register_forward_hook(self._watch) for part in called_parts(root)
        ]
        self._hooks = GradientHooks(self, averaged, self._handles)
        self._hook_trainable()
        self._record = prepared.record(root)
        self._record.averagings.append(self)
        self._record.ends.append(self.remove)

    def remove(self) -> None:
        """Stop averaging and remove all hooks."""
        self._hooks.release()
        for handle in [*self._handles, *self._leaves.values()]:
            handle.remove()
        if self in self._record.averagings:
            self._record.averagings.remove(self)
            self._record.ends.remove(self.remove)
        self._local.clear()
        end_checks(self)

    def _hook_trainable(self) -> None:
        """Frozen parameters take no hooks, so those that were thawed since get theirs at the next forward."""
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                hook = parameter.register_post_accumulate_grad_hook(_torch.while_alive(self._saw))
                self._handles.append(hook)

    def _check_of(self, optimizer: Optimizer) -> Check[PlainGradientAveraging] | None:
        held = (one for group in optimizer.param_groups for one in group["params"])
        holds = any(isinstance(one, torch.Tensor) and one in self._names for one in held)
        return PlainGradientAveraging.check if holds else None

    def check(self, optimizer: Optimizer) -> None:
        """Raise a ParallelismRuntimeError before a step of `optimizer` with a gradient of one rank."""
        self._local.check(optimizer)

    def _watch(self, root: nn.Module, inputs: Any, output: Any) -> None:
        self._hook_trainable()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                _torch.hook_output(tensor, self._queue, self._leaves)

    def begin(self) -> None:
        """A gradient has arrived; it may be the first of a backward."""
        if self._began != _torch.current_backward():
            self._began = _torch.current_backward()
            self._hooks.begin()

    def averages(self, parameter: torch.Tensor) -> bool:
        """Whether the current backward averages this gradient, and no earlier one with it."""
        return self.sync and parameter not in self._local

    def _queue(self, gradient: torch.Tensor) -> None:
        # By the number of the pass: a flag would stay set after a backward that raised.
        if self._backward != _torch.current_backward():
            self._backward = _torch.current_backward()
            self._pending = True
            self._local.refuse_changed()
            _torch.at_end_of_backward(self._average)

    def _saw(self, parameter: torch.Tensor) -> None:
        """A parameter has got a gradient."""
        if not self.sync:
            self._local.add([parameter])
        elif not self._pending and groups_of(self._mesh):
            backward = _torch.current_backward()
            # At the end: an output may get its gradient after this parameter got its own.
            _torch.at_end_of_backward(lambda: self._refuse(parameter, backward))

    def _refuse(self, parameter: torch.Tensor, backward: int) -> None:
        if self._backward != backward and not self._pending:
            raise ParallelismRuntimeError(
                f"Backward reached the parameter {self._names[parameter]!r} but no output of the prepared "
                "model, so it would not be averaged over the ranks. Call the prepared model itself; let it "
                "return what the loss needs (in tuples, lists, mappings or dataclasses)."
            )

    @torch.no_grad()
    def _average(self) -> None:
        """Replace each gradient by its mean over the ranks, including what `no_sync` has accumulated."""
        self._pending = False
        groups = groups_of(self._mesh)
        if not self.sync or not groups:
            return
        self._local.clear()
        by_dtype: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for parameter in self._names:
            if parameter.requires_grad:
                # Half precision is summed in float32: there are few of these, and many ranks.
                by_dtype[torch.promote_types(parameter.dtype, torch.float32)].append(parameter)
        for dtype, parameters in by_dtype.items():
            device = torch.device(self._mesh.device_type) if self._mesh else parameters[0].device
            parts = [_dense_gradient(p).to(device, dtype).flatten() for p in parameters]
            parts.append(torch.tensor([p.grad is not None for p in parameters]).to(device, dtype))
            *means, used = _means(parts, groups)
            for index, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
                _store_gradient(parameter, mean, used[index])
        self._hooks.finish()


def groups_of(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """The groups whose all-reduces, one after the other, span all ranks of `mesh`."""
    if mesh is not None:
        return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    world = dist.group.WORLD if dist.is_available() else None
    return [world] if world is not None and dist.get_world_size(world) > 1 else []


def anywhere(flags: Sequence[bool], groups: Sequence[dist.ProcessGroup]) -> list[bool]:
    """For each flag, whether it is true on any rank of `groups`."""
    facts = torch.tensor(flags, dtype=torch.int32)  # not all backends send booleans
    for group in groups:
        facts = facts.to(device_for_facts(group))
        dist.all_reduce(facts, dist.ReduceOp.MAX, group)
    return [bool(one) for one in facts.tolist()]


def exchange(facts: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The rows of `facts`, `(rows, columns)`, of all ranks of `groups`, one group after the other."""
    for group in groups:
        near = facts.to(device_for_facts(group))
        everyone = [torch.empty_like(near) for _ in range(group.size())]
        dist.all_gather(everyone, near, group=group)
        facts = torch.cat(everyone).cpu()
    return facts


def _means(
    tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup | None]
) -> Sequence[torch.Tensor]:
    """The flat means of tensors, alike in dtype and device, over groups that span the ranks together."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    for group in groups:
        dist.all_reduce(flat, group=group)
    world_size = math.prod(dist.get_world_size(group) for group in groups)
    means: Sequence[torch.Tensor] = flat.div_(world_size).split([tensor.numel() for tensor in tensors])
    return means


def _dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.to_dense() if gradient.is_sparse else gradient


def _store_gradient(parameter: torch.Tensor, mean: torch.Tensor, used: torch.Tensor) -> None:
    """Write into the existing gradient; only without one read `used`, which waits for a GPU."""
    mean = mean.view(parameter.shape)
    if parameter.grad is not None and not parameter.grad.is_sparse:
        parameter.grad.copy_(mean)
    elif parameter.grad is not None or used:
        parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)


_BUCKET = 25 << 20
"""Bytes that travel in one collective, unless one tensor is larger: DDP's own size."""


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace each tensor by its mean over the ranks of `group`, in its own dtype; a collective.

    The tensors are dense, and alike in number, shape, dtype and order on all ranks. Without a group, the
    ranks are the whole world.
    """
    alike = (group for _, group in groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)))
    for bucket in (one for run in alike for one in in_buckets(run, lambda tensor: tensor.nbytes, _BUCKET)):
        for tensor, mean in zip(bucket, _means(bucket, [group]), strict=True):
            tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
@lost_named("average_gradients")
def average_gradients(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its mean over the ranks of `group`, unused parameters' counting as zero.

    A collective, with the same parameters in the same order on all ranks. A parameter that no rank has used
    keeps no gradient; sparse gradients become dense. Without a group, the ranks are the whole world.
    """
    if not parameters or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    somewhere = [parameter for parameter, one in zip(parameters, used.tolist(), strict=True) if one]
    for parameter in somewhere:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    average((parameter.grad for parameter in somewhere if parameter.grad is not None), group)
