"""The calls of units: what `tests/behavior/test_same_function.py` does not tell apart."""

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import clip_grad_norm, parallelize_model, summon_full_params
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.tensors.nested import Rejoined, everything_in
from tests.kit.compare import alike, close, fails, grads, same_parameters
from tests.kit.grids import crossed
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(104)

STASH: list[Tensor] = []
ONES = torch.ones(4, 4, requires_grad=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x))
        STASH.append((self.linear.weight @ ONES).sum())
        return out


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


@on_ranks(2)
def test_a_loss_that_nobody_can_see_is_an_error_and_no_crash() -> None:
    model = _blocks()
    parallelize_model(model, FSDP2Config())
    STASH.clear()
    model(torch.ones(2, 4))
    with fails(ParallelismRuntimeError, "needs 1.linear.weight, which FSDP2", "Return the loss"):
        sum(STASH).backward()
    with fails(ParallelismRuntimeError, "needs 0.linear.weight, which FSDP2"):
        torch.autograd.grad(STASH[0], ONES)
    with fails(RuntimeError, "modified by an inplace operation"):  # the user's own
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y.add_(1).sum().backward()
    STASH.clear()


def _step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _weight(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[1].linear.weight.mul_(2)


def _local(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[1].linear.weight.to_local().mul_(2)


def _bias(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[1].linear.bias.add_(1)


def _read(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with summon_full_params(model, writeback=False):
        clip_grad_norm(model, 1e9)
    with torch.no_grad():
        model(torch.ones(2, 4))


AGAIN = "has changed since.*before the step, or run forward again"


@pytest.mark.parametrize(
    ("change", "kept", "recomputed", "error"),
    [
        (_step, True, False, f"2.linear.weight as forward found it, but it {AGAIN}"),
        (_step, False, False, f"2.linear.weight as forward found it, but it {AGAIN}"),
        (_step, True, True, f"2.linear.(weight|bias) as forward found it, but it {AGAIN}"),
        (_weight, True, False, f"1.linear.weight as forward found it, but it {AGAIN}"),
        (_local, True, False, f"1.linear.weight as forward found it, but it {AGAIN}"),
        (_bias, True, False, None),  # which backward does not need
        (_bias, False, False, None),
        (_read, True, False, None),
        (_read, True, True, None),
    ],
)
@on_ranks(2)
def test_weights_that_change_between_a_forward_and_its_backward_are_refused_by_name(
    change: Any, kept: bool, recomputed: bool, error: str | None
) -> None:
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=kept)
    ac = {"activation_checkpointing": "composable"} if recomputed else {}
    parallelize_model(
        model, ParallelismConfig(fsdp2=FSDP2Config(reshard_after_forward=kept), **ac), optimizer
    )
    for _ in range(2):  # gradients are accumulated
        (model(torch.ones(2, 4)).sum() / 2).backward()
    loss = model(torch.ones(2, 4)).sum()
    change(model, optimizer)
    with pytest.raises(ParallelismRuntimeError, match=error) if error else nullcontext():
        loss.backward()
    STASH.clear()


class Rooted(nn.Module):
    """The root has a parameter of its own, which FSDP2 keeps gathered after a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * self.gain)


@pytest.mark.parametrize("reshard", [True, False, 2])
@on_ranks(4)
def test_what_stays_gathered_after_a_forward_follows_a_step(reshard: bool | int) -> None:
    torch.manual_seed(0)
    reference = Rooted()
    model = copy.deepcopy(reference)
    config = FSDP2Config(reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rules = [Rule("block", shard=True), Rule("", shard=True)]
    parallelize_model(model, ParallelismConfig(fsdp2=config, rules=rules), optimizer)
    by_one = torch.optim.SGD(reference.parameters(), lr=1.0)
    x = torch.ones(2, 4)
    for one in (reference, model):
        one(x).sum().backward()
    first = model(x).sum()
    optimizer.step()
    by_one.step()
    torch.testing.assert_close(model(x), reference(x))
    with fails(ParallelismRuntimeError, "block.weight as forward found it, but it has changed since"):
        first.backward()


@crossed(
    {"reshard, name": [(True, "gain"), (False, "gain"), (False, "block.weight")], "again": [False, True]}
)
@on_ranks(2)
def test_changes_through_data_of_what_stays_gathered_after_a_forward_are_in_the_next(
    reshard: bool, name: str, again: bool
) -> None:
    torch.manual_seed(0)
    model, x = Rooted(), torch.ones(2, 4)
    reference = copy.deepcopy(model)
    rules = [Rule("block", shard=True), Rule("", shard=True)]
    parallelize_model(model, ParallelismConfig(fsdp2=FSDP2Config(reshard_after_forward=reshard), rules=rules))
    loss = model(x).sum()
    with summon_full_params(model, writeback=False):
        pass
    loss.backward()
    model(x).sum().backward()
    loss = model(x).sum()
    for one in (model, reference):
        one.get_parameter(name).data.mul_(2)
    needed = name == "block.weight" and not again
    with fails(ParallelismRuntimeError, name, "has changed since") if needed else nullcontext():
        model(x) if again else loss.backward()
    torch.testing.assert_close(model(x), reference(x))


@on_ranks(2)
def test_what_a_backward_with_create_graph_leaves_gathered_follows_the_optimizer() -> None:
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parallelize_model(model, FSDP2Config(), optimizer)
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)  # and no second backward
    model(x).sum().backward()
    before = model(x).detach()
    optimizer.step()
    assert not torch.equal(model(x).detach(), before)
    with pytest.raises(RuntimeError, match="norm of a sharded parameter"):
        model[0].linear.weight.norm().item()
    [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x)
    with fails(ParallelismRuntimeError, "create_graph=True, run the model's other forwards before that"):
        gradient.square().sum().backward()


class Parts(nn.Module):
    """The root holds all but the block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(8, 4), Block(), nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.RMSNorm(1), nn.PReLU(), nn.Linear(1, 4))
        self.conv, self.bag = nn.Conv1d(1, 4, 1), nn.EmbeddingBag(8, 4)
        self.hooks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hooks += [len(self.head._forward_pre_hooks), len(self.block.linear._forward_pre_hooks)]
        return self.head(self.block(self.embed(x)))


def _parts() -> tuple[Parts, Parts]:
    torch.manual_seed(0)
    reference = Parts()
    model = copy.deepcopy(reference)
    rules = [Rule("block", shard=True), Rule("", shard=True)]
    parallelize_model(model, ParallelismConfig(rules=rules))
    return reference, model


@on_ranks(2)
def test_a_call_of_a_part_outside_of_its_unit_is_refused_by_name() -> None:
    """torch computes with a tensor of one element, though each rank has another."""
    _, model = _parts()
    rank, one, ids = dist.get_rank(), torch.ones(1) + dist.get_rank(), torch.tensor([[1, 2]])
    calls: list[tuple[str, str, Any]] = [
        ("embed", "the root", lambda: model.embed(ids)),
        ("embed", "the root", lambda: model.embed(torch.tensor([3 * rank]))),
        ("embed", "the root", lambda: model.embed(torch.tensor(3))),
        ("head", "the root", lambda: model.head(torch.ones(2, 4))),
        ("inner.0", "the root", lambda: model.inner(one)),
        ("inner.1", "the root", lambda: model.inner[1](one)),
        ("inner.2", "the root", lambda: model.inner[2](one)),
        ("conv", "the root", lambda: model.conv(one.view(1, 1, 1))),
        ("bag", "the root", lambda: model.bag(ids[:, :1])),
        ("block.linear", "block", lambda: model.block.linear(torch.ones(2, 4))),
    ]
    for again in range(2):
        for name, unit, call in calls:
            with fails(
                ParallelismRuntimeError,
                f"{name} was used while its parameters are sharded",
                f"in calls of {unit} only. Call that, or ",
                f"leave the part whole: Rule('{name}', shard=False).",
            ):
                call()
        with fails(ParallelismRuntimeError, "A copy of a Linear", "inside of summon_full_params"):
            copy.deepcopy(model.head)(torch.ones(2, 4))
        with torch.set_grad_enabled(again > 0):
            model(ids)
    assert model.hooks == [0, 1] * 2  # none while the parameters are gathered
    STASH.clear()


@on_ranks(2)
def test_a_part_computes_while_its_parameters_are_gathered_or_summoned() -> None:
    reference, model = _parts()
    x, ids = torch.randn(2, 4), torch.tensor([[1, 2]])
    for one in (reference, model):
        (one(ids).sum() + one.head(x).square().sum()).backward()
    close(grads(model), grads(reference))
    with summon_full_params(model, writeback=False):
        torch.testing.assert_close(model.head(x), reference.head(x))
    STASH.clear()


@on_ranks(2)
def test_a_part_does_not_compute_with_the_values_from_before_a_step() -> None:
    _, model = _parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[1, 2]])).sum().backward()
    model(torch.tensor([[1, 2]]))  # leaves the root gathered
    optimizer.step()
    with fails(ParallelismRuntimeError, "head was used while its parameters are sharded"):
        model.head(torch.ones(2, 4))
    STASH.clear()


@on_ranks(2)
def test_a_scalar_that_all_ranks_share_weighs_a_sharded_parameter_as_a_whole_one() -> None:
    reference, model = _parts()
    ids, scale = torch.tensor([[1, 2]]), torch.tensor(0.5)
    sharded, whole = model.block.linear.weight, reference.block.linear.weight
    torch.testing.assert_close((sharded * scale).full_tensor(), whole * scale)
    (model(ids).sum() + (scale * sharded.square().sum()).full_tensor()).backward()
    (reference(ids).sum() + scale * whole.square().sum()).backward()
    close(grads(model), grads(reference))
    STASH.clear()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("still", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) * self.still


@on_ranks(4)
@pytest.mark.parametrize(("replicas", "frozen"), [(1, False), (2, False), (1, True)])
def test_running_statistics_are_rank_0s_on_every_rank(replicas: int, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Normed()
    alone = nn.BatchNorm1d(4)
    done = parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas)))
    assert "batch norms: norm; each rank normalizes its own part of the batch" in str(done.plan)
    if frozen:  # in the first forward for training, which tells which buffers change
        model.norm.eval()
        model(torch.randn(8, 4)).sum().backward()
        model.norm.train()
    for step in range(2):
        rows = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(step))
        alone(rows[0])
        model(rows[dist.get_rank()]).sum().backward()
    model.eval()
    with torch.no_grad():
        out = model(rows[0])
    torch.testing.assert_close(model.norm.running_mean, alone.running_mean)
    torch.testing.assert_close(model.norm.running_var, alone.running_var)
    assert int(model.norm.num_batches_tracked) == 2
    everywhere = [torch.empty_like(out) for _ in range(4)]
    dist.all_gather(everywhere, out)
    assert all(torch.equal(one, out) for one in everywhere)


class Doubled(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


class Direct(nn.Module):
    """Calls the forward of a part, which runs neither hooks nor an overridden `__call__`."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Doubled(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part.forward(x))


@on_ranks(2)
def test_a_forward_that_is_called_directly_runs_no_hooks_of_the_user() -> None:
    torch.manual_seed(0)
    model = Direct()
    single = copy.deepcopy(model)
    for one in (model, single):
        one.part.register_forward_hook(lambda module, args, output: output * 3)
    parallelize_model(model, ParallelismConfig(rules=[Rule(["part", ""], shard=True)]))
    for one in (model, single):
        one.part.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    x = torch.randn(2, 8, 4)
    for _ in range(2):
        torch.testing.assert_close(model(x[0]), single(x[0]))
        torch.testing.assert_close(model.part(x[1]), single.part(x[1]))


class ChangesOnce(nn.Module):
    """Changes buffers in its third forward only: in place, through `.data`, by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = 0
        for name in ("added", "data", "other", "by_loop", "still"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 2:
            self.register_buffer("late", x.mean(0))
        if self.forwards == 3:
            self.added += x.mean(0)
            self.data.data.add_(x.mean(0))
            self.other = x.mean(0)
        return self.linear(x + self.added + self.data + self.other + self.by_loop + self.still)


@on_ranks(2)
def test_a_buffer_that_changes_once_and_late_is_rank_0s_from_the_next_forward_on() -> None:
    torch.manual_seed(0)
    model = ChangesOnce()
    parallelize_model(model, ParallelismConfig())
    x = torch.randn(2, 8, 4)
    for step in range(5):
        model(x[dist.get_rank()]).sum().backward()
        if step == 2:
            assert not torch.equal(model.added, x[0].mean(0)) or dist.get_rank() == 0
            if dist.get_rank() == 0:
                model.by_loop.add_(1)
    for buffer in (model.added, model.data, model.other, model.late):
        torch.testing.assert_close(buffer, x[0].mean(0))
    assert model.by_loop.tolist() == [1] * 4
    assert model.still.tolist() == [0] * 4


class GrowsTable(nn.Module):
    """Old code of Llama and GPT-NeoX makes its rotary table anew for a longer sequence."""

    table: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.register_buffer("table", torch.arange(1.0, 1 + len(x)), persistent=False)
        self.counts += 1 + dist.get_rank()
        return self.linear(x * self.table[: len(x), None])


@pytest.mark.parametrize("lengths", [[(6, 4)] * 3, [(4, 4), (6, 4), (7, 5), (7, 7)]])
@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_a_buffer_that_grows_differently_on_each_rank_is_left_to_it(
    lengths: Sequence[tuple[int, int]], replicas: int
) -> None:
    """It was broadcast to a tensor of another size, which ended the process."""
    torch.manual_seed(0)
    model, even = GrowsTable(), dist.get_rank() % 2 == 0
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas)))
    with warnings.catch_warnings(record=True, action="always") as told:
        for pair in lengths:
            model(torch.ones(pair[not even], 4)).sum().backward()
    (warning,) = told
    assert "table: a forward has made this buffer in another shape" in str(warning.message)
    assert len(model.table) == max(pair[not even] for pair in lengths)
    assert model.counts.tolist() == [len(lengths) + dist.get_rank()] * 2  # rank 0's before the last forward


class GivesMemory(nn.Module):
    """Gives out its weight's memory in its third forward, and changes nothing if `factor` is 1."""

    def __init__(self, give: Any, factor: float) -> None:
        super().__init__()
        self.linear, self.forwards = nn.Linear(4, 4), 0
        self.give, self.factor = give, factor

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        given = self.give(self.linear.weight.detach()) if self.forwards == 3 else x
        if self.factor != 1:
            given *= self.factor
        return self.linear(x) + float(given.sum())


@on_ranks(2)
@pytest.mark.promise(104)
@pytest.mark.parametrize("ddp", [False, True])
def test_memory_that_a_forward_gives_out_is_read_and_a_write_into_it_is_refused(ddp: bool) -> None:
    for give in (Tensor.numpy, torch.from_dlpack):
        for factor in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(GivesMemory(give, factor), nn.Linear(4, 4))
            alone = copy.deepcopy(model)
            parallelize_model(model, DDPConfig() if ddp else FSDP2Config())
            if factor == 1:
                close({"out": _third(model)}, {"out": _third(alone)})
                continue
            error: Any = ValueError if give is Tensor.numpy and not ddp else ParallelismRuntimeError
            with pytest.raises(error, match=r"read-only|changed 0\.linear\.weight in place"):
                _third(model)


def _third(model: nn.Module) -> Tensor:
    return [model(torch.ones(2, 4)).detach() for _ in range(3)][-1]


@on_ranks(2)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("tp", [False, True])
def test_a_value_set_through_data_is_refused_and_one_moved_or_copied_is_not(steps: int, tp: bool) -> None:
    """torch's DTensor drops it, so an optimizer that sets `p.data` would train nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut = ParallelismConfig(tp=TPConfig(plan={"1": "colwise_gather"}), mesh=MeshConfig(dp_shard=1, tp=2))
    parallelize_model(model, cut if tp else FSDP2Config(), optimizer)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model[1].weight.data.copy_(model[1].weight.data * 2)
    model.to("cpu").double().float()
    if steps:
        model(torch.ones(2, 4)).sum().backward()
    before = model[1].weight.full_tensor()
    said = ("new value set through .data of a sharded tensor", "data.copy_", "in summon_full_params(model)")
    with fails(ParallelismRuntimeError, *said):
        model[1].weight.data = model[1].weight.data * 2
    with fails(ParallelismRuntimeError, "cannot share its memory", "on a copy that is not prepared"):
        model.share_memory()  # the process crashed
    assert torch.equal(model[1].weight.full_tensor(), before)


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Adapted(Block):
    """Replaces its weight for the time of a forward, as peft does for `target_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.linear, "weight", Scaled(self.gain))
        with parametrize.cached():
            out = super().forward(x)
        parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)
        return out


@on_ranks(2)
@pytest.mark.parametrize("config", [FSDP2Config(), DDPConfig()])
def test_a_weight_that_is_parametrized_in_a_forward_alone_trains_as_on_one_process(config: Any) -> None:
    """torch sets it to itself, which autograd counts as a change in place."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted(), nn.Linear(4, 1))
    alone = copy.deepcopy(model)
    parallelize_model(model, config)
    for _ in range(2):
        x = torch.randn(2, 4)
        for one in (model, alone):
            one(x).square().mean().backward()
    same_parameters(model, alone, gradients=True)


class NormedBlock(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


@on_ranks(2)
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_batch_norm_in_low_precision_is_that_of_autocast(recomputed: bool) -> None:
    """torch's kernel for CPUs refuses gathered parameters in bfloat16 beside statistics in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(NormedBlock(), NormedBlock(), nn.Linear(4, 4))
    alone = copy.deepcopy(model)
    config = ParallelismConfig(activation_checkpointing=recomputed)
    plan = parallelize_model(model, config, precision="amp_bf16").plan
    assert "batch norms: 0.norm, 1.norm; each rank normalizes its own part of the batch" in str(plan)
    assert "the running statistics follow rank 0's" in plan.explain("0.norm")
    x = torch.randn(8, 4)
    for one in (model, alone):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        out.float().square().mean().backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=0.02, atol=1e-3)
    torch.testing.assert_close(dict(model.named_buffers()), dict(alone.named_buffers()), rtol=1e-3, atol=1e-3)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> Tensor:
        mean += x.detach().mean()
        kept["sum"] += x.detach().sum()
        return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "amp_bf16"])
def test_what_is_written_into_a_tensor_that_fsdp2_casts_arrives(precision: str | None) -> None:
    model = Writer()
    parallelize_model(model, FSDP2Config(), precision=precision)
    mean, kept = torch.zeros(()), {"sum": torch.zeros(())}
    for step in range(2):
        model(torch.full((2, 4), 1.0 + step), mean, kept)
    assert (float(mean), float(kept["sum"]), mean.dtype) == (3.0, 24.0, torch.float32)


class Late(nn.Module):
    """Changes a parameter from a later forward on, past autograd."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.forwards = nn.Linear(4, 4), 1 - first
        self.code = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.forwards >= 0:
            self.code.data.add_(1)
        self.forwards += 1
        return self.linear(x) * self.code


FSDP2 = ParallelismConfig(fsdp2=FSDP2Config())
HSDP = ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2))
WITH_TP = ParallelismConfig(tp=TPConfig(plan={"linear": "colwise_gather"}), mesh=MeshConfig(dp_shard=2, tp=2))


@on_ranks(4)
@pytest.mark.parametrize(
    ("config", "mode", "first"),
    [
        (FSDP2, "train", 2),
        (FSDP2, "train", 3),
        (FSDP2, "no_grad", 5),
        (FSDP2, "inference_mode", 3),
        (HSDP, "amp_bf16", 3),
        (HSDP, "eval", 5),
        (WITH_TP, "train", 3),
        (WITH_TP, "inference_mode", 3),
        (ParallelismConfig(ddp=DDPConfig()), "train", 3),
        (ParallelismConfig(ddp=DDPConfig()), "amp_bf16", 5),
    ],
)
def test_a_forward_that_changes_parameters_later_is_refused(config: Any, mode: str, first: int) -> None:
    model = Late(first)
    parallelize_model(model, config, precision="amp_bf16" if mode == "amp_bf16" else None)
    model.train(mode != "eval")
    with getattr(torch, mode)() if "mode" in mode or "grad" in mode else nullcontext():
        for _ in range(first - 1):
            model(torch.ones(2, 4))
        with fails(ParallelismRuntimeError, "changed code in place"):
            model(torch.ones(2, 4))


class Later(nn.Module):
    """A block that keeps a loss from its third call on, in an attribute or in a list of a part of it."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.linear, self.part, self.inside, self.calls = nn.Linear(4, 4), nn.Identity(), inside, 0
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            loss = (self.linear.weight @ torch.ones(4, 4)).square().sum()
            (self.part if self.inside else self).aux = [loss] if self.inside else loss
        return torch.tanh(self.part(self.linear(x)))

    def loss(self) -> Any:
        return 0 if self.calls < 3 else self.part.aux[0] if self.inside else self.aux  # type: ignore[index]


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(2)
def test_what_modules_hold_is_found_in_the_call_that_puts_it_there(inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Later(inside), Later(inside))
    whole = copy.deepcopy(model)
    parallelize_model(model, ParallelismConfig(sync="rank0"))
    for _ in range(3):
        for one in (model, whole):
            one.zero_grad()
            out = one(torch.ones(2, 4)).sum()
            (out + sum(block.loss() for block in one)).backward()
    close(grads(model), grads(whole))
    model[1].part.add_module("new", nn.Linear(4, 4))
    with fails(ParallelismRuntimeError, "of a Linear in 1 was put into the model after"):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_a_call_is_looked_at_while_the_caller_handles_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Later(False), Later(False))
    whole = copy.deepcopy(model)
    parallelize_model(model, ParallelismConfig(sync="rank0"))
    for one in (model, whole):
        for _ in range(2):
            one(torch.ones(2, 4)).sum().backward()
        one.zero_grad()
        try:
            raise MemoryError("of a larger batch")
        except MemoryError:
            one(torch.ones(2, 4))
            sum(block.loss() for block in one).backward()
    close(grads(model), grads(whole))


@on_ranks(2)
@pytest.mark.parametrize("passed", [True, False])
def test_a_step_with_gradients_that_ddp_has_not_averaged_is_refused(passed: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parallelize_model(model, ParallelismConfig(ddp=DDPConfig()), optimizer if passed else None)
    if not passed:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    with fails(ParallelismRuntimeError, "not averaged over the ranks", "unused.weight, unused.bias"):
        optimizer.step()
    assert alike(model)


@dataclass
class Pair:
    first: Any
    second: Any


@dataclass
class Counted:
    """Torch cannot make another one with `dataclasses.replace`, and should not."""

    value: Any
    total: Any = field(init=False)
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Counted.made += 1


class Named(list[Any]):
    def __init__(self, name: str, value: Any) -> None:
        super().__init__([value])
        self.name = name


class Odd(nn.Module):
    """Reads and fills containers whose classes cannot be called with their contents."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, kept: defaultdict[str, Any], counted: Counted, named: Named) -> Any:
        value = torch.tanh(self.linear(kept["x"] + counted.value + named[0]))
        kept["x"], counted.value, named[0] = value, value * 2, value * 3
        counted.total = value.square().mean()
        kept["losses"] = kept["losses"] + counted.total  # the first one is not there yet
        return {"kept": kept, "counted": counted, "named": named}


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Odd() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept, counted, named = defaultdict(float, x=x), Counted(x), Named("n", x)
        for layer in self.layers:
            found = layer(kept, counted, named)
            assert found["kept"] is kept
            assert found["counted"] is counted
            assert found["named"] is named
        return kept["losses"] + counted.total + (kept["x"] + named[0]).mean()


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "amp_bf16"])
def test_containers_that_torch_cannot_copy_are_the_callers_own(precision: str | None) -> None:
    torch.manual_seed(0)
    model, x = Odds(), torch.randn(2, 4)
    reference = copy.deepcopy(model)
    parallelize_model(model, FSDP2Config(), precision=precision)
    made = Counted.made
    loss = model(x)
    assert Counted.made == made + 1
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        expected = reference(x)
    expected.backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision is None else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(loss.float(), expected.float(), **tolerance)
    close(grads(model), grads(reference), **tolerance)


def test_the_callers_containers_get_the_tensors_and_lose_them_again() -> None:
    def doubled(data: Any) -> Any:
        if isinstance(data, Tensor):
            return data * 2
        if isinstance(data, Pair):
            return Pair(doubled(data.first), doubled(data.second))
        if isinstance(data, dict):
            return type(data)((key, doubled(value)) for key, value in data.items())
        return type(data)(map(doubled, data))

    tensors = [torch.tensor(float(i)) for i in range(6)]
    own = [
        Pair(tensors[0], [tensors[1]]),
        OrderedDict(a={"b": tensors[2]}),
        (tensors[3], [tensors[4]]),
        {tensors[5]},
    ]
    rejoined = Rejoined()
    found = rejoined.rejoin(own, doubled(own))
    assert found is own
    assert sorted(map(float, everything_in(found))) == [0, 2, 4, 6, 8, 10]
    written = torch.tensor(7.0)
    own[0].second.append(written)
    own[1]["a"]["c"] = written
    own[3].add(written)
    inner = found[2][1]
    rejoined.undo()
    assert own[0].first is tensors[0]
    assert own[0].second == [tensors[1], written]
    assert own[1] == {"a": {"b": tensors[2], "c": written}}
    assert inner == [tensors[4]]
    assert own[3] == {tensors[5], written}
