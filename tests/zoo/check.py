"""One architecture on two ranks, rank 0 real and rank 1 on meta, against the same model unsharded."""

import copy
import warnings

import torch
import torch.distributed as dist

from composer_dist import FSDP2Config, ParallelismConfig, Rule
from composer_dist.distributed import parallelize_model
from composer_dist.structure.structure import Structure, read_structure
from tests.kit.compare import full
from tests.zoo import toy


def prepared_equals_unsharded(name: str, rules: tuple[Rule, ...] = ()) -> int:
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
    names = tensor_names(read_structure(reference))
    done = parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(), rules=rules), optimizers[1])
    assert tensor_names(read_structure(model)) == names
    for tensor_name, expected, found in pairs(reference, model):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=tensor_name)
    losses = [loss_and_backward(name, each) for each in (reference, model)]
    assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0])
    for tensor_name, expected, found in gradients(reference, model):
        error = (expected - found).abs().max()
        assert error <= 1e-6 + 1e-4 * expected.abs().max(), f"gradient of {tensor_name} is off by {error}"
    for optimizer in optimizers:
        optimizer.step()
    for tensor_name, expected, found in pairs(reference, model):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=tensor_name)
    return len(done.plan.units)


def tensor_names(structure: Structure) -> list[tuple[str, ...]]:
    """All names of all tensors: what is tied with what."""
    return [held.info.names for held in structure.tensors.values()]


def loss_and_backward(name: str, model: torch.nn.Module) -> float:
    """The loss on the toy batch, a fresh copy: some models write into their inputs."""
    batch = copy.deepcopy(toy.inputs(name, model))
    torch.manual_seed(1)  # a few draw random numbers even in eval
    loss = toy.loss(model, batch)
    loss.backward()
    return float(loss)


def pairs(reference: torch.nn.Module, model: torch.nn.Module):
    """Name, expected value and found value of every tensor."""
    found = read_structure(model).tensors
    for name, held in read_structure(reference).tensors.items():
        yield name, held.get().detach(), full(found[name].get())


def gradients(reference: torch.nn.Module, model: torch.nn.Module):
    """Name, expected and found gradient of every parameter; none counts as zero."""
    found = read_structure(model).parameters
    for name, held in read_structure(reference).parameters.items():
        expected, other = held.get().grad, found[name].get().grad
        if (expected is not None or other is not None) and 0 not in held.info.shape:
            zero = torch.zeros(held.info.shape)
            yield name, zero if expected is None else expected, zero if other is None else full(other)
