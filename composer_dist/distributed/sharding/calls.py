"""The calls of a unit: what it is handed, hands out and writes is the same as without FSDP2.

FSDP2 copies the containers among a module's arguments and outputs whenever it replaces a tensor in one, so
a block that appends to a list, or fills a dict, would write into a copy. It gathers a unit for backward once
the gradient of an output arrives, so a loss that a block keeps elsewhere would read freed memory. And it
drops the gathered parameters after forward, with whatever forward has written into them.
"""

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_dist import _torch
from composer_dist.distributed import forwards
from composer_dist.distributed.sharding.attributes import Attributes, own_modules
from composer_dist.distributed.sharding.explain import (
    changed_in_forward,
    explain_methods,
    explained,
    used_outside,
)
from composer_dist.distributed.sharding.hooks import without_view
from composer_dist.distributed.training.changes import Before, Watch, is_power_of_two
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.nested import Rejoined, everything_in, with_plain_containers


@dataclass
class _Call:
    """One call that has not returned."""

    arguments: Any
    since: int
    """The autograd nodes of this call have this sequence number or a later one."""
    own: Rejoined = field(default_factory=lambda: Rejoined(without_view))
    before: Before[str] | None = None
    output: Any = None
    handled: BaseException | None = field(default_factory=sys.exception)
    """The error that the caller handles meanwhile, such as that of a larger batch."""


class Calls:
    """Hooks around and inside of FSDP2's, on one of a unit's modules.

    Make it before `fully_shard`, and call `around` afterwards.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._params: Mapping[str, Any] = {}
        self._count = 0
        self._holders: set[tuple[nn.Module, str]] = set()
        self._known: Mapping[nn.Module, frozenset[str]] = {}
        self._attributes = Attributes(module)
        self._calls: list[_Call] = []
        self._watch = Watch()
        module.register_forward_pre_hook(_torch.eager(self._inside), with_kwargs=True, prepend=True)
        module.register_forward_hook(_torch.eager(self._keep_output))

    def around(self, params: Mapping[str, Any]) -> None:
        """Add the hooks that run before and after FSDP2's.

        Args:
            params: what FSDP2 knows of each parameter that this module must not change, by name.
        """
        self._params = params
        self._known = {
            module: _shared(frozenset(vars(module)["_parameters"])) for module in own_modules(self._module)
        }
        self._module.register_forward_pre_hook(_torch.eager(self._enter), with_kwargs=True, prepend=True)
        self._module.register_forward_hook(_torch.eager(self._leave), always_call=True)
        forwards.add(self._module, forwards.Layer.CALL, self._through_call)
        # a copy of a part has the same hook
        _torch.before_calls_while_sharded(self._module, torch.compiler.disable(self._refuse_part))
        explain_methods(self._name, self._module)

    def _through_call(self, module: nn.Module, forward: forwards.Forward) -> forwards.Forward:
        """A forward that goes through a call, and so FSDP2's hooks, if it is not in one already."""

        @explained
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._calls:
                return forward(*args, **kwargs)
            return _torch.call_with_own_hooks(module, *args, **kwargs)

        return functools.update_wrapper(functools.partial(call, module), forward)

    def _refuse_part(self, part: nn.Module, args: Any) -> None:
        """Refuse a call outside of the unit's, unless it is gathered: torch fails, or mixes inputs of ranks.

        Raises:
            ParallelismRuntimeError: naming the part and the unit.
        """
        own = vars(part)["_parameters"].values()
        if _torch.gathered_params(self._params):
            _torch.gather_for_call(self._module, part)
        elif _torch.current_backward() == -1 and any(isinstance(one, DTensor) for one in own):
            raise used_outside(part, self._module)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not _torch.units_take_transforms and _torch.is_transforming():
            raise ParallelismRuntimeError(
                f"torch.func's transforms around {self._name or 'the root'} need torch 2.13: before, FSDP2 "
                "reduces no gradients there."
            )
        if torch.is_grad_enabled():
            self._refuse_new()
        self._refuse_others()
        self._calls.append(_Call((args, kwargs), _torch.next_sequence_number()))
        return with_plain_containers((args, kwargs))

    def _inside(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self._calls[-1]
        call.before = self._watch.before(module, _torch.gathered_params(self._params), watched=True)
        return call.own.rejoin(call.arguments, (args, kwargs))

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls[-1]
        if call.before and (changed := call.before.changed(_torch.gathered_params(self._params))):
            raise ParallelismRuntimeError(changed_in_forward(self._name, module, changed))
        if isinstance(output, GeneratorType):
            raise ParallelismRuntimeError(
                f"The forward of {self._name or 'the root'} is a generator, which would run after FSDP2 has "
                "freed the gathered parameters. Return a list of what it yields, or leave it whole: "
                "Rule(..., shard=False)."
            )
        call.output = output
        return with_plain_containers(output)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:  # an earlier hook failed before `_enter`
            return None
        call = self._calls.pop()
        call.own.write_back()
        call.own.undo()
        if sys.exception() is call.handled:
            self._look_around(module, call, output)
            if call.before is not None and call.before.sums:
                for name, tensor in _torch.gathered_params(self._params).items():
                    differs = functools.partial(call.before.differs, name, tensor)
                    _torch.compare_later(self._params[name], differs)
        # None: it has raised
        return None if output is None or output is call.output else Rejoined().rejoin(call.output, output)

    def _look_around(self, module: nn.Module, call: _Call, output: Any) -> None:
        """Find what a call has left in its output, its arguments and the attributes of its modules.

        Raises:
            ParallelismRuntimeError: something is left of a gathered parameter.
        """
        self._count += 1
        # To look into the objects that modules hold may be slow; those of a first call tell which count.
        thorough = torch.is_grad_enabled() and is_power_of_two(self._count)
        self._attributes.sort()
        containers = [vars(one)[key] for one, key in self._attributes.containers]
        objects = self._attributes.objects if thorough else self._attributes.objects & self._holders
        shown = [output] if isinstance(output, Tensor) else everything_in(output)
        if containers:
            shown += everything_in(containers, objects=False)
        inside = {place: everything_in(vars(place[0])[place[1]]) for place in objects}
        registered = self._attributes.parameters()
        whole = [one for one in registered if one is not None and type(one) is not DTensor]
        self._refuse_freed([one for one in chain(shown, *inside.values(), whole) if _torch.is_freed(one)])
        if not torch.is_grad_enabled():  # what is still gathered is freed next
            still = [self._params[name] for name in _torch.gathered_params(self._params)]
            self._refuse_freed(one for one in shown if any(_torch.is_of(one, param) for param in still))
        elif isinstance(module, FSDPModule):
            reached = [output] if isinstance(output, Tensor) else _torch.tensors_with_gradient(output)
            seen = {id(tensor) for tensor in reached}
            strays = [one for one in (*shown, *everything_in(call.arguments)) if _is_stray(one, call, seen)]
            for place, tensors in inside.items():
                if found := [one for one in tensors if _is_stray(one, call, seen)]:
                    self._holders.add(place)
                    strays += found
            _torch.gather_before_backward_of(module, strays)

    def _refuse_freed(self, freed: Iterable[Tensor]) -> None:
        """Refuse what is left of a gathered parameter; reading it would crash the process."""
        for tensor in freed:
            of = (name for name, param in self._params.items() if _torch.is_of(tensor, param))
            raise ParallelismRuntimeError(
                f"The forward of {self._name or 'the root'} returns or keeps {next(of, 'a parameter')}, or a "
                "view of it, whose memory FSDP2 frees after forward. Take a copy: parameter.clone()."
            )

    def _refuse_others(self) -> None:
        """Refuse what FSDP2 would ignore: other weights than those that it manages, and gradient hooks.

        Raises:
            ParallelismRuntimeError: naming the first such parameter.
        """
        for name, param in self._params.items():
            if _torch.is_untouched(param):
                continue
            registered, sharded = _torch.registered_param(param), _torch.sharded_param(param)
            others = _torch.gathered_param, _torch.shard_after_forward
            if registered is not sharded and all(registered is not of(param) for of in others):
                raise ParallelismRuntimeError(
                    f"{name} is no longer the parameter that was sharded, and FSDP2 would compute with the "
                    "one that was: torch.func.functional_call, or an assignment after the preparation, has "
                    "put another in its place. Change the values in place (with torch.no_grad(), "
                    "parameter.copy_()), or leave the module unsharded: Rule(..., shard=False)."
                )
            if sharded.requires_grad and _torch.gradient_hooks(sharded):
                raise ParallelismRuntimeError(
                    f"Gradient hooks (Tensor.register_hook) on {name} are never called: FSDP2 reduces the "
                    "gradient outside of autograd. Use register_post_accumulate_grad_hook."
                )

    def _refuse_new(self) -> None:
        """Refuse trainable parameters that the preparation has not seen, and nobody averages.

        Raises:
            ParallelismRuntimeError: naming the module that has one.
        """
        for module in self._attributes.modules():
            parameters, known = vars(module)["_parameters"], self._known.get(module, frozenset())
            for key in () if parameters.keys() == known else parameters.keys() - known:
                if parameters[key] is not None and parameters[key].requires_grad:
                    raise ParallelismRuntimeError(
                        f"{key} of a {type(module).__name__} in {self._name or 'the root'} was put into the "
                        "model after the preparation, so its gradient would not be averaged over the ranks. "
                        "Put it in (prune or parametrize the module) before, or freeze it."
                    )


@functools.cache
def _shared(names: frozenset[str]) -> frozenset[str]:
    """One set for all modules with the same names, because a set is large and equal modules are many."""
    return names


def _is_stray(tensor: Tensor, call: _Call, seen: set[int]) -> bool:
    """Whether a call has made a tensor that needs a gradient and that FSDP2 does not find in the output."""
    if id(tensor) in seen:
        return False
    seen.add(id(tensor))
    return _torch.sequence_number(tensor) >= call.since
