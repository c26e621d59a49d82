"""DDP's reducer for a model in place, which keeps track of each backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from composer_dist import _torch
from composer_dist.distributed.before_steps import refuse_uneven
from composer_dist.distributed.prepared import record
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.ranks.reports import reason_of_loss
from composer_dist.distributed.replication.hooks import CommHook, LocalSGD
from composer_dist.distributed.training.average_gradients import average_gradients, exchange
from composer_dist.distributed.training.changes import is_power_of_two
from composer_dist.distributed.training.gradient_hooks import GradientHooks
from composer_dist.distributed.training.local_gradients import LocalGradients
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.tensors.nested import tensors_in
from composer_dist.users_code import warn
from composer_dist.wording import listed

_PATIENCE = timedelta(seconds=60)


class Reducer(_torch.InPlaceDDP):
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
        self._miscounts = False
        """Whether DDP has counted a backward without averages as part of a static graph's first one."""
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
        Inside of torch.func's transforms, parameters have no nodes; gradients are those of the inputs.
        """
        if _torch.is_transforming():
            return False
        self._forwards += 1
        looked = len(self._nodes) if is_power_of_two(self._forwards) else 1
        pairs = islice(zip(self.names.values(), self._nodes, strict=True), looked)
        return any(get_gradient_edge(parameter).node is not node for parameter, node in pairs)

    def agree(self, step: str, changed: Collection[str] = ()) -> None:
        """Wait for the other ranks, but not long: on some ranks alone, `step` ends in other collectives.

        Args:
            changed: names of parameters that were frozen or thawed, the same on all ranks.
        """
        if self.process_group.size() > 1:
            ranks = dist.get_process_group_ranks(self.process_group)
            Agreement(ranks, _PATIENCE).reach(step, sorted(changed), _check_alike)

    def before_forward(self) -> None:
        """A forward begins."""
        self._backward = -1  # in case the last one raised

    def on_error(self, error: RuntimeError) -> None:
        """Say which gradients DDP still waits for, or which rank has ended, if that is the error."""
        if (reason := reason_of_loss(error, "a DDP forward")) is not None:
            raise reason from None
        if "finished reduction" not in str(error):
            return
        missing = self._expected or set(self.names.values()) - self._seen
        raise ParallelismRuntimeError(f"The last backward gave {self._explain(missing)}") from error

    @property
    def unfinished(self) -> str:
        """Why the gradients are not averaged, if the last backward gave some of them only; else ""."""
        partial = 0 < len(self._expected) < len(self.names)
        return f"The last backward gave {self._explain(self._expected)}" if partial else ""

    @property
    def waits(self) -> bool:
        """Whether it has prepared for a backward that has not ended."""
        return bool(self._expected)

    def wants_backward(self, output: Any) -> bool:
        """Whether DDP prepares for a backward from this output."""
        tensors = list(tensors_in(output))  # none if the output is of an unknown type
        wanted = not self._several and (not tensors or any(tensor.requires_grad for tensor in tensors))
        wanted &= not _torch.is_transforming()
        if wanted:
            self._expected = set(self.names.values())
        return wanted

    def begin(self) -> None:
        """A gradient has arrived; it may be the first of a backward."""
        if self._backward != _torch.current_backward():
            self._backward = _torch.current_backward()
            self._missed, self._is_ready = frozenset(self._expected), bool(self._expected)
            self._averages = self._is_ready or self._synchronizes
            self._frozen = [one for one in self.names.values() if not one.requires_grad and one.grad is None]
            self._seen.clear()
            self.local.refuse_changed()
            self._hooks.begin()
            _torch.at_end_of_backward(lambda: _torch.at_end_of_backward(self._finish))  # after the reducer's

    @property
    def _synchronizes(self) -> bool:
        """Whether we are outside of `no_sync`."""
        flags = _torch.gradient_sync_flags(self.module)
        return all(getattr(owner, key) == yes for owner, key, yes in flags)

    @property
    def must_restart(self) -> bool:
        """Whether the forward that begins is the first with averages, and another reducer has to count it.

        DDP would wait for as many gradients of each parameter in every later step, and average none.
        """
        return self._miscounts and self._synchronizes

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
            used, before = frozenset(self._seen), self._used
            self.is_constant &= before in (None, used)
            self._used = used
            self.steps += 1
            if self.process_group.size() > 1 and is_power_of_two(self.steps):
                self._compare_steps()
            if self.static_graph and not self.is_constant:
                raise ParallelismRuntimeError(
                    "static_graph=True, but this backward and the one before it gave gradients to different "
                    f"parameters: {self._listed(used ^ (before or used))}. DDP has not averaged them all. "
                    "Call backward once, for the sum of the step's losses, or leave out static_graph."
                )
        elif self._averages:
            self._average()
        else:
            self.local.add(self._seen)
            self._miscounts = self.static_graph and not self.steps
            return
        self._hooks.finish()

    def _compare_steps(self) -> None:
        """Refuse replicas that have come to differ, because a rank has left out a step of its optimizer."""
        ranks = dist.get_process_group_ranks(self.process_group)
        steps = exchange(torch.tensor([record(self.module).steps]), [self.process_group])
        refuse_uneven(list(zip(ranks, steps.tolist(), strict=True)))

    def _average(self) -> None:
        """Average the gradients without the reducer, for this backward and all later ones."""
        state = self.hook.state if self.hook else None
        if not self._several:
            self.agree("the end of a second backward in one step")
        if isinstance(state, LocalSGD):
            state.next_backward()
        elif self.hook is not None and not self._several:
            warn(
                "A step calls backward several times or inside a forward, so gradients are averaged in "
                "their own dtype at the end of each backward, and the configured comm_hook or reduce_dtype "
                "is ignored."
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
            "still waits for them. If a step has several losses, call backward once, for their sum. If they "
            "do not use every parameter, set DDPConfig(find_unused_parameters=True), or freeze the unused "
            "ones."
        )


def _check_alike(changed: list[list[str]]) -> None:
    for names in changed:
        if names != changed[0]:
            raise ParallelismValueError(
                f"Some ranks have frozen or thawed {listed(changed[0] or ['nothing'])}, others "
                f"{listed(names or ['nothing'])}. Do the same on all ranks, between two steps."
            )
