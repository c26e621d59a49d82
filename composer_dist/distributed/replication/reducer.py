"""DDP for a model in place, on composable replicate.

Unlike composable replicate alone, the reducer exists from the start and is built for the model itself, so it
broadcasts buffers and supports sparse embeddings and names. It is rebuilt when parameters are frozen or
unfrozen. Each forward prepares DDP for one backward only. If there is another one (inside a forward, or a
second one after it), the reducer averages its gradients when it ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.distributed.before_steps import Check
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.replication.checks import Checks
from composer_dist.distributed.replication.hooks import CommHook, LocalSGD, reduced_in
from composer_dist.distributed.replication.plan import ReplicaPlan
from composer_dist.distributed.replication.precision import compute_in
from composer_dist.distributed.training.average_gradients import average_gradients
from composer_dist.distributed.training.changes import is_power_of_two
from composer_dist.distributed.training.gradient_hooks import GradientHooks
from composer_dist.distributed.training.local_gradients import LocalGradients
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.nested import tensors_in
from composer_dist.wording import listed


class Replica:
    """Keeps the ranks' copies of one model equal.

    Args:
        model: its weights are the same on all ranks.
        parameters: those whose gradients are averaged while they are trainable, by first name.
        ignored: tensors that are left to each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ReplicaPlan,
        parameters: Mapping[str, nn.Parameter],
        ignored: list[torch.Tensor],
        mesh: Mesh,
    ) -> None:
        self.mesh = mesh
        self.group = mesh.replica_group
        self._model, self._plan, self._parameters, self._ignored = model, plan, parameters, ignored
        self._ddp: _Reducer | None = None
        self._hook: CommHook | None = None
        self._hinted = False
        self._depth = 0
        advice = " To average them yourself, leave out no_sync and pass a DDPConfig(comm_hook=function)."
        self._local = LocalGradients(parameters if self.group.size() > 1 else {}, advice)
        self._checks = Checks(parameters, ignored, self.group)
        if (former := replica_of(model)) is not None:  # it was for evaluation only; a plan refuses others
            former.end()
        self._handles = compute_in(model, mesh.device_type, plan.mp_policy)
        before = torch.compiler.disable(self._before_forward)  # the user may compile the whole model
        self._handles.append(model.register_forward_pre_hook(before))
        if not plan.idle:
            self._follow(self._trainable())
        after = torch.compiler.disable(self._after_forward)
        self._handles.append(model.register_forward_hook(after, always_call=True))
        prepared.record(model).replica = self

    @property
    def local_sgd(self) -> LocalSGD | None:
        """The state of post-local SGD, if that is the hook in use."""
        state = self._hook.state if self._hook else None
        return state if isinstance(state, LocalSGD) else None

    @property
    def could_be_static(self) -> bool:
        """Whether all steps, at least two, have used the same parameters, and `static_graph` is not set."""
        ddp = self._ddp
        return ddp is not None and not ddp.static_graph and ddp.steps > 1 and ddp.is_constant

    def hint(self) -> str | None:
        """Advice on the configuration, given once, if training so far suggests any."""
        if self._hinted or not self.could_be_static:
            return None
        self._hinted = True
        return (
            "All steps have used the same parameters, so DDPConfig(static_graph=True) would save DDP the "
            "search for unused ones."
        )

    def check_of(self, optimizer: Optimizer) -> Check[Replica] | None:
        """What is checked before each step of `optimizer`; None if it holds none of the parameters."""
        averaged = set(map(id, self._parameters.values()))
        holds = any(id(one) in averaged for group in optimizer.param_groups for one in group["params"])
        return Replica._before_step if holds else None

    def _before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step with gradients that are not averaged: others are missing, or `no_sync` was in effect.

        Raises:
            ParallelismRuntimeError: names the parameters.
        """
        if self._ddp is not None:
            self._local.check(optimizer)
            self._ddp.refuse_partial()

    def averaged(self) -> None:
        """All gradients have been averaged without DDP."""
        self._local.clear()

    def renew(self) -> None:
        """Make a new reducer after a forward or backward raised; every rank must call it."""
        self._depth = 0
        if self._ddp is not None and (trainable := self._trainable()):
            self._follow(trainable)

    def end(self) -> None:
        """Remove all hooks; every rank gets rank 0's buffers."""
        for handle in self._handles:
            handle.remove()
        if self._ddp is not None:
            self._ddp.broadcast_due()
            self._ddp.release()
        self._ddp = self._hook = None

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        """Adapt to parameters that were frozen or unfrozen; refuse gradients that would not be averaged."""
        self._depth += 1
        if self._ddp is not None:
            self._ddp.is_nested = self._depth > 1
        if self._depth > 1:
            return
        if not torch.is_grad_enabled():
            self._checks.before_forward(model)
            return
        trainable = self._trainable()
        if self._ddp is None:
            if trainable:
                raise ParallelismRuntimeError(
                    f"{next(iter(trainable))} would get a gradient, but no gradients are averaged, because "
                    f"{self._plan.idle}. Run forward under torch.no_grad(), or prepare the model for "
                    "training."
                )
            return
        if trainable and (trainable.keys() != self._ddp.names.keys() or self._ddp.is_passed_by()):
            self._follow(trainable)
        self._checks.before_forward(model)
        _torch.register_late_hooks(model)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)  # an earlier hook may have raised before the forward began
        if self._ddp is not None:
            self._ddp.is_nested = self._depth > 1
        if self._depth == 0:
            self._checks.after_forward(output)

    def _follow(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Make a new reducer for these parameters, without communication; the same on every rank."""
        if self._ddp is not None:
            self._ddp.release()
        model, plan = self._model, self._plan
        devices = None if self.mesh.device_type == "cpu" else [torch.accelerator.current_device_index()]
        ignored = {id(tensor) for tensor in self._ignored}
        parameters = model.named_parameters(remove_duplicate=False)
        named = [*parameters, *model.named_buffers(remove_duplicate=False)]
        with _torch.ddp_ignores(model, [name for name, tensor in named if id(tensor) in ignored]):
            self._ddp = _Reducer(
                model, trainable, self._local, process_group=self.group, device_ids=devices, **plan.arguments
            )
        self._ddp.broadcast_buffers = plan.broadcast_buffers
        if plan.hook is None:
            self._hook = CommHook(self.group, reduced_in(plan.reduce_dtype)) if plan.reduce_dtype else None
        elif self.local_sgd is None:  # other states belong to the reducer's buckets
            self._hook = plan.hook.build(self.group)
        if self._hook is not None:
            self._ddp.register_comm_hook(*self._hook)
        self._ddp.hook = self._hook
        _torch.serve_in_place(model, self._ddp)


class _Reducer(_torch.InPlaceDDP):
    """DDP that keeps track of each backward.

    Attributes:
        names: the parameters whose gradients it averages, by name.
        local: the gradients that wait for a synchronized backward.
        steps: backward passes averaged so far.
        is_constant: whether all of them have used the same parameters.
    """

    def __init__(
        self, model: nn.Module, trainable: Mapping[str, nn.Parameter], local: LocalGradients, **options: Any
    ) -> None:
        super().__init__(model, init_sync=False, **options)
        self.names = dict(trainable)
        self.hook: CommHook | None = None
        averaged = self.names if self.process_group.size() > 1 else {}
        self.local = local
        self.steps, self.is_constant = 0, True
        self._several = False
        """Whether a step calls backward several times or inside a forward, which DDP does not support."""
        self._expected: set[nn.Parameter] = set()
        """Parameters whose gradients the reducer still waits for."""
        self._seen: set[nn.Parameter] = set()
        """Parameters that the current or last backward has used."""
        self._used: frozenset[nn.Parameter] | None = None
        self._frozen: list[nn.Parameter] = []
        self._forwards = 0
        self._nodes = [get_gradient_edge(parameter).node for parameter in trainable.values()]
        self._backward, self._is_ready, self._averages = -1, False, False
        self._missed: frozenset[nn.Parameter] = frozenset()
        """What the reducer still waited for when the current backward began."""
        saw = _torch.while_alive(self._saw)
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(saw) for parameter in trainable.values()
        ]
        self._hooks = GradientHooks(self, averaged, self._handles)

    def release(self) -> None:
        """Remove all hooks from the parameters; the object cannot be used afterwards."""
        self._hooks.release()
        for handle in self._handles:
            handle.remove()
        self.logger = None
        self._nodes.clear()
        del self.reducer  # its destructor removes its own hooks

    def is_passed_by(self) -> bool:
        """Whether gradients no longer reach the reducer, because parameters got another dtype or memory.

        Such as by `model.double()`, or a parametrization. All are looked at in the forwards 1, 2, 4, 8, ...
        """
        self._forwards += 1
        looked = len(self._nodes) if is_power_of_two(self._forwards) else 1
        pairs = islice(zip(self.names.values(), self._nodes, strict=True), looked)
        return any(get_gradient_edge(parameter).node is not node for parameter, node in pairs)

    def before_forward(self) -> None:
        self._backward = -1  # in case the last one raised

    def on_error(self, error: RuntimeError) -> None:
        if self._expected and "finished reduction" in str(error):
            raise ParallelismRuntimeError(
                f"The last backward gave {self._explain(self._expected)}"
            ) from error

    def refuse_partial(self) -> None:
        if 0 < len(self._expected) < len(self.names):
            raise ParallelismRuntimeError(
                f"The optimizer would step with gradients that are not averaged over the ranks. The last "
                f"backward gave {self._explain(self._expected)}"
            )

    def wants_backward(self, output: Any) -> bool:
        tensors = list(tensors_in(output))  # none if the output is of an unknown type
        wanted = not self._several and (not tensors or any(tensor.requires_grad for tensor in tensors))
        if wanted:
            self._expected = set(self.names.values())
        return wanted

    def begin(self) -> None:
        """A gradient has arrived; it may be the first of a backward."""
        if self._backward != _torch.current_backward():
            self._backward = _torch.current_backward()
            self._missed, self._is_ready = frozenset(self._expected), bool(self._expected)
            flags = _torch.gradient_sync_flags(self.module)
            self._averages = self._is_ready or all(getattr(o, key) == yes for o, key, yes in flags)
            self._frozen = [one for one in self.names.values() if not one.requires_grad and one.grad is None]
            self._seen.clear()
            self.local.refuse_changed()
            self._hooks.begin()
            _torch.at_end_of_backward(lambda: _torch.at_end_of_backward(self._finish))  # after the reducer's

    def averages(self, parameter: torch.Tensor) -> bool:
        """Whether the current backward averages this gradient, and no earlier one with it."""
        return self._averages and parameter not in self.local

    def _saw(self, parameter: nn.Parameter) -> None:
        """A parameter has got its gradient, which is not averaged yet; DDP's own hook runs next."""
        self.begin()
        if self._is_ready and not self.static_graph and parameter not in self._expected:
            raise ParallelismRuntimeError(
                f"A second backward began, but the one before it gave {self._explain(self._missed)}"
            )
        self._expected.discard(parameter)
        self._seen.add(parameter)

    def _finish(self) -> None:
        """At the end of a backward, record what it used, or average it if the reducer was not ready."""
        self._backward = -1
        if self._is_ready:
            self.local.clear(self.names.values())
            if self.find_unused_parameters or self.static_graph:
                self._expected.clear()
            for one in self._frozen:  # since the forward; the reducer has given them zeros
                one.grad = None
            used = frozenset(self._seen)
            self.is_constant &= self._used is None or self._used == used
            self._used = used
            self.steps += 1
        elif self._averages:
            self._average()
        else:
            self.local.add(self._seen)
            return
        self._hooks.finish()

    def _average(self) -> None:
        """Average the gradients without the reducer, for this backward and all later ones."""
        state = self.hook.state if self.hook else None
        if isinstance(state, LocalSGD):
            state.next_backward()
        elif self.hook is not None and not self._several:
            warnings.warn(
                "A step calls backward several times or inside a forward, so gradients are averaged in "
                "their own dtype at the end of each backward, and the configured comm_hook or reduce_dtype "
                "is ignored.",
                stacklevel=2,
            )
        self._several = True
        self.local.clear(self.names.values())
        group = state.group if isinstance(state, LocalSGD) else self.process_group
        average_gradients(list(self.names.values()), group)

    def _listed(self, parameters: Collection[nn.Parameter]) -> str:
        return listed([name for name, parameter in self.names.items() if parameter in parameters])

    def _explain(self, missing: Collection[nn.Parameter]) -> str:
        return (
            f"{self._listed(missing)} no gradient ({len(missing)} of {len(self.names)} parameters), and DDP "
            "still waits for them. If a loss does not use every parameter, set "
            "DDPConfig(find_unused_parameters=True), or freeze the unused ones."
        )


def replica_of(model: nn.Module) -> Replica | None:
    """The `Replica` of `model`; None if the model was not prepared for DDP."""
    found = prepared.of(model)
    return found.replica if found is not None and isinstance(found.replica, Replica) else None
