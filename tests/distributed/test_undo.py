"""The way back from every mode: a plain model, as one that was never prepared, with its training going on."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import no_sync, parallelize_model, unparallelize_model
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import close, fails_alike, grads, part_of, same, shape_of, values
from tests.kit.decoder import Decoder, loss_of, token_batch
from tests.kit.grids import in_the_default_run
from tests.kit.measure import messages
from tests.kit.meshes import config, ddp, mesh
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
Make = Callable[[], nn.Module]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, mesh: Any = None) -> None:
    """One step on this rank's rows, or on all of them without a mesh."""
    batch = token_batch(number)
    optimizer.zero_grad()
    loss_of(model, batch if mesh is None else part_of(batch, mesh)).backward()
    optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=0.01)


def states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{key}": value
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def undone(make: Make, wishes: Any, *, steps: int = 2, **options: Any) -> nn.Module:
    """Train, prepared and plain in turn, like one process; return the model."""
    model, reference = built(make), built(make)
    optimizer, other = adam(model), adam(reference)
    groups, fresh = optimizer.param_groups[0], shape_of(model)
    done = parallelize_model(model, wishes, optimizer, **options)
    for number in range(steps):
        step(model, optimizer, number, done.mesh)
        step(reference, other, number)
    unparallelize_model(model, optimizer)
    now = shape_of(model)
    assert now.keys() == fresh.keys()
    for name, one in fresh.items():
        assert now[name] == one, name
    assert optimizer.param_groups[0] is groups
    assert {id(p) for p in groups["params"]} == {id(p) for p in model.parameters() if p.requires_grad}
    assert not any(isinstance(one, DTensor) for one in [*states(optimizer).values(), *model.buffers()])
    close(values(model), values(reference), 1e-4, 1e-4)
    close(states(optimizer), states(other), 1e-4, 1e-4)
    for number in range(steps, 2 * steps):  # every rank as one process
        step(model, optimizer, number)
        step(reference, other, number)
    close(values(model), values(reference), 1e-4, 1e-4)
    return model


MODES: dict[str, ParallelismConfig] = {
    "fsdp": config(),
    "offload": config(fsdp2=FSDP2Config(reshard_after_forward=False, cpu_offload=True)),
    "no order": config(check_order=False),
    "composable": config(activation_checkpointing="composable"),
    "wrapped": config(activation_checkpointing="wrapped"),
    "offloaded": config(activation_checkpointing="offload"),
    "selective": config(activation_checkpointing="selective"),
    "compile": config(compile={"backend": "aot_eager"}),
    "hsdp": config(replicas=2),
    "ddp": ddp(),
    "ddp wrapped": ddp(activation_checkpointing="wrapped"),
    "tp": mesh(dp_shard=1, tp=2),
}


@pytest.mark.promise(114)
@pytest.mark.parametrize(
    "mode", in_the_default_run(*(one for one in MODES if one not in ("fsdp", "ddp", "wrapped")), among=MODES)
)
@on_ranks(2)
def test_a_model_is_plain_again_and_its_training_goes_on(mode: str) -> None:
    undone(Decoder, MODES[mode])


@pytest.mark.promise(114)
@on_ranks(2)
def test_models_inside_of_another_module_are_undone_with_it() -> None:
    """And optimizers step afterwards."""
    model, reference = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))) for _ in range(2))
    reference.load_state_dict(state := {name: torch.ones_like(p) for name, p in model.named_parameters()})
    model.load_state_dict(state)
    for inner, wishes in zip(model, ("fsdp", config(replicas=2)), strict=True):
        parallelize_model(inner, wishes)
    optimizer, other = adam(model), adam(reference)
    for number in range(3):
        if number == 1:
            unparallelize_model(model, optimizer)
        if number == 2:
            parallelize_model(model, "ddp", optimizer)
        for each, own in ((model, optimizer), (reference, other)):
            each(torch.eye(4)).square().mean().backward()
            own.step()
            own.zero_grad()
    close(values(model), values(reference), 1e-5, 1e-6)


FOUR: dict[str, ParallelismConfig] = {
    "hsdp": config(replicas=2, activation_checkpointing="wrapped"),
    "fsdp x tp": mesh(dp_shard=2, tp=2),
    "replicas x tp": mesh(dp_replicate=2, dp_shard=1, tp=2),
    "sequence": ParallelismConfig(mesh=MeshConfig(dp_shard=2, tp=2), tp=TPConfig(sequence_parallel=True)),
}


@pytest.mark.promise(114)
@pytest.mark.parametrize("mode", in_the_default_run("sequence", among=FOUR))
@on_ranks(4)
def test_a_mesh_of_two_dimensions_is_undone(mode: str) -> None:
    undone(Decoder, FOUR[mode])


@pytest.mark.promise(114)
@on_ranks(2)
def test_from_one_mode_to_the_next_in_one_process() -> None:
    """FSDP, tensor parallelism, DDP, FSDP again, plain: the training is that of one process throughout."""
    model, reference = built(Decoder), built(Decoder)
    optimizer, other = adam(model), adam(reference)
    fresh = shape_of(model)
    for number, wishes in enumerate((config(), mesh(dp_shard=1, tp=2), ddp(), config(), None)):
        done = None if wishes is None else parallelize_model(model, wishes, optimizer)
        for at in (2 * number, 2 * number + 1):
            step(model, optimizer, at, done and done.mesh)
            step(reference, other, at)
        if done is not None:
            unparallelize_model(model, optimizer)
        assert shape_of(model) == fresh
        close(values(model), values(reference), 1e-4, 1e-4)
        close(states(optimizer), states(other), 1e-4, 1e-4)


@pytest.mark.promise(114)
@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "ddp", "tp"])
@on_ranks(2)
def test_no_bit_changes_on_the_way_there_and_back(mode: str) -> None:
    """Values, gradients that wait, state, ties, attributes and the user's hooks, before and after."""
    model = built(Decoder)
    model.head.weight = model.embed.weight  # a tie
    seen: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.norm.weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    model.norm.weight.decay = 0.5
    model.norm.bias.requires_grad_(False)
    optimizer = adam(model)
    step(model, optimizer, 0)
    loss_of(model, token_batch(1)).backward()
    kept = [values(model), states(optimizer), grads(model)]
    kept = copy.deepcopy(kept)
    groups, scheduler = optimizer.param_groups, torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parallelize_model(model, MODES[mode], optimizer)
    unparallelize_model(model, optimizer)
    for found, expected in zip([values(model), states(optimizer), grads(model)], kept, strict=True):
        assert found.keys() == expected.keys()
        same(found, expected)
    assert model.head.weight is model.embed.weight
    assert model.norm.weight.decay == 0.5
    assert not model.norm.bias.requires_grad
    assert optimizer.param_groups is groups
    seen.clear()
    step(model, optimizer, 2)
    scheduler.step()
    assert seen == ["forward", "gradient"]


@pytest.mark.promise(114)
@on_ranks(2)
def test_small_tensors_are_gathered_together() -> None:
    model = built(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(50))))
    optimizer = adam(model)
    parallelize_model(model, config(), optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {name: one.full_tensor() for name, one in states(optimizer).items() if isinstance(one, DTensor)}
    before = {**values(model), **state}
    with messages() as sent:
        unparallelize_model(model, optimizer)
    assert len(sent) == 1
    after = {**values(model), **states(optimizer)}
    assert len(before) == 300
    same({name: after[name] for name in before}, before)


@pytest.mark.promise(114)
@pytest.mark.parametrize("how", ["hook", "buffer", "forward", "moved"])
@on_ranks(2)
def test_what_other_code_has_done_to_wrappers_is_named(how: str) -> None:
    model = built(Decoder)
    optimizer = adam(model)
    parallelize_model(model, config(activation_checkpointing="wrapped"), optimizer)
    step(model, optimizer, 0)
    first: Any = model.layers[0]
    match how:
        case "hook":
            handle = first.register_forward_hook(lambda *_: None)
        case "buffer":
            first.register_buffer("seen", torch.ones(1))
        case "forward":
            first.forward = functools.partial(first.forward)
        case "moved":
            model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    said = {
        "hook": "other code has set a hook (forward_hooks) on 0 of a ModuleList",
        "buffer": "other code has set seen on 0",
        "forward": "other code has set forward on 0",
        "moved": "other code has replaced, moved or removed 0",
    }
    with fails_alike(ParallelismRuntimeError, said[how]):
        unparallelize_model(model, optimizer)
    match how:
        case "hook":
            handle.remove()
        case "buffer":
            del first.seen
        case "forward":
            del first.forward
        case "moved":
            model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    unparallelize_model(model, optimizer)
    step(model, optimizer, 1)


@pytest.mark.promise(114)
@on_ranks(2)
def test_what_cannot_be_undone_is_refused_and_the_model_stays_prepared() -> None:
    model = built(Decoder)
    optimizer = adam(model)
    with fails_alike(ParallelismValueError, "This Decoder is not prepared"):
        unparallelize_model(model)
    done = parallelize_model(model, config(), optimizer)
    with fails_alike(ParallelismValueError, "AdamW holds 1 parameters that are not this model's"):
        unparallelize_model(model, torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    loss_of(model, token_batch()).backward()
    with no_sync(model):
        loss_of(model, token_batch()).backward()
    with fails_alike(ParallelismRuntimeError, "are not averaged over the ranks yet"):
        unparallelize_model(model, optimizer)
    optimizer.zero_grad()
    ours = model.layers[0].forward
    model.layers[0].forward = lambda *args: ours(*args)
    with fails_alike(ParallelismRuntimeError, "set a forward on top of the prepared one of a DecoderBlock"):
        unparallelize_model(model, optimizer)
    model.layers[0].forward = ours
    step(model, optimizer, 0, done.mesh)
    with pytest.warns(UserWarning, match="AdamW holds .* but was not passed"):
        unparallelize_model(model)
    loss_of(model, token_batch()).backward()
    with fails_alike(ParallelismRuntimeError, "from before unparallelize_model, which the model no"):
        optimizer.step()
