"""The optimizer follows its parameters: groups, hyperparameters, state and pending gradients.

Longer than other files: all optimizers go through the same few helpers.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composer_dist.checkpoint import full_optimizer_state, load_full_optimizer_state, save_checkpoint
from composer_dist.config.rule import Rule
from composer_dist.distributed import parallelize_model, plan_parallelism
from composer_dist.distributed.optimizers.check import check_optimizers, forgotten_optimizers
from composer_dist.errors import CheckpointValueError, ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit.compare import close, fails, fails_alike, full_each, same, values
from tests.kit.grids import crossed, in_the_default_run, slow
from tests.kit.meshes import config, ddp
from tests.kit.toy import Toy, built, tokens, train, trainable
from tests.kit.world import on_ranks

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "Adam-foreach-off": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.25),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], 0.01),
}

REFUSED: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def start(name: str = "AdamW", device: str = "cpu") -> tuple[Any, Optimizer]:
    model = built(device=device)
    return model, (OPTIMIZERS | REFUSED)[name](trainable(model))


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    return full_each(
        {
            f"{names[p]}/{key}": torch.as_tensor(value)
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }
    )


def refused(model: nn.Module, optimizer: Any, *texts: str, **options: Any) -> None:
    """Every rank refuses with the same message, and leaves the model as it was."""
    before = [id(p) for p in model.parameters()]
    with fails_alike(ParallelismValueError, *texts):
        parallelize_model(model, config(**options), optimizer)
    assert [id(p) for p in model.parameters()] == before
    assert type(model) is Toy


@pytest.mark.promise(25)
@pytest.mark.parametrize(
    ("name", "before"),
    in_the_default_run(
        *((name, 1) for name in OPTIMIZERS if name != "SGD-momentum"),
        *((name, 0) for name in ("SGD-momentum", "AdamW", "ASGD")),
        among=itertools.product(OPTIMIZERS, (0, 1)),
    ),
)
@on_ranks(2)
def test_every_optimizer_goes_on_as_if_nothing_had_been_sharded(name: str, before: int) -> None:
    (model, optimizer), (single, other) = start(name), start(name)
    train(model, optimizer, before, whole=True)
    train(single, other, before + 3, whole=True)
    old = {id(p) for p in trainable(model)}
    parallelize_model(model, config(), optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held.isdisjoint(old - {id(model.scale)})
    assert held <= {id(p) for p in model.parameters()}
    train(model, optimizer, 3, first=before)
    assert type(model.row.data) is DTensor
    assert type(model.scale) is nn.Parameter
    # Muon orthogonalizes in bfloat16, where another order of sums is another result.
    atol = 1e-3 if name == "Muon" else 1e-6
    close(values(model), values(single), atol=atol)
    close(state_of(model, optimizer), state_of(single, other), rtol=1e-4, atol=atol)


def test_every_optimizer_of_torch_is_either_followed_or_refused() -> None:
    public = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    assert public == {name.split("-")[0] for name in OPTIMIZERS} | set(REFUSED)


@pytest.mark.promise(25)
@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_optimizers_that_cannot_step_on_shards_are_refused_by_name(name: str) -> None:
    text = f"{name} cannot step on sharded parameters (embed.weight, layers.0.up.weight"
    refused(*start(name), text)


@pytest.mark.promise(25, 104)
@on_ranks(2)
def test_fused_kernels_that_dtensor_lacks_are_refused_by_name() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        model = built()
        text = f"{kind.__name__} group 0 has fused=True, for which DTensor (torch 2.13) has no operation"
        refused(model, kind(trainable(model), 0.1, fused=True), text, "embed.weight")
    model, single = built(), built()
    for each, other in ((model, "sharded"), (single, "whole")):
        optimizer = torch.optim.Adam([p for p in trainable(each) if p.ndim], 0.1, fused=True)
        if other == "sharded":
            parallelize_model(each, config(), optimizer)
        train(each, optimizer, 2, whole=other == "whole")
    close(values(model), values(single))


@pytest.mark.promise(104)
@on_ranks(2)
def test_optimizers_made_afterwards_are_checked_at_their_first_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch uses its own deprecated torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model, copies = built(), built()
    parallelize_model(model, config())
    parallelize_model(copies, "ddp")
    cases: list[tuple[Any, Callable[[Any], Optimizer], str]] = [
        (
            model,
            lambda p: torch.optim.SGD(p, 0.1, fused=True),
            "SGD group 0 has fused=True, for which DTensor",
        ),
        (model, lambda p: torch.optim.Adam(p, foreach=True), "Adam group 0 has foreach=True but would mix"),
        (
            model,
            lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam),
            "cannot step on sharded parameters (emb",
        ),
        (
            model,
            torch.optim.LBFGS,
            "LBFGS cannot step on sharded parameters (embed.weight, layers.0.up.weight",
        ),
        (
            copies,
            torch.optim.LBFGS,
            "LBFGS takes its number of iterations from the loss of the rank's own batch",
        ),
    ]
    for each, make, text in cases:
        before, optimizer = values(each), make(trainable(each))
        for _ in range(2):
            with fails_alike(ParallelismValueError, text):
                train(each, optimizer, 1)
        same(values(each), before)


@on_ranks(2)
def test_sparse_adam_is_refused_for_whole_embeddings_too_where_gradients_are_averaged() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    optimizer = torch.optim.SparseAdam(model[0].parameters())
    with fails_alike(ParallelismValueError, "SparseAdam cannot step on replicated parameters (0.weight)"):
        parallelize_model(model, config(rules=[Rule("0", shard=False)]), optimizer)


def test_lbfgs_is_refused_where_ranks_would_stop_at_different_iterations() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    assert plan_parallelism(model, "ddp", world_size=1, optimizer=optimizer)
    with fails(ParallelismValueError, "LBFGS takes its number of iterations from the loss of the rank's own"):
        plan_parallelism(model, "ddp", world_size=2, optimizer=optimizer)


class Wrapper(Optimizer):
    """Steps an inner optimizer, as Lookahead does."""

    def __init__(self, inner: Optimizer, shared: bool) -> None:
        self.inner = [inner]
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {"lr": 0.1})
        if shared:
            self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner[0].step(closure)


@pytest.mark.promise(48, 104)
@on_ranks(2)
def test_optimizers_around_others_are_followed_if_they_share_groups_and_refused_otherwise() -> None:
    model, inner = start("SGD-momentum")
    text = (
        "Wrapper holds SGD with groups of its own, which cannot follow the sharded parameters (embed.weight"
    )
    refused(model, Wrapper(inner, shared=False), text)
    model, inner = start("SGD-momentum")
    plain, other = start("SGD-momentum")
    parallelize_model(model, "fsdp", optimizer=(wrapper := Wrapper(inner, shared=True)))
    train(plain, other, whole=True)
    train(model, wrapper)
    close(values(model), values(plain))
    saved = full_optimizer_state(model, wrapper)
    assert dist.get_rank() or len(saved["state"]) == len(inner.state) > 0
    with fails_alike(CheckpointValueError, "Wrapper keeps state in an inner SGD"):
        full_optimizer_state(model, Wrapper(inner, shared=False))
    with fails_alike(CheckpointValueError, "Wrapper keeps state in an inner SGD"):
        load_full_optimizer_state(model, Wrapper(inner, shared=False), saved)


@pytest.mark.promise(48, 104)
@on_ranks(2)
def test_a_wrapper_may_be_passed_with_the_optimizer_whose_groups_it_shares() -> None:
    """The groups had the new parameters already when the second one's turn came: a KeyError."""
    model, inner = start("SGD-momentum")
    plain, other = start("SGD-momentum")
    wrapper = Wrapper(inner, shared=True)
    parallelize_model(model, "fsdp", optimizer=[wrapper, inner])
    held = [p for group in inner.param_groups for p in group["params"]]
    assert {id(p) for p in held} <= {id(p) for p in model.parameters()}
    train(plain, other, whole=True)
    train(model, wrapper)
    close(values(model), values(plain))


@pytest.mark.promise(48, 104)
@on_ranks(2)
def test_torch_s_distributed_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch uses its own deprecated torch.jit
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    model = built()
    zero = ZeroRedundancyOptimizer(trainable(model), torch.optim.Adam, lr=0.1)
    refused(model, zero, "ZeroRedundancyOptimizer cannot step on sharded parameters (embed.weight")
    refused(
        model, zero, "divides the optimizer's state between ranks, as sharding does already. Use Adam itself."
    )
    parallelize_model(model, "ddp")
    train(model, zero, 1)
    with fails_alike(CheckpointValueError, "ZeroRedundancyOptimizer keeps state in an inner Adam"):
        save_checkpoint(tmp_path / "c", {"model": model, "optimizer": zero})
    with fails_alike(CheckpointValueError, "ZeroRedundancyOptimizer keeps state in an inner Adam"):
        full_optimizer_state(model, zero)
    model, inner = start("Adam")
    local = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2))
    for way in ("ddp", "fsdp"):
        with fails_alike(
            ParallelismValueError, "PostLocalSGDOptimizer never called", "Pass its inner Adam here"
        ):
            parallelize_model(model, way, optimizer=local)


class Forwarding(Optimizer):
    """Like accelerate's: a wrapper that never calls Optimizer.__init__ and forwards all attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)


@on_ranks(2)
def test_a_wrapper_that_takes_no_hooks_is_refused_by_name() -> None:
    model, inner = start("Adam")
    for way in ("ddp", "fsdp"):
        with fails_alike(ParallelismValueError, "Forwarding never called", "Pass its inner Adam here"):
            parallelize_model(model, way, optimizer=Forwarding(inner))


@pytest.mark.promise(25)
@pytest.mark.parametrize("name", ["Rprop", "Adafactor"])
@on_ranks(2)
def test_they_may_hold_replicated_parameters(name: str) -> None:
    model, single = built(), built()
    optimizer, other = (REFUSED[name](each.layers[0].parameters()) for each in (model, single))
    train(model, optimizer, 1, whole=True)
    parallelize_model(model, config(rules=[Rule("layers.0", shard=False)]), optimizer)
    train(model, optimizer, 2, first=1)
    train(single, other, 3, whole=True)
    close(values(model), values(single))


def two_optimizers(model: Any) -> tuple[list[Optimizer], list[Any]]:
    """AdamW with two groups on part of the model, SGD on another part; the rest is nobody's."""
    adam = torch.optim.AdamW(
        [
            {"params": model.layers[0].parameters(), "lr": 0.01, "initial_lr": 0.02},
            {"params": [model.embed.weight, model.scale], "lr": 0.02, "weight_decay": 0.0, "mine": "kept"},
        ]
    )
    sgd = torch.optim.SGD(model.layers[1].parameters(), 0.1, momentum=0.9)
    return [adam, sgd], [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (adam, sgd)]


def scheduled(model: nn.Module, optimizers: Any, schedulers: list[Any], steps: range, **options: Any) -> None:
    for step in steps:
        train(model, optimizers, 1, first=step, **options)
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.promise(83)
@pytest.mark.parametrize(("replicas", "device", "first"), [slow(1, "cpu", 2), (2, "cpu", 2), (1, "meta", 0)])
@on_ranks(4)
def test_groups_schedulers_and_several_optimizers(replicas: int, device: str, first: int) -> None:
    model, single = built(device=device), built()
    optimizers, schedulers = two_optimizers(model)
    scheduled(model, optimizers, schedulers, range(first), whole=True)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    lists = [group["params"] for group in groups]

    def options() -> list[dict[str, Any]]:
        """Of each group; the parameters by name."""
        names = {id(p): name for name, p in model.named_parameters()}
        return [group | {"params": [names[id(p)] for p in group["params"]]} for group in groups]

    before = options()
    parallelize_model(model, config(replicas=replicas), optimizers)
    after = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert [id(g) for g in after] == [id(g) for g in groups]
    assert [id(g["params"]) for g in after] == [id(one) for one in lists]
    assert options() == before
    assert set(optimizers[0].state) == {p for group in groups[:2] for p in group["params"] if first}
    scheduled(model, optimizers, schedulers, range(first, 4))
    scheduled(single, *two_optimizers(single), range(4), whole=True)
    if device == "cpu":  # from meta, the weights are others
        close(values(model), values(single))


@pytest.mark.promise(83)
@on_ranks(2)
def test_an_optimizer_of_another_model_on_one_rank_is_refused_on_all() -> None:
    (model, own), (_, other) = start(), start()
    text = "Rank 1: AdamW holds 12 parameters (of 12) that are not this model's"
    refused(model, other if dist.get_rank() else own, text)


@pytest.mark.promise(83)
@on_ranks(2)
def test_an_optimizer_of_several_models_needs_them_prepared_as_one() -> None:
    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 2)]

    def train(models: list[nn.Module], prepare: bool) -> list[float]:
        optimizer = torch.optim.AdamW([one for model in models for one in model.parameters()], 0.1)
        if prepare:
            with fails_alike(
                ParallelismValueError, "AdamW holds 2 parameters (of 4)", "nn.ModuleList([model, "
            ):
                parallelize_model(models[0], config(), optimizer)
            parallelize_model(nn.ModuleList(models), config(), optimizer)
        losses = []
        for _ in range(3):
            loss = models[1](models[0](torch.ones(2, 6))).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(models(), True) == pytest.approx(train(models(), False))


@pytest.mark.promise(83)
@on_ranks(2)
def test_optimizers_that_differ_between_ranks_are_refused() -> None:
    adam, adam_w = torch.optim.Adam, torch.optim.AdamW
    for make, text in (
        (lambda p: adam_w(p, 0.1), "optimizer 0: Adam on rank 0, AdamW on rank 1"),
        (lambda p: adam(p, 0.2), "optimizer 0 group 0 lr: 0.1 on rank 0, 0.2 on rank 1"),
        (lambda p: adam(p, torch.tensor(0.5)), "optimizer 0 group 0 lr: 0.1 on rank 0, 0.5 on rank 1"),
        (lambda p: adam(p[::-1], 0.1), "optimizer 0 group 0 scale: 0 on rank 0, 11 on rank 1"),
        (lambda p: None, "optimizer 0: rank 0 has it, rank 1 does not"),
    ):
        model = built()
        own = adam(trainable(model), 0.1)
        refused(model, make(trainable(model)) if dist.get_rank() else own, text)


@pytest.mark.promise(25)
@pytest.mark.parametrize("where", ["cpu", "meta"])
@on_ranks(2)
def test_adagrads_first_state_is_made_anew_on_meta(where: str) -> None:
    model = built(device="meta")
    with torch.device(where):
        optimizer = OPTIMIZERS["Adagrad"](trainable(model))
    parallelize_model(model, config(), optimizer)
    found = state_of(model, optimizer)
    train(model, optimizer, 1)
    assert torch.equal(found["embed.weight/sum"], torch.full((16, 8), 0.25))
    assert {v.item() for k, v in found.items() if k.endswith("step")} == {0.0}


@pytest.mark.promise(80)
@crossed({"name": ["Adagrad", "AdamW", "NAdam"], "before": [0, 2]})
@on_ranks(2)
def test_rank_0s_state_reaches_ranks_that_hold_the_model_on_meta(name: str, before: int) -> None:
    here = dist.get_rank() == 0
    (model, optimizer), (single, other) = start(name, "cpu" if here else "meta"), start(name)
    if here:
        train(model, optimizer, before, whole=True)
    parallelize_model(model, config(), optimizer)
    train(model, optimizer, 2, first=before)
    train(single, other, before + 2, whole=True)
    close(values(model), values(single))
    close(state_of(model, optimizer), state_of(single, other), rtol=1e-4)


@pytest.mark.promise(81)
@on_ranks(2)
def test_state_follows_sync() -> None:
    """Rank 1 is a step behind."""
    (model, optimizer), (single, other) = start(), start()
    train(single, other, 2, whole=True)
    train(model, optimizer, 2 - dist.get_rank(), whole=True)
    refused(model, optimizer, "different state")
    parallelize_model(model, config(sync="rank0"), optimizer)
    same(values(model), values(single))
    same(state_of(model, optimizer), state_of(single, other))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return full_each({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@on_ranks(2)
def test_pending_gradients_are_kept_or_compared() -> None:
    single = built()
    torch.nn.functional.cross_entropy(single(tokens()), tokens()).backward()
    for sync, batch in (("auto", tokens()), ("rank0", tokens(3 * dist.get_rank()))):
        model = built()
        torch.nn.functional.cross_entropy(model(batch), batch).backward()
        if sync == "rank0":
            refused(model, None, "The ranks' optimizers hold different state, or their parameters diff")
        parallelize_model(model, config(sync=sync))
        assert isinstance(model.embed.weight.grad, DTensor)
        same(gradients(model), gradients(single))


@on_ranks(2)
def test_state_without_values_is_refused() -> None:
    model = built(device="meta")
    optimizer = torch.optim.Adam([model.scale], capturable=False)
    optimizer.state[model.scale] = {"step": torch.tensor(1.0), "exp_avg": torch.empty((), device="meta")}
    text = "Adam state 'step' of scale; Adam state 'exp_avg' of scale: its"
    refused(model, optimizer, text, "Prepare the model before the first step")


def test_state_of_another_shape_is_refused_by_name() -> None:
    model, optimizer = start("Adam")
    optimizer.state[model.embed.weight]["odd"] = torch.zeros(3)
    optimizer.state[model.scale]["history"] = [torch.zeros(3)]
    odd = "Adam state 'odd' of embed.weight: shape (3,) does not follow from"
    with fails(ParallelismValueError, odd, "Adam state 'history' of scale: a list cannot be sharded"):
        parallelize_model(model, config(), optimizer)


@pytest.mark.promise(25)
@pytest.mark.parametrize("sync", ["auto", "rank0"])
@on_ranks(2)
def test_factored_state_and_numbers_are_followed_where_nothing_is_sharded(sync: Any) -> None:
    """transformers' Adafactor counts its steps in an int, and keeps a row and a column of each matrix."""
    model, single = built(), built()
    from transformers import Adafactor

    first, other = (Adafactor(trainable(one), lr=0.01, relative_step=False) for one in (model, single))
    train(single, other, 1, whole=True)
    if sync == "auto" or dist.get_rank() == 0:
        train(model, first, 1, whole=True)
    parallelize_model(model, ddp(sync=sync), first)
    train(model, first, 2, first=1)
    train(single, other, 2, first=1, whole=True)
    close(state_of(model, first), state_of(single, other))
    close(values(model), values(single))


@pytest.mark.promise(94)
@pytest.mark.parametrize("mode", ["foreach", "fused"])
def test_a_group_that_mixes_kinds_is_refused_where_kernels_are_joined(mode: str) -> None:
    model = built()
    optimizer = torch.optim.AdamW(trainable(model), **{mode: True})
    with pytest.raises(ParallelismValueError, match=f"group 0 has {mode}=True .* the replicated scale"):
        parallelize_model(model, config(), optimizer)


@pytest.mark.promise(103)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2)
def test_attributes_and_hooks_are_carried_over(device: str) -> None:
    model = built(device=device)
    calls: list[str] = []
    model.embed.weight.no_decay = True
    model.scale.tag = {"a": 1}
    model.layers[0].norm.weight.tag = "frozen"
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: calls.append("post embed"))
    model.scale.register_hook(lambda g: calls.append("pre scale"))
    model.scale.register_post_accumulate_grad_hook(lambda p: calls.append("post scale"))
    parallelize_model(model, config())
    assert model.embed.weight.no_decay is True
    assert model.head.weight is model.embed.weight
    assert model.scale.tag == {"a": 1}
    assert model.layers[0].norm.weight.tag == "frozen"
    model(tokens()).sum().backward()
    assert [call for call in calls if "scale" in call] == ["pre scale", "post scale"]
    assert sorted(calls) == ["post embed", "post scale", "pre scale"]


@pytest.mark.promise(103)
def test_a_gradient_hook_that_would_be_lost_is_refused_by_name() -> None:
    model = built()
    model.embed.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ParallelismValueError, match=r"Gradient hooks .* on embed.weight cannot be kept"):
        parallelize_model(model, config())
    assert type(model) is Toy


class Adapted(nn.Module):
    """A frozen bfloat16 matrix and a trained float32 correction, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 6, dtype=torch.bfloat16)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@pytest.mark.promise(93)
@on_ranks(2)
def test_dtypes_and_frozen_parameters_in_one_unit() -> None:
    model = built(Adapted)
    optimizer = torch.optim.AdamW(trainable(model), 0.1)
    before = values(model)
    done = parallelize_model(model, config(), optimizer)
    assert [unit.name for unit in done.plan.units] == [""]
    for _ in range(10):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in values(model).items():
        assert torch.equal(before[name], value) == name.startswith("base"), name
        assert value.dtype == (torch.bfloat16 if name.startswith("base") else torch.float32)
    assert optimizer.state[model.up.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.promise(24)
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), slow(4, 1), (4, 2)])
@on_ranks("ranks")
def test_training_equals_the_unsharded_model(ranks: int, replicas: int) -> None:
    (model, optimizer), (single, other) = start(), start()
    parallelize_model(model, config(replicas=replicas), optimizer)
    train(model, optimizer, 3)
    train(single, other, 3, whole=True)
    close(values(model), values(single))


@pytest.mark.promise(25)
def test_an_optimizer_of_frozen_parameters_only_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"AdamW holds only frozen parameters \(2\).*would update nothing"):
        check_optimizers([optimizer], read_structure(model), {})
    check_optimizers([optimizer, torch.optim.SGD(model[1].parameters())], read_structure(model), {})
    model[1].requires_grad_(False)
    check_optimizers([optimizer], read_structure(model), {})


class Keeping(torch.optim.SGD):
    """Keeps something besides its groups' parameters and its state."""

    def __init__(self, keep: Callable[[Any], Any], parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        keep(self)


@pytest.mark.promise(25)
@pytest.mark.parametrize(
    ("keep", "whole_too", "text"),
    [
        (
            lambda own: setattr(own, "all", list(own.param_groups[0]["params"])),
            False,
            "keeps parameters in its attribute 'all', which would stay the ones before sharding. Build it",
        ),
        (
            lambda own: own.param_groups[0].update(anchor=[p + 1 for p in own.param_groups[0]["params"]]),
            False,
            "keeps tensors of its parameters' shapes in its group key 'anchor', which cannot be sharded",
        ),
        (
            lambda own: setattr(own, "sums", {n: p + 1 for n, p in enumerate(own.param_groups[0]["params"])}),
            False,
            "keeps tensors of its parameters' shapes in its attribute 'sums', which cannot be sharded",
        ),
        (
            lambda own: own.state.update(calls=1),
            True,
            "has state for 'calls', which is not a parameter. Keep it in an attribute, or prepare the model",
        ),
        (lambda own: setattr(own, "same", own.param_groups[0]["params"]), False, ""),
        (lambda own: setattr(own, "sizes", [torch.ones(1), torch.ones(())]), False, ""),
    ],
)
def test_what_an_optimizer_keeps_outside_of_its_state_is_followed_or_refused(
    keep: Callable[[Any], Any], whole_too: bool, text: str
) -> None:
    model = nn.Linear(2, 3)
    optimizer = Keeping(keep, model.parameters())
    whole = dict.fromkeys(("weight", "bias"), "a rule")
    for plain, is_refused in (({}, bool(text)), (whole, whole_too)):
        with fails(ParallelismValueError, f"Keeping {text}") if is_refused else contextlib.nullcontext():
            check_optimizers([optimizer], read_structure(model), plain)


@pytest.mark.promise(25)
def test_an_optimizer_that_was_not_passed_is_named() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    forgotten, passed = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    elsewhere = torch.optim.SGD(other.parameters())
    found = forgotten_optimizers([passed], read_structure(model))
    assert len(found) == 1
    assert found[0].startswith("SGD holds 2 parameters of this model, but was not passed")
    assert forgotten_optimizers([passed, forgotten], read_structure(model)) == []
    assert len(elsewhere.param_groups) == 1


class Showing(torch.optim.Optimizer):
    """As Lightning and accelerate wrap optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.promise(25)
def test_an_optimizer_that_wraps_one_that_was_passed_is_not_forgotten() -> None:
    model = nn.Linear(2, 2)
    wrapper = Showing(torch.optim.SGD(model.parameters()))
    assert forgotten_optimizers([wrapper.optimizer], read_structure(model)) == []
    assert forgotten_optimizers([wrapper], read_structure(model)) == []


class Combined(torch.optim.Optimizer):
    """Steps others, and has no groups."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers


class Lookahead(torch.optim.Optimizer):
    """Has copies of another optimizer's groups, and steps that one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__([dict(group) for group in optimizer.param_groups], {})


@pytest.mark.promise(25)
def test_what_has_no_groups_of_its_own_is_not_forgotten() -> None:
    model = nn.Linear(2, 2)
    passed = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="Invalid learning rate") as failed:
        torch.optim.SGD(model.parameters(), lr=-1.0)
    others = [Combined(passed), Lookahead(passed)]
    assert forgotten_optimizers([passed], read_structure(model)) == []
    assert failed.tb is not None
    assert len(others) == 2
