"""What each toy model is made of: a table for those who write code that must hold for all of them.

Run as `python -m tests.zoo.toy [--json PATH] [NAME ...]`.
"""

import argparse
import contextlib
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo import toy

_REMARKS = (
    "tied",
    "duplicate_modules",
    "scalars",
    "plain_tensors",
    "direct_use",
    "uninitialized",
    "not_meta",
)
_READS_DATA = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "_unique2", "equal")


def examine(name: str) -> dict[str, Any]:
    """Every fact about one model; `error` names what failed, if anything did."""
    facts: dict[str, Any] = {"name": name}
    try:
        started = time.perf_counter()
        model = toy.build(name)
        facts["seconds"] = round(time.perf_counter() - started, 3)
        facts["class"] = type(model).__name__
        facts |= structure(model) | construction(name, model)
        facts |= behavior(name, model)
        facts["forward_seconds"] = round(time.perf_counter() - started - facts["seconds"], 3)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name
        facts["error"] = f"{type(error).__name__}: {error} in {where}"
    return facts


def structure(model: nn.Module) -> dict[str, Any]:
    """Names of shared, odd and unregistered tensors, without running anything."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors = parameters | buffers
    persistent = set(model.state_dict(keep_vars=True))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tied": _shared(parameters),
        "tied_buffers": _shared(buffers),
        "duplicate_modules": _duplicates(model),
        "scalars": [n for n, p in parameters.items() if p.ndim == 0],
        "one_element": [n for n, p in parameters.items() if p.ndim and p.numel() == 1],
        "empty": [n for n, t in tensors.items() if t.numel() == 0],
        "dtypes": sorted({str(p.dtype) for p in parameters.values()}),
        "trainable_dtypes": sorted({str(p.dtype) for p in parameters.values() if p.requires_grad}),
        "frozen": [n for n, p in parameters.items() if not p.requires_grad],
        "buffer_dtypes": sorted({str(b.dtype) for b in buffers.values()}),
        "non_contiguous": [n for n, t in tensors.items() if not t.is_contiguous()],
        "views": [n for n, t in tensors.items() if t.untyped_storage().nbytes() != t.nbytes],
        "non_persistent": [n for n in buffers if n not in persistent],
        "plain_tensors": sorted(_plain(model)),
        "subclasses": sorted(
            {type(p).__name__ for p in tensors.values()} - {"Parameter", "Tensor", "Buffer"}
        ),
        "parametrized": sorted(n for n, m in model.named_modules() if hasattr(m, "parametrizations")),
        "own_parameters": sorted(
            n for n, m in model.named_modules() if m._parameters and next(m.children(), None) is not None
        ),
    }


def construction(name: str, model: nn.Module) -> dict[str, Any]:
    """Whether construction repeats itself and works on the meta device."""
    again = toy.build(name).state_dict()
    with _poisoned_memory():
        poisoned = toy.build(name)
    unset = [n for n, t in [*poisoned.named_parameters(), *poisoned.named_buffers()] if bool(t.isnan().any())]
    same = all(torch.equal(t, again[k]) or k in unset for k, t in model.state_dict().items())
    try:
        meta = toy.build(name, "meta")
        ok = _shapes(meta) == _shapes(model)
        ties = [_shared(dict(m.named_parameters(remove_duplicate=False))) for m in (meta, model)]
        reals = [n for n, t in [*meta.named_parameters(), *meta.named_buffers()] if not t.is_meta]
        word = "ok" if ok and ties[0] == ties[1] else "other ties" if ok else "other shapes"
        return {"same_weights": same, "uninitialized": unset, "meta": word, "not_meta": reals}
    except Exception as error:
        return {"same_weights": same, "uninitialized": unset, "meta": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives nan inside, so that what no initializer writes shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {k: t.shape for k, t in model.state_dict().items()}


def behavior(name: str, model: nn.Module) -> dict[str, Any]:
    """One forward and backward: finiteness, chance, parameters used past their module's forward."""
    batch = toy.inputs(name, model)
    called: set[nn.Module] = set()
    hooks = [m.register_forward_pre_hook(lambda m, _: called.add(m)) for m in model.modules()]
    before = {n: b.clone() for n, b in model.named_buffers()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with _Watch() as watch:
        first = toy.loss(model, batch)
    drew = not torch.equal(state, torch.get_rng_state())
    for hook in hooks:
        hook.remove()
    first.backward()  # type: ignore[no-untyped-call]
    changed = [n for n, b in model.named_buffers() if n not in before or not _same(b, before[n])]
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append((f"{prefix}.{key}".lstrip("."), module))
    direct = [o[0][0] for p, o in owners.items() if p.grad is not None and not any(m in called for _, m in o)]
    torch.manual_seed(2)
    with torch.no_grad():
        second = toy.loss(model, batch) if drew else first
    return {
        "inputs": {k: list(v.shape) for k, v in batch.items()},
        "loss": first.item(),
        "finite": bool(first.isfinite()),
        "grads_finite": all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None),
        "without_grad": [n for n, p in model.named_parameters() if p.grad is None],
        "draws_random": drew,
        "loss_is_random": bool(first != second),
        "reads_data": sorted(watch.seen),
        "buffers_changed": changed,
        "direct_use": direct,
    }


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators whose result sizes or Python values depend on tensor contents."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func.overloadpacket.__name__
        if op in _READS_DATA:
            self.seen.add(op)
        if op == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            self.seen.add("index by mask")
        return func(*args, **(kwargs or {}))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _shared(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _duplicates(model: nn.Module) -> list[list[str]]:
    """Names of each module that stands in several places and holds tensors; the outermost only."""
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            names[module].append(name)
    groups = [group for group in names.values() if len(group) > 1]
    inside = {n for group in groups for n in group}
    return [g for g in groups if not all(n.rpartition(".")[0] in inside for n in g)]


def _plain(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and any(_tensors(value)):
                yield f"{prefix}.{key}".lstrip(".")


def _tensors(value: Any, depth: int = 3) -> Iterator[bool]:
    if isinstance(value, Tensor):
        yield True
    elif isinstance(value, (list, tuple, dict)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth - 1)


def main() -> None:
    """Print the table; with `--json`, write every fact too."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.toy", description=__doc__)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    rows = []
    print(f"{'model':36} {'sec':>5} {'params':>9} loss grads same meta  remarks")
    for name in options.names or toy.names():
        row = examine(name)
        rows.append(row)
        if "error" in row:
            print(f"{name:36} {row['error'][:120]}", flush=True)
            continue
        marks = " ".join(f"{key}={len(row[key])}" for key in _REMARKS if row[key])
        checks = " ".join(f"{row[key]!s:5}" for key in ("finite", "grads_finite", "same_weights"))
        cost = f"{row['seconds']:5.2f} {row['parameters']:9,}"
        print(f"{name:36} {cost} {checks} {row['meta'][:12]:5} {marks}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    print(f"{sum('error' not in r for r in rows)} of {len(rows)} build and run")
