"""What the optimizers hold: every trainable parameter once, and a step moves it."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.optimizers.follow import inner_optimizers, names_by_id
from composer_dist.distributed.training.average_gradients import anywhere, groups_of
from composer_dist.distributed.verification.result import Findings
from composer_dist.errors import in_words
from composer_dist.structure.structure import Structure
from composer_dist.tensors.inner import local_part

_GROUPS, _STEP = "optimizer group", "optimizer step"


def check_groups(structure: Structure, optimizers: Sequence[Optimizer], found: Findings) -> None:
    """Each trainable parameter is in exactly one group, and groups hold no others."""
    names = names_by_id(structure)
    inner = {id(one) for optimizer in optimizers for one in inner_optimizers(optimizer)}
    outer = [optimizer for optimizer in optimizers if id(optimizer) not in inner]
    held = [one for optimizer in outer for group in optimizer.param_groups for one in group["params"]]
    counts = Counter(map(id, held))
    for name, one in structure.parameters.items():
        if not (parameter := one.get()).requires_grad:
            continue
        found.count(_GROUPS)
        if (count := counts[id(parameter)]) != 1:
            found.wrong(_GROUPS, name, "is in no optimizer group" if not count else f"is in {count} groups")
    if strangers := [tuple(one.shape) for one in held if id(one) not in names]:
        text = f"{len(strangers)} are not the model's, the first of shape {strangers[0]}"
        found.wrong(_GROUPS, "", f"of the parameters, {text}; they move nothing")


def check_step(
    structure: Structure, optimizers: Sequence[Optimizer], mesh: Mesh | None, found: Findings
) -> None:
    """A step of a copy of each optimizer, with gradients of ones and a learning rate of 1, moves everything.

    Copies of the parameters and of the state are changed, so each rank needs memory for them once more.
    """
    names = names_by_id(structure)
    for optimizer in optimizers:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        some = [one for one in held if one.requires_grad and one.numel()]  # nothing moves what is empty
        trained = {names[id(one)]: one for one in some if id(one) in names}
        memo: dict[int, Any] = {id(one): _copied(one) for one in held}
        try:
            step_of_copy(optimizer, memo)
        except Exception as error:  # of the optimizer's own code
            found.notes.append(f"a step of {type(optimizer).__name__}, which raised {in_words(error)}")
            continue
        moved = [not _same(memo[id(one)], one) for one in trained.values()]
        groups = groups_of(mesh.device_mesh) if mesh and moved else []
        for name, moves in zip(trained, anywhere(moved, groups), strict=True):
            found.count(_STEP)
            if not moves:
                found.wrong(_STEP, name, f"{type(optimizer).__name__} does not move it")


def step_of_copy(optimizer: Optimizer, memo: dict[int, Any]) -> None:
    """Take a step of a copy of an optimizer that holds the parameters in `memo`, by the originals' ids."""
    copied: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        hooks = key.endswith("_hooks")
        if hooks or key not in ("step", "zero_grad"):  # methods that a scheduler has replaced
            vars(copied)[key] = OrderedDict() if hooks else copy.deepcopy(value, memo)
    for group in copied.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = torch.ones_like(rate)
        elif rate is not None:
            group["lr"] = 1.0
    copied.step()


@torch.no_grad()
def _copied(parameter: Tensor) -> Tensor:
    copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        copied.grad = torch.ones_like(parameter)
    return copied


@torch.no_grad()
def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(local_part(one.detach()), local_part(other.detach()))
