"""Selective checkpointing: keeps the results of some operations and recomputes all others.

Operations have torch's own names, as in a profile: "aten.mm", or "aten.mm.out" for one overload. These are
the operations that reach the dispatcher: a Linear calls "aten.mm" or, with a bias, "aten.addmm".
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from composer_dist import _torch
from composer_dist.distributed.activations.offload import Packed, stay, unpack
from composer_dist.errors import Faults, ParallelismRuntimeError
from composer_dist.wording import near_miss

DEFAULT = "default"
"""In a list of operations, stands for those below, which are expensive to compute and cheap to keep."""
_DEFAULT = (
    # matrix products and convolutions
    *("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"),
    "aten.convolution",
    # attention
    *(f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    *("aten._flash_attention_forward", "aten._efficient_attention_forward", "higher_order.flex_attention"),
    # collectives
    *(f"_c10d_functional.all_gather_into_tensor{how}" for how in ("", "_coalesced")),
    *(f"_c10d_functional.all_reduce{how}" for how in ("", "_coalesced")),
    *(f"_c10d_functional.reduce_scatter_tensor{how}" for how in ("", "_coalesced")),
    "_c10d_functional.all_to_all_single",
)
Pack = Callable[[torch.Tensor], Packed]
"""Saves a result; `unpack` restores it."""


def keeping(names: str | Sequence[str], pack: Pack) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two `context_fn` for torch's checkpoint that keep the results of the named operations.

    The first is our own, for running; the second is torch's, which marks the results to keep for
    torch.compile. When it is run, torch's needs every operation to be repeated, including those of FSDP2's
    hooks, allows only one backward, and cannot offload (torch 2.13).

    A call that draws random numbers (such as attention with dropout) is repeated anyway; otherwise the
    operations after it would not draw the same numbers as in forward.
    """
    kept = operators(names)

    def keeps(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return operator in kept and not _draws(operator, args, kwargs)

    def contexts() -> tuple[Any, Any]:
        results: dict[Any, list[Any]] = {}
        return _Keep(keeps, results, pack), _Replay(keeps, results)

    def mark(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = keeps(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    # torch.compile supports a partial here, but not a closure.
    return contexts, functools.partial(create_selective_checkpoint_contexts, mark)


class _Keep(_torch.TorchDispatchMode):
    """Keeps the results of each operation in order."""

    supports_higher_order_operators = True

    def __init__(self, keeps: Callable[..., bool], results: dict[Any, list[Any]], pack: Pack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._results, self._pack = keeps, results, pack
        self._kept: dict[int, Packed] = {}  # by storage; without those in host memory

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if self._keeps(operator, args, kwargs):
            packed = _torch.tree_map_only(torch.Tensor, self._keep, result)
            self._results.setdefault(operator, []).append(packed)
        elif torch.Tag.inplace_view in getattr(operator, "tags", ()):
            self._allow(args[0])
        elif self._kept:
            _torch.tree_map_only(torch.Tensor, self._watch, result)
        return result

    def _keep(self, tensor: torch.Tensor) -> Packed:
        packed = self._pack(_torch.detached(tensor))
        if packed.home is None and tensor.layout is torch.strided:
            self._kept[_torch.storage_key(tensor)] = packed
        return packed

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notice changes of a tensor that shares a kept one's memory, but not its version.

        A Linear without a bias returns one for sequences ("aten._unsafe_view").
        """
        if tensor.layout is torch.strided and (kept := self._kept.get(_torch.storage_key(tensor))):
            kept.aliases.append(stay(_torch.detached(tensor)))
        return tensor

    def _allow(self, tensor: torch.Tensor) -> None:
        """Expect the new version after `squeeze_` and the like, which change a shape and no value.

        vmap calls them. torch raises the version after this; raising it here too tells who shares it.
        """
        if kept := self._kept.get(_torch.storage_key(tensor)):
            before = [(one, _torch.version(one.tensor)) for one in (kept, *kept.aliases)]
            torch.autograd.graph.increment_version(tensor)
            for one, version in before:
                one.version += 2 * (_torch.version(one.tensor) - version)


class _Replay(_torch.TorchDispatchMode):
    """Returns the kept results instead of running the operations; can be entered several times."""

    supports_higher_order_operators = True

    def __init__(self, keeps: Callable[..., bool], results: Mapping[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._results = keeps, results
        self._next: dict[Any, Iterator[Any]] = {}

    def __enter__(self) -> Self:
        self._next = {operator: iter(each) for operator, each in self._results.items()}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._keeps(operator, args, kwargs):
            return operator(*args, **kwargs)
        result = next(self._next.get(operator, iter(())), self)
        if result is self:
            raise ParallelismRuntimeError(
                f"{operator} ran more often in the recomputation than in forward; a checkpointed module "
                "must run the same operations both times."
            )
        # Detached, because autograd changes the tensor that it gets, and `squeeze_` its version.
        return _torch.tree_map_only(Packed, lambda one: unpack(one).detach(), result)


def operators(names: str | Sequence[str]) -> frozenset[Any]:
    """The operations with the given names: all overloads if a name does not include one."""
    names = [names] if isinstance(names, str) else names
    known = _torch.operators()
    found: set[Any] = set()
    with Faults("Activation checkpointing cannot save ", ".", "; ") as faults:
        for name in names:
            if name == DEFAULT:
                found.update(one for each in _DEFAULT for one in _overloads(each, known))
                continue
            overloads = list(_overloads(name, known))
            faults += filter(None, [_fault(name, overloads, known)])
            found.update(overloads)
    return frozenset(found)


def _overloads(name: str, known: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace, None), packet, None) if packet else None
    if not isinstance(found, _torch.OpOverloadPacket):
        yield from [found] if isinstance(found, _torch.HigherOrderOperator) else []
        return
    every = {one: getattr(found, one) for one in known.get(f"{namespace}.{packet}", ())}
    if overload:
        yield from [every[overload]] if overload in every else []
        return
    # Overloads that write to a given tensor are left out, unless there are no others ("aten.relu_").
    yield from [one for one in every.values() if not _torch.is_mutable(one)] or every.values()


def _fault(name: str, overloads: Sequence[Any], known: Mapping[str, Any]) -> str | None:
    if not overloads:
        return f"{name!r}, because there is no such operation.{near_miss(name, list(known))}"
    plain = [one for one in overloads if isinstance(one, _torch.OpOverload)]
    if any(_torch.is_mutable(one) for one in plain):
        return f"{name!r}, which changes a tensor in place; leave it out"
    if any(_torch.is_composite(one) for one in plain):
        return (
            f"{name!r}, which torch decomposes before it runs; name its parts ('aten.mm' and 'aten.addmm' "
            "for a linear layer), or 'default'"
        )
    if any(_is_random(one) and _dropout_position(one) is None for one in plain):
        return f"{name!r}, which draws random numbers; leave it out: recomputing draws the same numbers"
    return None


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def _dropout_position(operator: Any) -> int | None:
    names = [argument.name for argument in _torch.arguments(operator)]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not _is_random(operator):
        return False
    position = _dropout_position(operator)
    if position is None:
        return True
    default = _torch.arguments(operator)[position].default_value
    return bool(kwargs.get("dropout_p", args[position] if position < len(args) else default))
