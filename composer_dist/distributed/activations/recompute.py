"""Activation checkpointing: save less in forward, and recompute the rest in backward.

There are three modes. "composable" recomputes in place and renames nothing; "wrapped" puts each block into a
wrapper module, as Composer and Lightning do; "offload" recomputes nothing, but keeps in host memory what
autograd saves. The first two have the options `save`, which keeps the results of some operations
(`selective.py`), and `offload=True`, which keeps everything that is still saved in host memory.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer_dist import _torch
from composer_dist.config.fully_shard import flagged_activations
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import forwards
from composer_dist.distributed.activations.offload import HostSaved, stay, to_host
from composer_dist.distributed.activations.options import Mode, is_reentrant
from composer_dist.distributed.activations.plan import ActivationPlan, check_modules
from composer_dist.distributed.activations.plan import plan as plan_activations
from composer_dist.distributed.activations.selective import keeping
from composer_dist.distributed.forwards import Layer, without_cache
from composer_dist.distributed.wishes import CheckFn, Wishes
from composer_dist.structure.structure import Structure, read_structure


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


def apply(structure: Structure, plan: ActivationPlan | None) -> Structure:
    """Checkpoint the planned modules in place, before compiling and sharding; return the new structure."""
    if plan is None:
        return structure
    ours = [one for one in plan.modules if one.mode != "memory_budget"]
    kinds = {(one.mode, repr(one.options)): one for one in ours}
    for kind, one in kinds.items():
        names = [other.module for other in ours if (other.mode, repr(other.options)) == kind]
        checkpoint_modules(structure.modules[""], names, one.mode, one.options)
    return read_structure(structure.modules[""])


def checkpoint_modules(
    model: nn.Module, names: Sequence[str], mode: Mode, options: Mapping[str, Any]
) -> None:
    """Checkpoint or offload the named modules, before sharding.

    Args:
        model: the root; changed in place. Only "wrapped" replaces modules in it.
        names: as in `named_modules`.
        mode: from `ac_mode`, except "memory_budget", which is for the compiler.
        options: from `ac_mode`, without `every`.

    Raises:
        ParallelismValueError: see `check_modules`; the model is unchanged.
    """
    modules = dict(model.named_modules())
    check_modules(modules, names, mode)
    options = dict(options)
    offload = options.pop("offload", mode == "offload")
    pinned = bool(options.pop("pin_memory", False))
    if "save" in options:
        pack = functools.partial(to_host, kept=frozenset(), pin_memory=pinned) if offload else stay
        options["save"] = keeping(options["save"], pack)
    # Innermost first: wrapping a module changes the names of those inside it.
    for name in sorted(set(names), key=lambda name: (name.count("."), name), reverse=True):
        module = modules[name]
        if mode == "composable":
            forwards.add(module, Layer.RECOMPUTE, functools.partial(_recomputed, options))
        elif mode == "wrapped":
            wrapper = _torch.checkpoint_wrapper(module, checkpoint_fn=_Recompute(options))
            _replace(model, module, wrapper)
            module = wrapper
        if offload:
            HostSaved(module, pinned)


def _replace(model: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Replace `module` under all of its names, so that a shared module stays shared."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is module and parent is not wrapper:
                setattr(parent, key, wrapper)


def _recomputed(
    options: Mapping[str, Any], module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """A recomputed forward of `module`.

    The module's forward is recomputed, not its call, so that hooks run once. Torch's composable checkpoint
    repeats hooks that change the inputs, on inputs that are already changed, and cannot run backward twice
    over one forward (torch 2.13).
    """
    # A partial instead of a closure makes a deep copy of the module run its own forward. The signature is
    # kept because Hugging Face code inspects it.
    return functools.update_wrapper(functools.partial(_Recompute(options, forward), module), forward)


class _Recompute:
    """Calls a block, or a function instead, under torch's checkpoint."""

    def __init__(self, options: Mapping[str, Any], function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self._options = dict(options)
        self._contexts = self._options.pop("save", None)
        self._options["use_reentrant"] = is_reentrant(options)
        self._options.pop("checkpoint_impl", None)

    def __call__(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_cache(block, args, kwargs)
        function = functools.partial(self._function or block, **kwargs)
        options = self._options
        if self._contexts is not None:
            run, traced = self._contexts
            options = {**options, "context_fn": traced if torch.compiler.is_compiling() else run}
        return checkpoint(function, *args, **options)
