"""Meta initialization, with the same bits on any number of ranks.

Every module is initialized by one *initializer*: the caller's `param_init_fn`, or that of the module or its
nearest ancestor; else the `_init_weights` of its Hugging Face model; else its own `reset_parameters`.
Initializers are first *traced* on the meta device to find out what each writes and reads, because some write
into other modules (T5's root rewrites embeddings). Initializers that touch a common tensor form a
*component*. If all of a component only fills tensors, every rank computes its own part (`draw.py`); otherwise
one rank runs it in full and delivers the tensors. Components are independent, and each initializer draws from
generators seeded by its module's name, so values depend on neither the world size, the mesh nor the order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, zip_longest
from math import inf, prod
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from composer_dist import _torch
from composer_dist.distributed.mesh.layout import Coordinate, Layout
from composer_dist.distributed.optimizers.check import check_refills
from composer_dist.distributed.ranks.agreement import Agreement
from composer_dist.distributed.weights.draw import Fills, draw, fills_of
from composer_dist.distributed.weights.trace import Initializer, trace
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.random_states import derived_seed, seed_all, set_aside
from composer_dist.structure.families import original_classes, transformers_owners
from composer_dist.structure.names import ancestors
from composer_dist.structure.select import inherited
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.inner import dense
from composer_dist.users_code import warn
from composer_dist.wording import listed

_TOGETHER = 64 << 20
"""Bytes of components that are delivered together: a compromise between deliveries and memory."""
_ALIGNED = 64
"""Bytes: where torch's own allocators put tensors."""
InitFn = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Component:
    """Initializers that must run together, in this order, on whole tensors."""

    initializers: tuple[Initializer, ...]
    tensors: tuple[str, ...]
    nbytes: int
    """Size of its tensors, which the rank that runs it needs besides its shards, unless they are filled."""
    fills: Fills | None = None
    """What it does, if it only fills tensors."""


def assert_no_meta(model: nn.Module) -> None:
    """Raise a ParallelismRuntimeError if parameters or buffers of `model` are still on the meta device."""
    own = ((*module._parameters.values(), *module._buffers.values()) for module in model.modules())
    if not any(tensor is not None and tensor.is_meta for tensor in chain.from_iterable(own)):
        return
    left = [
        f"{held.info.kind} {name}"
        for name, held in read_structure(model).tensors.items()
        if held.get().is_meta and held.info.kind != "attribute"
    ]
    if left:
        raise ParallelismRuntimeError(
            f"Still on the meta device, without values: {listed(left, 20)}. Initialize or load them first."
        )


def find_components(
    structure: Structure, needed: set[str], param_init_fn: InitFn | None = None
) -> list[Component]:
    """Trace and group the initializers that write the `needed` tensors; the model is not changed."""
    initializers = list(_find_initializers(structure, needed, param_init_fn))
    counts = trace(structure, initializers)
    _warn_of_others(structure, initializers, needed, counts)
    written = {name for initializer in initializers for name in initializer.writes}
    written -= {name for name in needed if structure.tensors[name].info.inner}  # they write dense values
    missing: dict[str, list[str]] = {}
    for name in sorted(needed - written):
        owner = structure.modules[structure.tensors[name].info.owners[0]]
        missing.setdefault(type(owner).__name__, []).append(name)
    if missing:
        kinds = "; ".join(f"{kind}: {listed(names, 4)}" for kind, names in missing.items())
        raise ParallelismValueError(
            f"These tensors are on the meta device and nothing initializes them: {kinds}. Give these classes "
            "a reset_parameters method or a param_init_fn, pass param_init_fn, or build real weights on "
            "rank 0."
        )
    return list(_group(structure, initializers, needed))


def _warn_of_others(
    structure: Structure, initializers: Sequence[Initializer], needed: set[str], counts: Mapping[str, float]
) -> None:
    """Warn of tensors into which the model's constructor wrote more often than the initializers do."""
    others = {name for one in initializers if one.label != "reset_parameters" for name in one.writes}
    written = {name: _torch.version(structure.tensors[name].get()) for name in sorted(needed - others)}
    if more := [name for name, count in written.items() if count > counts.get(name, inf)]:
        warn(
            f"{listed(more, 4)} were initialized by more than the reset_parameters of their modules when the "
            "model was built, or since. From meta, only those run again. Give a class that initializes its "
            "modules a param_init_fn, or pass param_init_fn, or build real weights on rank 0."
        )


def agree_on_components(
    structure: Structure,
    needed: frozenset[str],
    param_init_fn: InitFn | None,
    optimizers: Sequence[Optimizer],
    agreement: Agreement,
) -> list[Component]:
    """Find the components that initialize the `needed` tensors, the same on all ranks."""
    if not needed:
        return []
    components: list[Component] = []

    def find() -> list[list[str]]:
        check_refills(optimizers, structure, needed)
        components.extend(find_components(structure, set(needed), param_init_fn))
        labels = ([f"{i.label} of {i.module or 'the root'}" for i in c.initializers] for c in components)
        return [
            [*label, *one.tensors, _digest(one.fills)] for label, one in zip(labels, components, strict=True)
        ]

    def compare(findings: Sequence[list[list[str]]]) -> None:
        for rank, finding in enumerate(findings):
            for mine, first in zip_longest(finding, findings[0]):
                if mine != first:
                    raise ParallelismValueError(
                        f"The initializers around {', '.join((first or mine)[:2])} differ between rank 0 and "
                        f"rank {rank}. Pass the same param_init_fn on every rank."
                    )

    agreement.each("the initializers", find, compare)
    return components


def peak_bytes(components: Sequence[Component], bucket_bytes: int) -> int:
    """Bytes that a rank needs besides its shards: for several small components, or for the largest one.

    Those that only fill tensors need none.
    """
    sizes = [component.nbytes for component in components if component.fills is None]
    return max(max(sizes, default=0), min(bucket_bytes, sum(sizes), _TOGETHER))


class Scratch:
    """Memory for the whole tensors of one round after another: allocating it again each time is slow."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory, self._used = torch.empty(nbytes, dtype=torch.uint8, device=device), 0

    def clear(self) -> None:
        """Take back all tensors."""
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous, uninitialized tensor, with memory of its own if there is no room."""
        start = -(-self._used // _ALIGNED) * _ALIGNED
        end = start + prod(shape) * dtype.itemsize
        if end > len(self._memory):
            return torch.empty(shape, dtype=dtype, device=device)
        self._used = end
        return self._memory[start:end].view(dtype).view(shape)


def run_component(
    component: Component,
    structure: Structure,
    seed: int,
    device: torch.device,
    real: Mapping[str, torch.Tensor],
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[str, torch.Tensor]:
    """Run a component's initializers on full tensors, and return these on `device`; the model is not changed.

    Each initializer's seed is a hash of `seed`, the model's, and its module's name. Initializers get copies
    of the `real` tensors, which have values; changes to them are dropped.
    """
    if component.fills is not None:
        values = {}
        for name, fills in component.fills.items():
            info = structure.tensors[name].info
            values[name] = torch.empty(info.shape, dtype=info.dtype, device=device)
            draw(fills, seed, Layout(info.shape).part(Coordinate()), values[name].view(-1), device)
        return values
    held = {name: structure.tensors[name] for name in component.tensors}
    before = {name: [place.get() for place in one.places] for name, one in held.items()}
    try:
        for name, one in held.items():
            value = empty(one.info.shape, dtype=one.info.dtype, device=device)
            if name in real:
                value.copy_(dense(real[name]))
            one.put(nn.Parameter(value, one.info.requires_grad) if one.info.kind == "parameter" else value)
        with set_aside(device), torch.no_grad(), original_classes(set(structure.modules.values())):
            for initializer in component.initializers:
                seed_all(derived_seed(seed, initializer.module))
                # transformers computes tables on the CPU, even for a GPU, which rounds otherwise.
                with torch.device("cpu" if initializer.label == "_init_weights" else device):
                    initializer.run()
        return {name: one.get().detach().to(device) for name, one in held.items()}
    finally:
        for name, one in held.items():
            for place, old in zip(one.places, before[name], strict=True):
                place.put(old)


def _find_initializers(
    structure: Structure, needed: set[str], param_init_fn: InitFn | None
) -> Iterator[Initializer]:
    """The initializers of all modules, children before parents, like `nn.Module.apply`."""
    modules = structure.modules
    bare = {owner for name in needed for owner in structure.tensors[name].info.owners}
    concerned = {above for owner in bare for above in ancestors(owner)}
    functions, owners, seen = inherited(modules, "param_init_fn"), transformers_owners(modules), set[int]()
    layers = {name: getattr(module, "adapter_layer_names", None) for name, module in modules.items()}
    tuners = {name: keys for name, keys in layers.items() if keys is not None}
    for name in _post_order(modules):
        module = modules[name]
        if id(module) in seen or name not in concerned:
            continue
        seen.add(id(module))
        own = param_init_fn or functions[name]
        hugging_face = None if own else owners[name]
        if own is not None:
            if name in bare:
                yield Initializer(name, "param_init_fn", partial(own, module))
        elif tuners and _in_adapter(name, tuners):
            continue  # its tuner layer comes later and initializes it
        elif name in tuners and hasattr(module, "reset_lora_parameters"):
            kinds = _lora_inits(name, modules)
            yield Initializer(name, "reset_lora_parameters", partial(_reset_lora, module, kinds))
        elif hugging_face is not None:
            yield Initializer(name, "_init_weights", partial(hugging_face._init_weights, module))
        else:  # also of modules without tensors of their own: that of nn.Transformer writes those below it
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset) and (name in bare or not _needs_arguments(reset)):
                yield Initializer(name, "reset_parameters", reset)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        signature(function).bind()
    except TypeError:
        return True
    return False


def _group(structure: Structure, initializers: list[Initializer], needed: set[str]) -> Iterator[Component]:
    """Group initializers that touch a common tensor; skip groups that write nothing needed."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    for initializer in initializers:
        first, *others = sorted(initializer.touches) or [""]
        for other in others:
            leader[find(other)] = find(first)
    members: dict[str, list[Initializer]] = {}
    for initializer in initializers:
        if initializer.touches:
            members.setdefault(find(min(initializer.touches)), []).append(initializer)
    for group in members.values():
        tensors = tuple(dict.fromkeys(name for one in group for name in sorted(one.touches)))
        if needed.intersection(tensors):
            nbytes = sum(structure.tensors[name].info.nbytes for name in tensors)
            fills = fills_of(
                [(one.module, one.program) for one in group], structure.tensors, needed.intersection(tensors)
            )
            yield Component(tuple(group), tensors, nbytes, fills)


def _digest(fills: Fills | None) -> str:
    """The same for the same fills."""
    text = "" if fills is None else repr([(name, *map(str, fills[name])) for name in sorted(fills)])
    return f"{crc32(text.encode()):x}"


def _post_order(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names with children before their parents, siblings in order."""
    stack: list[str] = []
    for name in modules:  # parents come first in here
        while stack and stack[-1] and not name.startswith(f"{stack[-1]}."):
            yield stack.pop()
        stack.append(name)
    yield from reversed(stack)


def _in_adapter(name: str, tuners: Mapping[str, Sequence[str]]) -> bool:
    """Whether a peft tuner layer has added the module; given the keys of adapters in each of these layers."""
    split = (above.rpartition(".") for above in ancestors(name) if above)
    return any(key in tuners.get(parent, ()) for parent, _, key in split)


def _lora_inits(name: str, modules: Mapping[str, nn.Module]) -> dict[str, bool | str]:
    """The `init_lora_weights` of each adapter in a layer of peft.

    Raises:
        ParallelismValueError: one of them needs the weights of the model below the adapter.
    """
    layer: Any = modules[name]
    found: Iterator[Any] = (getattr(modules[above], "peft_config", None) for above in ancestors(name))
    configs: Mapping[str, Any] = next(filter(None, found), {})
    kinds = {one: getattr(configs.get(one), "init_lora_weights", True) for one in layer.r}
    for adapter, kind in kinds.items():
        if not isinstance(kind, bool) and kind != "gaussian":
            raise ParallelismValueError(
                f"init_lora_weights={kind!r} of the adapter {adapter!r} cannot be repeated from meta. Build "
                "the model outside of init_context, or use True, False or 'gaussian'."
            )
    return kinds


def _reset_lora(layer: Any, kinds: Mapping[str, bool | str]) -> None:
    for adapter, kind in kinds.items():
        if not kind:  # as the layers are made
            tables = (getattr(layer, name) for name in layer.adapter_layer_names if hasattr(layer, name))
            for made in (table[adapter] for table in tables if adapter in table):
                nn.init.normal_(made) if isinstance(made, nn.Parameter) else made.reset_parameters()
        elif "init_lora_weights" in signature(layer.reset_lora_parameters).parameters:
            layer.reset_lora_parameters(adapter, kind)
        else:
            layer.reset_lora_parameters(adapter)
        if hasattr(layer, "ranknum"):  # of AdaLoRA
            nn.init.constant_(layer.ranknum[adapter], layer.r[adapter])
