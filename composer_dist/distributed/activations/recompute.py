"""Activation checkpointing: save less in forward, and recompute the rest in backward.

There are three modes. "composable" recomputes in place and renames nothing; "wrapped" puts each block into a
wrapper module, as Composer and Lightning do; "offload" recomputes nothing, but keeps in host memory what
autograd saves. The first two have the options `save`, which keeps the results of some operations
(`selective.py`), and `offload=True`, which keeps everything that is still saved in host memory.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composer_dist import _torch
from composer_dist.config.fully_shard import flagged_activations
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import forwards
from composer_dist.distributed.activations.offload import HostSaved, explain, stay, to_host
from composer_dist.distributed.activations.options import Mode, is_reentrant
from composer_dist.distributed.activations.plan import ActivationPlan, check_modules
from composer_dist.distributed.activations.plan import plan as plan_activations
from composer_dist.distributed.activations.selective import keeping
from composer_dist.distributed.activations.state import (
    SMALL,
    BlockState,
    Counts,
    Place,
    clones,
    exchanged,
    held,
    held_untrained,
)
from composer_dist.distributed.forwards import Layer, without_cache
from composer_dist.distributed.training.changes import Before, Watch
from composer_dist.distributed.wishes import CheckFn, Wishes
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.structure.names import canonical_name
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.nested import copied, everything_in
from composer_dist.wording import listed


def apply_ac(
    model: nn.Module,
    activation_checkpointing: bool,
    activation_cpu_offload: bool,
    check_fn: CheckFn | None = None,
    *,
    mode: Literal["composable", "wrapped"] = "composable",
) -> None:
    """Checkpoint or offload the activations of chosen modules, in place; with Composer's signature.

    Call it before sharding. The modules are those of `checkpointed_modules`; if there are none, it warns.
    Composer always wraps, which is `mode="wrapped"` here.

    Args:
        model: any module; the root itself is not checkpointed.
        activation_checkpointing: recompute the modules' activations in backward.
        activation_cpu_offload: keep saved tensors in host memory.
        check_fn: decides for each module, instead of the attributes.
        mode: how to checkpoint.

    Raises:
        ParallelismValueError: `check_fn` is given, but neither option is on.
    """
    wanted = flagged_activations(activation_checkpointing, activation_cpu_offload)
    if isinstance(wanted, tuple):
        wanted = mode, wanted[1]
    config = ParallelismConfig(mesh=MeshConfig(), activation_checkpointing=wanted, strict=False)
    structure = read_structure(model)
    apply(structure, plan_activations(structure, Wishes(config=config, check_fn=check_fn), {}, ()))


def apply(structure: Structure, plan: ActivationPlan | None, host: str = "cpu") -> Structure:
    """Checkpoint the planned modules in place, before compiling and sharding; return the new structure."""
    if plan is None:
        return structure
    ours = [one for one in plan.modules if one.mode != "memory_budget"]
    kinds = {(one.mode, repr(one.options)): one for one in ours}
    for kind, one in kinds.items():
        names = [other.module for other in ours if (other.mode, repr(other.options)) == kind]
        checkpoint_modules(structure.modules[""], names, one.mode, one.options, host)
    return read_structure(structure.modules[""])


def checkpoint_modules(
    model: nn.Module, names: Sequence[str], mode: Mode, options: Mapping[str, Any], host: str = "cpu"
) -> None:
    """Checkpoint or offload the named modules, before sharding.

    Args:
        model: the root; changed in place. Only "wrapped" replaces modules in it.
        names: as in `named_modules`, without the segments of wrappers.
        mode: from `ac_mode`, except "memory_budget", which is for the compiler.
        options: from `ac_mode`, without `every`.
        host: the device to which activations are offloaded.

    Raises:
        ParallelismValueError: see `check_modules`; the model is unchanged.
    """
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        modules.setdefault(canonical_name(path), module)  # a wrapper comes before the module it wraps
    check_modules(modules, names, mode)
    options = dict(options)
    offload = options.pop("offload", mode == "offload")
    pinned = bool(options.pop("pin_memory", False))
    if "save" in options:
        pack = functools.partial(to_host, pin_memory=pinned, host=host) if offload else stay
        options["save"] = keeping(options["save"], pack)
    outside = _Outside(model)
    # Innermost first: wrapping a module changes the names of those inside it.
    for name in sorted(set(names), key=lambda name: (name.count("."), name), reverse=True):
        module = modules[name]
        if mode == "composable":
            forwards.add(module, Layer.RECOMPUTE, functools.partial(_recomputed, options, outside))
        elif mode == "wrapped":
            wrapper = _torch.checkpoint_wrapper(module, checkpoint_fn=_Recompute(options, outside))
            _replace(model, module, wrapper)
            module = wrapper
        if offload:
            HostSaved(module, pinned, host)


def _replace(model: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Replace `module` under all of its names, so that a shared module stays shared."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is module and parent is not wrapper:
                setattr(parent, key, wrapper)


def _recomputed(
    options: Mapping[str, Any], outside: "_Outside | None", module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """A recomputed forward of `module`.

    The module's forward is recomputed, not its call, so that hooks run once. Torch's composable checkpoint
    repeats hooks that change the inputs, on inputs that are already changed, and cannot run backward twice
    over one forward (torch 2.13).
    """
    # A partial instead of a closure makes a deep copy of the module run its own forward. The signature is
    # kept because Hugging Face code inspects it.
    return functools.update_wrapper(functools.partial(_Recompute(options, outside, forward), module), forward)


class _Recompute:
    """Calls a block, or a function instead, under torch's checkpoint."""

    def __init__(
        self,
        options: Mapping[str, Any],
        outside: "_Outside | None",
        function: Callable[..., Any] | None = None,
    ) -> None:
        self._function = function
        self.outside = outside
        self._options = dict(options)
        self._contexts = self._options.pop("save", None)
        self._options["use_reentrant"] = is_reentrant(options)
        self._options.pop("checkpoint_impl", None)
        self.changing: set[Place] = set()
        """The buffers that a forward has changed, where they are held."""
        self.watch = Watch()
        self.counts = Counts()

    def __call__(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_cache(block, args, kwargs)
        if torch.compiler.is_compiling():
            return self._run(block, args, kwargs)
        with self.counts.hidden():
            return self._run(block, args, kwargs)

    def _run(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        whole = self._function or block
        function = (
            functools.partial(whole, **kwargs)
            if compiling
            else _Recomputation(self, block, whole, args, kwargs)
        )
        options = self._options
        if self._contexts is not None:
            run, traced = self._contexts
            options = {**options, "context_fn": traced if torch.compiler.is_compiling() else run}
        return forwards.call_explained(explain, block, checkpoint, function, *args, **options)


class _Outside:
    """The buffers and frozen parameters of a model, which a recomputed block may change outside of it.

    Copies of a block have none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._first: nn.Module | None = None
        self._watch = Watch()
        self._before: Before[Place] | None = None
        self._tensors: dict[Place, torch.Tensor] = {}
        self._changed: list[Place] | None = None

    def __reduce__(self) -> Any:
        return type(None), ()

    def enter(self, block: nn.Module) -> None:
        """Note the values, if this is the forward of the model's first recomputed block."""
        self._first = block if self._first is None else self._first
        if block is self._first:
            self._tensors = self._held()
            self._before, self._changed = self._watch.before(block, self._tensors), None

    def changed(self) -> dict[Place, torch.Tensor]:
        """Those that the forward has changed, as they are now."""
        now = self._held()
        if self._changed is None:
            same = {place: one for place, one in now.items() if self._tensors.get(place) is one}
            self._changed = self._before.changed(same) if self._before else []
            self._changed += [place for place, one in now.items() if place not in same and _is_buffer(one)]
        return {place: now[place] for place in self._changed if place in now}

    def _held(self) -> dict[Place, torch.Tensor]:
        model = self._model()
        if model is None:
            return {}
        parameters = {place: p for place, p in held(model, "_parameters").items() if not p.requires_grad}
        return {**parameters, **held(model, "_buffers")}


class _Recomputation:
    """One call of a block, which finds the same arguments, parameters, buffers and attributes when repeated.

    A block that appends to a list, or reads one that later blocks append to, would find something else in
    it; one that updates a running mean would update it twice; one that `torch.func.functional_call` lends
    other weights would compute with its own.
    """

    def __init__(
        self, kind: _Recompute, block: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self._kind, self._block, self._function, self._kwargs = kind, block, function, kwargs
        # Autograd saves the tensors, or offloads them.
        self._again = copied(([None if isinstance(one, torch.Tensor) else one for one in args], kwargs))
        self._buffers = held_untrained(block)
        self._parameters = held(block, "_parameters")
        self._before = clones(self._buffers)
        self._state = BlockState(block)
        self._ran = False
        if kind.outside:
            kind.outside.enter(block)

    def __call__(self, *args: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._first(*args)
        self._refuse_changed()
        own, named = copied(self._again)
        pairs = zip(args, own, strict=True)
        lent = {place: p for place, p in self._parameters.items() if _is_other(p, getattr(*place))}
        state = self._state.exchange()
        buffers = clones({place: self._before.get(place, now) for place, now in self._now().items()})
        others = self._kind.outside.changed() if self._kind.outside else {}
        others = {place: tensor for place, tensor in others.items() if place not in self._buffers}
        before = Watch().before(self._block, others)
        try:
            with exchanged(buffers), exchanged(lent):
                return self._function(*(x if isinstance(x, torch.Tensor) else y for x, y in pairs), **named)
        finally:  # torch ends most recomputations early, by an exception
            counted = self._state.counted()
            state.exchange()
            self._kind.counts.add(counted)
            now = {place: _at(place) for place in others}
            now = {place: one for place, one in now.items() if one is others[place] or _is_buffer(one)}
            if written := before.changed(now):
                names = [f"{key} of a {type(module).__name__}" for module, key in written]
                raise ParallelismRuntimeError(
                    f"The forward of a recomputed {type(self._block).__name__} changes {listed(names)}, "
                    "outside of it, and has done so again when it was recomputed. Change it in the forward "
                    "of the model, or leave the module out of activation checkpointing."
                )

    def _refuse_changed(self) -> None:
        for (module, key), parameter in self._parameters.items():
            then = self._versions[module, key]
            if not _torch.has_version(parameter, then):
                raise ParallelismRuntimeError(
                    f"{key} of a {type(module).__name__} has changed between the forward of a recomputed "
                    f"{type(self._block).__name__} and its backward (by a step of the optimizer, say). "
                    "Call backward() before the step, or run forward again after it. "
                    f"It is at version {_torch.version(parameter)}; expected version {then}."
                )

    def _first(self, *args: Any) -> Any:
        before = self._kind.watch.before(self._block, {**self._parameters, **self._buffers})
        self._versions = before.versions  # needed before the end where the forward itself runs a backward
        handed = [one for one in everything_in((args, self._kwargs)) if not one.is_inference()]
        versions = [_torch.version(tensor) for tensor in handed]
        _torch.watch_data(handed)
        writes = [_torch.data_writes(tensor) for tensor in handed]
        output = self._function(*args, **self._kwargs)
        for tensor, *then in zip(handed, versions, writes, strict=True):
            if [_torch.version(tensor), _torch.data_writes(tensor)] != then:
                raise ParallelismRuntimeError(
                    f"The forward of a recomputed {type(self._block).__name__} changed a tensor of shape "
                    f"{tuple(tensor.shape)} among its arguments in place, and would do so again when it is "
                    "recomputed. Make a new tensor (x = x + 1 for x += 1), or leave the module out of "
                    "activation checkpointing."
                )
        if written := before.changed(self._parameters):
            names = [f"{key} of a {type(module).__name__}" for module, key in written]
            raise ParallelismRuntimeError(
                f"The forward of a recomputed {type(self._block).__name__} changed {listed(names)} in place, "
                "and would do so again when it is recomputed. Make it a buffer (register_buffer), or leave "
                "the module out of activation checkpointing."
            )
        replaced = {place for place, one in self._now().items() if one is not self._buffers[place]}
        self._kind.changing |= replaced.union(before.changed(self._buffers))
        self._state.drop_unchanged()
        self._before = {
            place: value
            for place, value in self._before.items()
            if place in self._kind.changing or value.numel() <= SMALL
        }
        return output

    def _now(self) -> dict[Place, torch.Tensor]:
        """The buffers that hold a tensor, and did before the forward."""
        now = held_untrained(self._block)
        return {place: now[place] for place in self._buffers if place in now}


def _is_buffer(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter)  # FSDP2 exchanges those


def _at(place: Place) -> torch.Tensor:
    tensor: torch.Tensor = getattr(*place)
    return tensor


def _is_other(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a parameter is another tensor now; not if FSDP2 has only gathered or sharded it."""
    return then is not now and isinstance(then, DTensor) == isinstance(now, DTensor)
