"""DDP for a model in place, on composable replicate.

Unlike composable replicate alone, the reducer exists from the start and is built for the model itself, so it
broadcasts buffers and supports sparse embeddings and names. It is rebuilt when parameters are frozen or
unfrozen, and after a backward that has raised on all ranks. Each forward prepares DDP for one backward only.
If there is another one (inside a forward, or a second one after it), the reducer averages its gradients when
it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed import prepared
from composer_dist.distributed.before_steps import Check
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.distributed.replication.checks import Checks
from composer_dist.distributed.replication.hooks import CommHook, LocalSGD, reduced_in
from composer_dist.distributed.replication.plan import ReplicaPlan
from composer_dist.distributed.replication.precision import compute_as_before, compute_in
from composer_dist.distributed.replication.reducer import Reducer
from composer_dist.distributed.training.average_gradients import average_gradients
from composer_dist.distributed.training.local_gradients import LocalGradients
from composer_dist.errors import ParallelismError, ParallelismRuntimeError


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
        self._ddp: Reducer | None = None
        self._hook: CommHook | None = None
        self._hinted = False
        self._depth, self._failed = 0, False
        advice = " To average them yourself, leave out no_sync and pass a DDPConfig(comm_hook=function)."
        several = parameters if self.group.size() > 1 else {}
        self._local = LocalGradients(several, advice, self._unfinished)
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
        _torch.after_failed_backward(self, Replica._after_failed_backward)
        _torch.explain_in_backward(_lost)
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
        prepared.record(self._model).steps += 1

    def _unfinished(self) -> str:
        return "" if self._ddp is None else self._ddp.unfinished

    def average(self) -> None:
        """Average the gradients of all trainable parameters now, without DDP, whichever a backward used."""
        average_gradients(list(self._trainable().values()), self.group)
        self._local.clear()

    def renew(self) -> None:
        """Make a new reducer after a forward or backward raised; every rank must call it."""
        self._depth, self._failed = 0, False
        if self._ddp is not None and (trainable := self._trainable()):
            self._follow(trainable)

    def follow_buffers(self) -> None:
        """Give every rank rank 0's buffers if the next forward would."""
        if self._ddp is not None:
            self._ddp.broadcast_due()

    def settle(self) -> None:
        """Average the weights where the ranks have taken steps of their own; a collective there."""
        if self.local_sgd is not None:
            self.local_sgd.settle(self._parameters.values())

    def end(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        if self._ddp is not None:
            self._ddp.release()
        self._ddp = self._hook = None
        compute_as_before(self._model)

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
        failed, self._failed = self._failed and self._ddp.waits, False
        if failed:
            self._ddp.agree("continuing after a backward that raised")
        if changed := trainable.keys() ^ self._ddp.names.keys() if trainable else ():
            self._ddp.agree("changing which parameters are trained", changed)
        if trainable and (failed or changed or self._ddp.is_passed_by()):
            self._follow(trainable)
        elif trainable and self._ddp.must_restart:
            with self._local.moving():  # into the new reducer's buckets
                self._follow(trainable)
        self._checks.before_forward(model)
        _torch.register_late_hooks(model)

    def _after_failed_backward(self) -> None:
        self._failed = self._ddp is not None and self._ddp.waits

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
            self._ddp = Reducer(
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


def _lost(error: RuntimeError) -> ParallelismError | None:
    named = isinstance(error, ParallelismError)
    return None if named else reason_of_loss(error, "a DDP backward")


def replica_of(model: nn.Module) -> Replica | None:
    """The `Replica` of `model`; None if the model was not prepared for DDP."""
    found = prepared.of(model)
    return found.replica if found is not None and isinstance(found.replica, Replica) else None


def settle(*models: nn.Module) -> None:
    """Average the weights of models that post-local SGD lets differ between ranks; every rank calls it."""
    replicas = [one for model in models for module in model.modules() if (one := replica_of(module))]

    def body() -> None:
        for one in replicas:
            one.settle()

    if any(one.local_sgd is not None for one in replicas):
        Agreement().collectively("averaging the weights", body)
