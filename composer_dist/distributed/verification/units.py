"""One unit after the other beside its plain copy, where the whole model does not fit into memory."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.distributed import prepared
from composer_dist.distributed.forwards import is_cache
from composer_dist.distributed.verification.around import as_before, seeded
from composer_dist.distributed.verification.compare import call, tolerance_of
from composer_dist.distributed.verification.plain import plain_copy
from composer_dist.distributed.verification.result import Findings
from composer_dist.structure.structure import Structure, read_structure
from composer_dist.tensors.nested import map_tensors, tensors_in


def fits(structure: Structure, ranks: Sequence[int]) -> bool:
    """Whether this rank has memory for all parameters and gradients; the ranks of a host share its memory."""
    parameters = [held.info for held in structure.parameters.values()]
    wanted = sum(one.nbytes * (2 if one.requires_grad else 1) for one in parameters)
    device = next((held.get().device for held in structure.tensors.values()), torch.device("cpu"))
    if device.type not in ("cpu", "meta"):
        free: int = torch.get_device_module(device).mem_get_info(device)[0]
        return wanted < free
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return wanted * len(ranks) < available * 1024
    return True


def compare_units(model: nn.Module, batch: Any, found: Findings) -> None:
    """Compare each unit's outputs with those of a plain copy for the same inputs; a collective.

    Units that contain others are left out.
    """
    plan = getattr(prepared.of(model), "plan", None)
    mesh = prepared.prepared_mesh(model)
    if plan is None or mesh is None or mesh.tp is not None or mesh.cp is not None:
        found.notes.append("outputs and gradients, because the unsharded model does not fit into memory")
        return
    found.notes.append("gradients and the loss, because the unsharded model does not fit into memory")
    modules = read_structure(model).modules
    names = [name for unit in plan.units for name in unit.modules]
    names = [one for one in names if one and not any(other.startswith(f"{one}.") for other in names)]
    calls: dict[str, tuple[Any, Any]] = {}
    with as_before(model), seeded(), torch.no_grad():
        model.eval()
        handles = []
        for name in names:

            def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                args = tuple(None if is_cache(one) else one for one in args)
                kwargs = {key: None if is_cache(one) else one for key, one in kwargs.items()}
                calls.setdefault(name, map_tensors(_kept, ((args, kwargs), output)))

            handles.append(modules[name].register_forward_hook(note, with_kwargs=True))
        try:
            call(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        for name in names:
            plain = plain_copy(modules[name]).eval()
            if name not in calls:
                continue
            (args, kwargs), output = calls.pop(name)
            expected = list(tensors_in(plain(*args, **kwargs)))
            for index, one in enumerate(tensors_in(output)):
                if one.is_floating_point():
                    tolerance = tolerance_of(one.dtype)
                    if not found.compare("unit output", f"{name} {index}", one, expected[index], tolerance):
                        found.modules.append((names.index(name), name))


def _kept(name: str, tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
