"""How a prepared model is compared with its unsharded reference."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composer_dist.distributed import Preparation, parallelize_model, sampler_kwargs
from composer_dist.distributed.prepared import named_buffers_canonical, named_parameters_canonical
from tests.kit.models import batch

Tensors = dict[str, Tensor]
SGD = partial(torch.optim.SGD, momentum=0.9)
"""DTensor works out ten shardings for each parameter that AdamW steps, and two for this."""


def full(value: Tensor) -> Tensor:
    """All of a tensor, a copy."""
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.clone()


def full_each(given: Mapping[str, Tensor]) -> Tensors:
    """All of each tensor, copies; shards of a mesh of one dimension travel together, to save time."""
    sharded: dict[DeviceMesh, dict[str, DTensor]] = {}
    for name, one in given.items():
        if isinstance(one, DTensor) and _is_plain(one):
            sharded.setdefault(one.device_mesh, {})[name] = one
    found = dict(pair for mesh, ones in sharded.items() for pair in _gathered(mesh, ones))
    return {name: found[name] if name in found else full(one) for name, one in given.items()}


def _gathered(mesh: DeviceMesh, ones: Mapping[str, DTensor]) -> Iterator[tuple[str, Tensor]]:
    """All of each, from the shards of all ranks, each of which has to be as long as DTensor would have it."""
    parts = [one.detach().to_local() for one in ones.values()]
    mine = [(part.shape, part.flatten().view(torch.uint8).numpy().tobytes()) for part in parts]
    names = [(name, one.dtype, one.shape, one.placements) for name, one in ones.items()]
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, (names, mine), mesh.get_group())
    assert all(there == names for there, _ in everyone)
    for (name, one), *shards in zip(ones.items(), *(of_rank for _, of_rank in everyone), strict=True):
        dimension = one.placements[0].dim
        rows = one.shape[dimension]
        step = -(-rows // mesh.size())
        lengths = [min(max(rows - rank * step, 0), step) for rank in range(mesh.size())]
        assert [shape[dimension] for shape, _ in shards] == lengths, name
        some = [
            torch.frombuffer(bytearray(data), dtype=one.dtype).view(shape) for shape, data in shards if data
        ]
        whole = torch.cat(some, dimension) if some else torch.empty(one.shape, dtype=one.dtype)
        assert whole.shape == one.shape, name
        yield name, whole


def _is_plain(one: DTensor) -> bool:
    placed = one.device_mesh.ndim == 1 and type(one.placements[0]) is Shard
    return placed and type(one.to_local()) is Tensor and one.device.type == "cpu"


def values(model: nn.Module) -> Tensors:
    """Every parameter, buffer and tensor attribute by name, in full; tied ones under each name."""
    found = full_each(dict(named_parameters_canonical(model, remove_duplicate=False)))
    found |= {name: b.clone() for name, b in named_buffers_canonical(model)}
    return found


def weights(model: nn.Module) -> Tensors:
    """Every parameter in full, detached."""
    return full_each(dict(named_parameters_canonical(model)))


def grads(model: nn.Module) -> Tensors:
    """Every gradient in full; a parameter without one is left out."""
    return full_each({name: p.grad for name, p in named_parameters_canonical(model) if p.grad is not None})


def same(found: Tensors, expected: Tensors) -> None:
    """Bit-equal, dtype and names included."""
    assert sorted(found) == sorted(expected)
    different = [n for n, v in expected.items() if found[n].dtype != v.dtype or not torch.equal(found[n], v)]
    assert not different, different


def close(found: Tensors, expected: Tensors, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal to rounding."""
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        one = found[name]
        alike = (one.dtype, one.shape, one.device) == (value.dtype, value.shape, value.device)
        if not (alike and torch.allclose(one, value, rtol, atol)):  # a tenth of the time of what explains
            torch.testing.assert_close(one, value, rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)


def equal(found: Any, expected: Any, path: str = "") -> None:
    """Bit-equal tensors, equal values, the same keys in the same order."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            equal(found[key], value, f"{path}/{key}")
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            equal(found[number], value, f"{path}/{number}")
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor, path
        assert (found.dtype, found.shape, found.device.type) == (expected.dtype, expected.shape, "cpu"), path
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """A state without what is no tensor, such as a module's extra state."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def alike(model: nn.Module, part: Callable[[Tensor], Tensor | None] = lambda p: p.detach()) -> bool:
    """Whether all ranks hold the same values."""
    flat = torch.cat([value.flatten().double() for p in model.parameters() if (value := part(p)) is not None])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    return all(torch.equal(one, everywhere[0]) for one in everywhere)


def shape_of(model: nn.Module) -> dict[str, Any]:
    """What a model is besides its values: names, classes, attributes and hooks."""
    found: dict[str, Any] = {"state": list(model.state_dict())}
    for name, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        held = {
            key: list(value) for key, value in own.items() if key.startswith("_") and isinstance(value, dict)
        }
        plain = {
            key: value for key, value in own.items() if key not in held and not isinstance(value, Tensor)
        }
        found[f"module {name}"] = type(module), sorted(own), held, plain
    for name, one in model.named_parameters(remove_duplicate=False):
        hooks = one._backward_hooks or None, getattr(one, "_post_accumulate_grad_hooks", None) or None
        attributes = {key for key in vars(one) if not isinstance(vars(one)[key], Tensor)}
        found[name] = type(one), one.shape, one.dtype, one.requires_grad, one.is_leaf, attributes, hooks
    for name, one in model.named_buffers(remove_duplicate=False):
        found[name] = type(one), one.shape, one.dtype, vars(one)
    return found


def part_of(x: Tensor, mesh: Any) -> Tensor:
    """This rank's rows of a batch."""
    data = sampler_kwargs(mesh)
    return x.chunk(data["num_replicas"])[data["rank"]]


def same_parameters(model: nn.Module, reference: nn.Module, *, gradients: bool = False) -> None:
    """Every parameter, or every gradient, equals the reference's to rounding."""
    found, expected = (grads(one) if gradients else weights(one) for one in (model, reference))
    close(found, expected, rtol=1e-4)


@contextmanager
def fails(kind: type[BaseException], *texts: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    with pytest.raises(kind) as caught:
        yield caught
    for text in texts:
        assert text in str(caught.value), str(caught.value)


@contextmanager
def fails_alike(kind: type[BaseException], *texts: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Every rank fails with the same message, which contains the texts."""
    with fails(kind, *texts) as caught:
        yield caught
    shown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shown, str(caught.value))
    assert shown == shown[:1] * len(shown)


def assert_same_training(
    build: Callable[[], nn.Module],
    config: Any = "fsdp",
    *,
    policy: Any = None,
    first: Callable[[nn.Module], Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
) -> Preparation:
    """Prepare a model and train it beside an unsharded one: outputs, loss, gradients, three steps.

    Args:
        build: makes the model, the same on every rank.
        config: a configuration, or a function that makes one on the rank.
        policy: the `fsdp_wrap_policy`.
        first: what the user's own code does to the model before preparation.
        optimizer: its class.
    """
    torch.manual_seed(3)
    reference = build()
    torch.manual_seed(3)
    model = build()
    named = list(model.named_parameters(remove_duplicate=False))
    ties = [[name for name, other in named if other is one] for one in model.parameters()]
    if first is not None:
        first(model)
    optimizers = [optimizer(m.parameters(), lr=0.05) for m in (reference, model)]
    config = config() if callable(config) else config
    done = parallelize_model(model, config, optimizers[1], fsdp_wrap_policy=policy)
    assert done.model is model
    for step in range(3):
        x = batch(reference, step)
        expected, output = reference(x), model(part_of(x, done.mesh))
        torch.testing.assert_close(output, part_of(expected, done.mesh))
        loss, mean = expected.square().mean(), output.square().mean()
        loss.backward()
        mean.backward()
        total = mean.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), loss.detach())
        same_parameters(model, reference, gradients=True)
        for one in optimizers:
            one.step()
            one.zero_grad()
        same_parameters(model, reference)
    now = dict(named_parameters_canonical(model, remove_duplicate=False))
    assert list(now) == list(dict(named))
    for tie in ties:
        assert len({id(now[name]) for name in tie}) == 1
    return done
