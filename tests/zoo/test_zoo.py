"""Every Hugging Face architecture that builds at toy size trains prepared as it does unsharded.

Rank 0 has a real model and rank 1 one on meta.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist

from composer_dist.distributed import parallelize_model
from composer_dist.structure.structure import read_structure
from tests.kit.compare import full_each
from tests.kit.world import run
from tests.zoo import toy

REST = [name for name in toy.names() if name not in toy.FAST]


def prepared_equals_unsharded(name: str) -> int:
    """Prepare toy model `name` and compare values, ties, loss, gradients and one optimizer step.

    Returns:
        The number of units.
    """
    # The forward of many models warns; whether they do is not what is tested here.
    warnings.simplefilter("ignore")
    reference, rank = toy.build(name), dist.get_rank()
    model = toy.build(name) if rank == 0 else toy.build(name, device="meta")
    trained = ([p for p in each.parameters() if p.requires_grad] for each in (reference, model))
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in trained]
    names = [held.info.names for held in read_structure(reference).tensors.values()]
    done = parallelize_model(model, "fsdp", optimizers[1])
    assert [held.info.names for held in read_structure(model).tensors.values()] == names, "what is tied"
    for tensor_name, expected, found in pairs(reference, model):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=tensor_name)
    losses = []
    for each in (reference, model):
        torch.manual_seed(1)  # a few draw random numbers even in eval
        losses.append(toy.loss(each, copy.deepcopy(toy.inputs(name, each))))  # some write into their inputs
        losses[-1].backward()
    assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0])
    for tensor_name, expected, found in gradients(reference, model):
        error = (expected - found).abs().max()
        assert error <= 1e-6 + 1e-4 * expected.abs().max(), f"gradient of {tensor_name} is off by {error}"
    for optimizer in optimizers:
        optimizer.step()
    for tensor_name, expected, found in pairs(reference, model):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=tensor_name)
    return len(done.plan.units)


def pairs(reference: torch.nn.Module, model: torch.nn.Module):
    """Name, expected value and found value of every tensor."""
    found = full_each({name: held.get() for name, held in read_structure(model).tensors.items()})
    for name, held in read_structure(reference).tensors.items():
        yield name, held.get().detach(), found[name]


def gradients(reference: torch.nn.Module, model: torch.nn.Module):
    """Name, expected and found gradient of every parameter; none counts as zero."""
    found = {name: held.get().grad for name, held in read_structure(model).parameters.items()}
    found = full_each({name: grad for name, grad in found.items() if grad is not None})
    for name, held in read_structure(reference).parameters.items():
        expected = held.get().grad
        if (expected is not None or name in found) and 0 not in held.info.shape:
            zero = torch.zeros(held.info.shape)
            yield name, zero if expected is None else expected, found.get(name, zero)


@pytest.mark.parametrize("name", [*toy.FAST, *(pytest.param(name, marks=pytest.mark.zoo) for name in REST)])
def test_architecture(name):
    assert run(prepared_equals_unsharded, 2, name, timeout=120)[0] >= 1


def test_the_zoo_is_large():
    assert len(toy.names()) >= 174
