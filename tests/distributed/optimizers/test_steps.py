"""Steps and writes that torch loses in silence, and evaluations before training."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from composer_dist._torch import TorchDispatchMode, step_on_parts
from composer_dist.checkpoint import load_full_optimizer_state
from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import no_sync, parallelize_model
from composer_dist.distributed.before_steps import Check, before_every_step
from composer_dist.distributed.former import former_parameters
from composer_dist.distributed.training.gradients import accumulate
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import close, fails, full, same, weights
from tests.kit.grids import crossed
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@on_ranks(2)
def test_a_step_with_parameters_from_before_or_without_gradients_is_refused() -> None:
    model = _net()
    old = list(model.parameters())
    optimizer = torch.optim.SGD(old[:2], 0.1)
    parallelize_model(model, FSDP2Config(), optimizer)
    model(torch.ones(2, 4)).sum().backward()
    for late in (old[2:], [*model.parameters(), old[0]]):
        with fails(ParallelismRuntimeError, "SGD holds", "from before the preparation, which the model no"):
            torch.optim.SGD(late, 0.1).step()
    optimizer.step()
    optimizer.zero_grad()
    with no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    with fails(ParallelismRuntimeError, "without the gradients of 0.weight, 0.bias: they are not reduced"):
        optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_a_step_with_the_state_of_a_whole_model_is_refused() -> None:
    model, whole = _net(), _net()
    optimizer, other = (torch.optim.AdamW(one.parameters()) for one in (model, whole))
    parallelize_model(model, FSDP2Config(), optimizer)
    for one, step in ((whole, other.step), (model, lambda: None)):
        one(torch.ones(2, 4)).sum().backward()
        step()
    before = weights(model)
    optimizer.load_state_dict(other.state_dict())
    with fails(ParallelismRuntimeError, "exp_avg of the state of AdamW is a whole tensor", "load_full_optim"):
        optimizer.step()
    same(weights(model), before)
    load_full_optimizer_state(model, optimizer, other.state_dict())
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch's own, when it is imported
@on_ranks(2)
@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_a_step_may_be_compiled(mode: str) -> None:
    found = []
    for compiled in (False, True):
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        parallelize_model(model, mode, optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            step()
            optimizer.zero_grad()
        found.append(weights(model))
    close(*found, rtol=1e-3, atol=1e-5)  # compiled, AdamW computes the corrections of its bias in tensors


@on_ranks(2)
def test_former_parameters_are_forgotten_once_nothing_holds_them() -> None:
    model = _net()
    kept = model[1].weight
    parallelize_model(model, FSDP2Config())
    gc.collect()
    assert dict(former_parameters()) == {"1.weight": kept}
    with fails(ParallelismRuntimeError, "SGD holds 1.weight from before the preparation"):
        torch.optim.SGD([kept], 0.1).step()


@on_ranks(2)
@pytest.mark.parametrize("ddp", [True, False])
def test_a_closure_that_averages_what_has_accumulated_is_checked_after_it_has_run(ddp: bool) -> None:
    """Lightning, and LBFGS, compute gradients in the step."""
    model, reference = _net(), _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize_model(model, DDPConfig() if ddp else FSDP2Config(), optimizer)
    other = torch.optim.SGD(reference.parameters(), 0.1)

    def closure(synchronized: bool = True) -> float:
        with no_sync(model, enabled=not synchronized):
            model(torch.ones(2, 4)).sum().backward()
        return 7.0

    closure(synchronized=False)
    assert optimizer.step(closure) == 7.0
    for _ in range(2):
        reference(torch.ones(2, 4)).sum().backward()
    other.step()
    close(weights(model), weights(reference))
    with fails(ParallelismRuntimeError, "0.weight"):
        optimizer.step(closure=lambda: closure(synchronized=False))


@on_ranks(2)
@pytest.mark.parametrize("ddp", [True, False])
def test_a_step_with_a_local_gradient_of_a_whole_parameter_is_refused_and_with_a_zero_one_is_not(
    ddp: bool,
) -> None:
    """Under FSDP2 the ranks' copies parted; under DDP zeros were refused too."""
    model = _net()
    whole = ParallelismConfig(rules=[Rule("0", shard=True), Rule("1", shard=False)])
    parallelize_model(model, DDPConfig() if ddp else whole)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    for zeroed in (False, True):
        with no_sync(model):
            model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
        if zeroed:
            before = weights(model)
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            close(weights(model), before)
        else:
            with fails(ParallelismRuntimeError, "gradients of 1.weight, 1.bias that are not averaged"):
                optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_a_whole_parameter_that_is_thawed_after_the_preparation_is_averaged() -> None:
    model, alone = _net(), _net()
    for one in (model, alone):
        one[1].requires_grad_(False)
    parallelize_model(model, ParallelismConfig(rules=[Rule("0", shard=True), Rule("1", shard=False)]))
    for one in (model, alone):
        one[1].requires_grad_(True)
    x = torch.arange(8.0).view(2, 4)
    model(x[dist.get_rank() :][:1]).square().mean().backward()
    alone(x).square().mean().backward()
    torch.testing.assert_close(model[1].weight.grad, alone[1].weight.grad)
    with no_sync(model):
        model(x).sum().backward()
    with fails(ParallelismRuntimeError, "gradients of 1.weight, 1.bias that are not averaged"):
        torch.optim.SGD(model[1].parameters(), 0.1).step()


class OfDTensors(TorchDispatchMode):
    """Notes the operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        self.seen += [str(func)] if any(isinstance(one, DTensor) for one in given) else []
        return func(*args, **(kwargs or {}))


STATEFUL: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": torch.optim.ASGD,
}


@on_ranks(2)
@crossed({"foreach": [False, True], "name": STATEFUL})
def test_torch_s_optimizers_compute_with_the_parts_of_cut_and_whole_parameters(
    name: str, foreach: bool
) -> None:
    step_on_parts()
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.arange(6.0).view(3, 2), torch.ones(2), torch.ones(4, 2)]
    cut = [distribute_tensor(one, mesh, [Shard(0)]) for one in values[:2]]
    mine = [nn.Parameter(one) for one in (*cut, values[2].clone())]
    whole = [nn.Parameter(one.clone()) for one in values]
    ours, theirs = (STATEFUL[name](held, foreach=foreach) for held in (mine, whole))
    for step in range(3):
        for one, other in zip(mine, whole, strict=True):
            other.grad = (other.detach() + step).cos()
            same = isinstance(one, DTensor)
            one.grad = distribute_tensor(other.grad, mesh, [Shard(0)]) if same else other.grad.clone()
        before = [one._version for one in mine[:2]]
        with OfDTensors() as operations:
            ours.step()
        theirs.step()
        assert operations.seen == [] or step == 0
        assert all(one._version > version for one, version in zip(mine, before, strict=False))
        for one, other in zip(mine, whole, strict=True):
            held = {"": one} | {k: v for k, v in ours.state[one].items() if v.shape == one.shape}
            assert len(held) > 1
            for key, value in held.items():
                assert isinstance(value, DTensor) is isinstance(one, DTensor)
                assert torch.equal(full(value), theirs.state[other][key] if key else other)
    mine[0].grad = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])  # as DTensor does it
    whole[0].grad = torch.ones(3, 2)
    with OfDTensors() as operations:
        torch.optim.Adam(mine[:1]).step()
    torch.optim.Adam(whole[:1]).step()
    assert any("addcdiv" in one for one in operations.seen)
    assert torch.equal(full(mine[0]), whole[0])


@pytest.mark.promise(25)
@on_ranks(4)
def test_muon_orthogonalizes_whole_matrices() -> None:
    """The sums of products of parts, in bfloat16, gave updates that differed by some percent."""
    step_on_parts()
    generator = torch.Generator().manual_seed(0)
    meshes = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    for shape, mesh, placed in (
        ((64, 24), meshes[0], [Replicate(), Shard(0)]),
        ((24, 64), meshes[0], [Shard(0), Shard(1)]),
        ((6, 64), meshes[1], [Shard(0)]),  # nothing on the last rank
    ):
        weight, gradient = torch.randn(2, *shape, generator=generator)
        whole, mine = nn.Parameter(weight.clone()), nn.Parameter(distribute_tensor(weight, mesh, placed))
        for one in (whole, mine):
            optimizer = torch.optim.Muon([one], 0.1)
            for _ in range(2):
                is_cut = isinstance(one, DTensor)
                one.grad = distribute_tensor(gradient, mesh, placed) if is_cut else gradient.clone()
                optimizer.step()
        assert torch.equal(full(mine), whole)


def test_what_to_check_is_decided_once_for_an_optimizer_and_again_for_other_parameters() -> None:
    class Owner:
        pass

    owner, decided, checked = Owner(), [], []
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    def choose(owner: Owner, optimizer: torch.optim.Optimizer) -> Check[Owner] | None:
        decided.append(len(optimizer.param_groups[-1]["params"]))
        return lambda owner, optimizer: checked.append(optimizer)

    before_every_step(owner, choose)
    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    optimizer.step()
    optimizer.step()
    assert decided == [2]
    optimizer.add_param_group({"params": [second.weight]})
    optimizer.step()
    first.bias.requires_grad_(False)
    optimizer.step()
    optimizer.param_groups[1]["params"][:] = [second.bias]
    optimizer.step()
    assert decided == [2, 1, 1, 1]
    del owner
    optimizer.step()
    assert checked == [optimizer] * 5


class _Scaled(torch.optim.SGD):
    def step(self, loss_fn: Callable[..., float], scale: float = 1.0) -> float:  # type: ignore[override]
        loss = loss_fn(scale=scale)
        super().step()
        return loss


def test_a_step_passes_all_of_its_arguments_and_its_closure_s_whatever_their_names_are() -> None:
    """The closure became an argument called closure, and what followed it was lost."""

    class Owner:
        pass

    owner, checked = Owner(), []
    before_every_step(owner, lambda owner, optimizer: lambda owner, optimizer: checked.append(optimizer))
    weight = nn.Parameter(torch.ones(1))
    scaled, plain = _Scaled([weight], 0.1), torch.optim.SGD([weight], 0.1)

    def closure(scale: float = 2.0) -> float:
        weight.grad = torch.tensor([scale])
        return scale

    assert scaled.step(closure, 3.0) == 3.0
    torch.testing.assert_close(weight.data, torch.tensor([0.7]))
    assert plain.step(closure=closure) == 2.0
    torch.testing.assert_close(weight.data, torch.tensor([0.5]))
    assert checked == [scaled, scaled, plain]  # the inherited step is a step too


@on_ranks(2)
def test_a_model_may_be_collected_while_an_optimizer_steps() -> None:
    """Its hook was removed then, and torch's loop over them raised that the dictionary had changed."""
    kept, dropped = _net(), [_net()]

    def collect(*args: Any) -> None:
        dropped.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    for model in (kept, *dropped):
        parallelize_model(model, FSDP2Config())
    del model
    torch.optim.SGD(kept.parameters(), 0.1).step()
    hook.remove()


@on_ranks(4)
@pytest.mark.parametrize(
    ("replicas", "how"), [(1, "optimizer"), (1, "module"), (1, "hand"), (2, "optimizer"), (2, "half")]
)
def test_zero_grad_drops_what_no_sync_has_left(replicas: int, how: str) -> None:
    """It leaked into the next step, because FSDP2 does not keep it in `.grad`."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas)), optimizer)
    with accumulate(model, last=False, how="sharded" if replicas > 1 else "unsharded"):
        model(torch.ones(2, 4) * 9).sum().backward()
    if how == "half":
        with fails(ParallelismRuntimeError, "those of 0.bias are in one sum", "model.zero_grad()"):
            torch.optim.SGD([model[0].weight], 0.1).zero_grad()
    for parameter in model.parameters() if how == "hand" else ():
        parameter.grad = None
    for one in {"module": model, "hand": ()}.get(how, [optimizer]):
        one.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    alone = _net()
    alone(torch.ones(2, 4)).sum().backward()
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)  # type: ignore[union-attr]


@on_ranks(2)
def test_writes_into_a_gathered_part_and_equal_random_parts_are_refused() -> None:
    model = _net()
    parallelize_model(model, FSDP2Config())
    model(torch.ones(2, 4)).sum().backward()
    weight = model[0].weight
    for tensor in (weight.data, weight.grad):
        tensor[:, 0].zero_()
        assert float(tensor.full_tensor()[:, 0].norm()) == 0  # type: ignore[union-attr]
        for part in (tensor[0], tensor[1:3], tensor.view(-1)[:2], tensor.t()[:, 0], tensor.chunk(2)[0]):
            with fails(
                ParallelismRuntimeError, "part of a sharded tensor", "would be lost", "summon_full_params"
            ):
                part.mul_(0)
    with torch.no_grad(), fails(ParallelismRuntimeError, "part of a sharded tensor"):
        weight[0] = 0
    with torch.no_grad(), fails(ParallelismRuntimeError, "part of a sharded tensor"):
        torch._foreach_mul_([weight.data[:2]], 0)
    with fails(ParallelismRuntimeError, "part of a sharded tensor"):
        weight.data[0].normal_()
    for write in (
        nn.init.normal_,
        nn.init.trunc_normal_,
        nn.init.orthogonal_,
        nn.init.eye_,
        torch.randn_like,
    ):
        with fails(ParallelismRuntimeError, "same numbers into the part of every rank", "before the prep"):
            write(weight)
    nn.init.constant_(weight, 0.5)
    with fails(
        ParallelismRuntimeError, "distributed's allreduce cannot use sharded", "PostLocalSGDOptimizer"
    ):
        dist.all_reduce(weight.data)
    with fails(ParallelismRuntimeError, "Call full_tensor() on a penalty"):
        (model(torch.ones(2, 4)).sum() + weight.square().sum()).backward()


@on_ranks(2)
def test_torch_s_grad_scaler_skips_a_step_on_all_ranks_with_whole_and_cut_gradients() -> None:
    """It refused whole gradients beside cut ones, and asked the ranks of one mesh only."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tp = TPConfig(plan={"0": "colwise_gather"})
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_shard=1, tp=2), tp=tp), optimizer)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), weights(model)
    for infinite in (True, False):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if infinite and dist.get_rank() == 1:
            model[0].weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2
        if infinite:
            close(weights(model), before)
    alone = _net()
    alone(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    close(weights(model), weights(alone))


class Returns(nn.Linear):
    """Returns or keeps its weight, in some way."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        if self.way == "keeps":
            self.kept = [self.weight.detach()]
        elif self.way == "registers":
            self.kept = self.weight
        elif self.way == "in place":
            x = x.tanh_()
        out = super().forward(x)
        return out if self.way != "returns" else (out, self.weight.t())


@on_ranks(2)
@pytest.mark.parametrize("way", ["returns", "keeps", "registers", "in place", "root"])
def test_a_weight_that_leaves_its_forward_is_refused_and_a_changed_argument_is_not(way: str) -> None:
    """Reading it, when FSDP2 has freed it, ended the process."""
    torch.manual_seed(0)
    model: nn.Module = Returns("returns") if way == "root" else nn.Sequential(Returns(way), Returns(way))
    parallelize_model(model, FSDP2Config())
    if way == "in place":
        model(torch.ones(2, 4).mul(1)).sum().backward()
        return
    name = "root returns or keeps weight" if way == "root" else "0 returns or keeps 0.weight"
    with torch.set_grad_enabled(way != "root"), fails(ParallelismRuntimeError, name, "parameter.clone()"):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_a_recurrent_root_is_evaluated() -> None:
    """`nn.LSTM` lists its own weights, which was taken for weights that leave their forward."""
    model, alone = (built(lambda: nn.LSTM(4, 4)) for _ in range(2))
    parallelize_model(model, FSDP2Config())
    with torch.no_grad():
        for x in (torch.ones(2, 4), torch.zeros(2, 4)):
            assert torch.allclose(model(x)[0], alone(x)[0])


@on_ranks(2)
@pytest.mark.parametrize("ddp", [True, False])
def test_parameters_beside_the_model_need_gradients_that_are_alike_on_all_ranks(ddp: bool) -> None:
    """Such as those of a loss: each rank stepped with its own gradient, and trained another loss."""
    model, temperature = _net(), nn.Parameter(torch.ones(()))
    parallelize_model(model, DDPConfig() if ddp else FSDP2Config())
    (model(torch.ones(2, 4) * dist.get_rank()) * temperature).sum().backward()
    with fails(ParallelismRuntimeError, "holds 1 parameters of no prepared model", "of shape (). Their"):
        torch.optim.SGD([*model.parameters(), temperature], 0.1).step()
    before = float(temperature.detach())
    torch.optim.SGD([temperature], 0.1).step()
    dist.all_reduce(temperature.grad)
    torch.optim.SGD([*model.parameters(), temperature], 0.1).step()
    assert float(temperature.detach()) != before


@on_ranks(2)
def test_replicas_train_on_after_their_dtype_has_changed() -> None:
    """DDP waited for nodes of autograd that the parameters no longer had, and a step was not averaged."""
    model, alone = _net(), _net()
    parallelize_model(model, DDPConfig())
    x = torch.arange(8.0).view(2, 4) / 8
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, alone)]
    for _ in range(2):
        for one, part in ((model, x[dist.get_rank() :][:1]), (alone, x)):
            one.zero_grad()
            one(part.to(one[0].weight.dtype)).square().mean().backward()
        for one, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.step()
            one.double()
    close(weights(model), weights(alone))


@on_ranks(2)
def test_buffers_that_are_changed_after_a_forward_follow_rank_0() -> None:
    model = _net()
    model.register_buffer("center", torch.zeros(4))
    parallelize_model(model, FSDP2Config())
    for step in (1, 2):
        model(torch.ones(2, 4))
        model.center.fill_(step + dist.get_rank())  # type: ignore[operator]
    model(torch.ones(2, 4))
    assert model.center.tolist() == [2] * 4  # type: ignore[operator]


@on_ranks(2)
def test_parameters_in_lists_or_of_two_models_are_refused() -> None:
    """They would keep their old values, and would no longer be shared."""
    listed, first, second = _net(), _net(), _net()
    listed[0].kept = (listed[1].bias,)  # type: ignore[assignment]
    with fails(ParallelismValueError, "1.bias is also held inside of 0.kept, where it would keep its old"):
        parallelize_model(listed, FSDP2Config())
    second[1].weight = first[0].weight
    parallelize_model(first, FSDP2Config())
    with fails(ParallelismValueError, "1.weight was also 0.weight of a model that is prepared"):
        parallelize_model(second, FSDP2Config())


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "amp_bf16"])
def test_an_evaluation_in_inference_mode_may_come_before_training(precision: str | None) -> None:
    """What FSDP2 gathered there first could not be trained: "Inplace update to inference tensor"."""
    alone, model = _net(), _net()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (alone, model)]
    parallelize_model(model, FSDP2Config(), optimizers[1], precision)
    for one, optimizer in zip((alone, model), optimizers, strict=True):
        with torch.inference_mode():
            one(torch.ones(2, 4))
        one(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    close(weights(model), weights(alone), rtol=0.02, atol=0.02)
