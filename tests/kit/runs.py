"""Small training runs on any mesh, to be saved and loaded."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.checkpoint import full_model_state, load_checkpoint, save_checkpoint
from composer_dist.checkpoint.kinds.optimizer_names import named_optimizer_state
from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.moving.scatter import scatter_into
from composer_dist.distributed.prepare import parallelize_model
from composer_dist.distributed.prepared import named_parameters_canonical
from tests.kit.compare import equal
from tests.kit.meshes import MESHES
from tests.kit.toy import six_tokens, stateful

Snapshot = tuple[dict[str, Any], dict[str, dict[str, Any]], list[dict[str, Any]]]
Make = Callable[[int], nn.Module]


def loss_of(model: nn.Module) -> Tensor:
    """Of a toy, or of a transformers model."""
    if hasattr(model, "config"):
        ids = torch.arange(12).view(2, 6) % model.config.vocab_size
        return model(input_ids=ids, labels=ids).loss
    loss = model(six_tokens()).logsumexp(-1).mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Some steps, alike on every rank."""
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def start(mesh: str, make: Make, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer on a mesh, before the first step."""
    model = make(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if (config := MESHES[mesh][1]) is not None:
        parallelize_model(model, config, optimizer)
    return model, optimizer


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """All values in full, and the options of the groups."""
    named = named_optimizer_state(model, optimizer)
    state = {
        name: {key: gather(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in named["state"].items()
    }
    return full_model_state(model, ranks="all"), state, named["param_groups"]


def save_run(path: str, mesh: str, make: Make = stateful, **options: Any) -> Snapshot:
    """One step on a mesh, then saved."""
    model, optimizer = start(mesh, make, 0)
    train(model, optimizer)
    pending = save_checkpoint(path, {"model": model, "optimizer": optimizer, "steps": 1}, **options)
    if pending is not None:
        pending.wait()
    return snapshot(model, optimizer)


def load_run(path: str, mesh: str, make: Make = stateful, resave: str | None = None) -> Snapshot:
    """Another model on a mesh, loaded, and perhaps saved again."""
    model, optimizer = start(mesh, make, 1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": 0}
    assert load_checkpoint(path, state) == {}
    assert state["steps"] == 1
    assert state["model"] is model
    if resave is not None:
        save_checkpoint(resave, state)
    return snapshot(model, optimizer)


def assert_same(one: Snapshot, other: Snapshot) -> None:
    """Bit-equal, apart from the parameters and the implementation that the groups name."""

    def compared(run: Snapshot) -> list[Any]:
        groups = [{k: v for k, v in group.items() if k not in ("foreach", "params")} for group in run[2]]
        return [run[0], run[1], groups]

    equal(compared(one), compared(other))


def give_gradients(model: nn.Module, step: int) -> None:
    """Gradients that depend on the parameter's name and the step alone; none for the frozen."""
    for name, parameter in named_parameters_canonical(model):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter)
            scatter_into(parameter.grad, full)


def train_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps from number `first` on."""
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
