"""Methods besides forward, several prepared models in one program, and a prepared part of a model."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import ParallelismConfig, Rule
from composer_dist.config import presets
from composer_dist.distributed import parallelize_model, plan_parallelism
from composer_dist.errors import ParallelismRuntimeError, ParallelismTypeError, ParallelismValueError
from tests.kit.compare import same_parameters
from tests.kit.meshes import mine
from tests.kit.toy import built
from tests.kit.world import on_ranks


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale

    def encode(self, x: Tensor, *, times: int) -> Tensor:
        """Uses its own parameters without its forward."""
        return torch.sin(self.inner(x)) * times


class Model(nn.Module):
    """Its steps call its forward, one block's method and its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Body(), Body()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        encoded = self.head(self.blocks[1].encode(x, times=2))
        return {"loss": (self(x) - y).square().mean() + encoded.square().mean()}


@pytest.mark.promise(35)
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_other_methods_gather_as_forward_does(reshard: bool) -> None:
    reference, model = built(Model), built(Model)
    rules = [Rule([presets.layers("blocks"), ""], shard=True, reshard_after_forward=reshard)]
    config = ParallelismConfig(rules=rules, forward_methods=("training_step", "encode"))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (reference, model)]
    done = parallelize_model(model, config, optimizers[1])
    forward = vars(model)["forward"]
    x, y = torch.randn(3, 4, 4), torch.randn(3, 4, 2)
    for step in range(3):
        reference.training_step((x[step], y[step]))["loss"].backward()
        model.training_step((mine(x[step]), mine(y[step])))["loss"].backward()
        same_parameters(model, reference, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # and after it the next step sees the new weights
            torch.testing.assert_close(
                model.blocks[0].encode(x[0], times=3), reference.blocks[0].encode(x[0], times=3)
            )
            torch.testing.assert_close(model(x[0]), reference(x[0]))
    assert vars(model)["forward"] is forward
    assert model.training_step.__name__ == "training_step"
    # Scalars, which are averaged for these methods too.
    assert sorted(done.plain_parameters) == ["blocks.0.scale", "blocks.1.scale"]


@pytest.mark.promise(35)
def test_a_method_that_no_unit_has_is_refused() -> None:
    for name, text in {
        "trainig_step": "no unit has a method 'trainig_step'. Did you mean 'training_step'?",
        "encode": "no unit has a method 'encode'. blocks.0 has it; make it a unit with "
        "Rule('blocks.0', shard=True).",
        "head": "no unit has a method 'head'.",
    }.items():
        config = ParallelismConfig(rules=[Rule("", shard=True)], forward_methods=[name])
        with pytest.raises(ParallelismValueError) as caught:
            plan_parallelism(Model(), config, world_size=2)
        assert str(caught.value) == f"forward_methods: {text}"
    with pytest.raises(ParallelismTypeError, match="a sequence of names"):
        ParallelismConfig(forward_methods="training_step")


@pytest.mark.promise(35)
@on_ranks(1)
def test_a_method_that_fails_leaves_forward_as_it_was() -> None:
    model = Model()
    parallelize_model(model, ParallelismConfig(forward_methods=["training_step"]))
    forward = vars(model)["forward"]
    with pytest.raises(TypeError):
        model.training_step(None)
    assert vars(model)["forward"] is forward
    assert model(torch.ones(1, 4)).shape == (1, 2)


class Direct(Model):
    """Calls the forward of its first block, past the hooks, and perhaps another method."""

    other = False
    weight = False

    def forward(self, x: Tensor) -> Tensor:
        if self.weight:
            return x @ self.blocks[0].inner.weight
        x = self.blocks[1](self.blocks[0].forward(x))
        return self.head(self.blocks[0].encode(x, times=2) if self.other else x)


@pytest.mark.promise(35, 104)
@on_ranks(2)
def test_a_direct_call_of_forward_gathers_and_one_of_another_method_names_the_remedy() -> None:
    reference, model = built(Direct), built(Direct)
    parallelize_model(model, "fsdp")
    x = torch.randn(4, 4)
    reference(x).square().mean().backward()
    model.forward(mine(x)).square().mean().backward()
    same_parameters(model, reference, gradients=True)
    for uses, message in (
        (
            "other",
            "blocks.0.inner was used while its parameters are sharded: FSDP2 gathers them in calls of "
            "blocks.0 only. Call that, not a part of it; another method than forward needs "
            "ParallelismConfig(forward_methods=['encode']).",
        ),
        (
            "weight",
            "The root used sharded parameters of another unit: FSDP2 gathers them in calls of their own unit "
            "only. Call that, or leave it whole: Rule(..., shard=False).",
        ),
    ):
        setattr(model, uses, True)
        with pytest.raises(ParallelismRuntimeError) as caught:
            model(mine(x))
        assert str(caught.value) == message


@on_ranks(2)
def test_several_models_in_one_program() -> None:
    """A generator and its critic: two prepared models, two optimizers, one loss through both."""

    pairs = [(built(Model), built(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh()))) for _ in range(2)]
    optimizers = [[torch.optim.SGD(m.parameters(), 0.1) for m in pair] for pair in pairs]
    for model, optimizer in zip(pairs[1], optimizers[1], strict=True):
        parallelize_model(model, "fsdp", optimizer)
    x = torch.randn(4, 4)
    for step in range(2):
        for (generator, critic), batch, own in zip(pairs, (x, mine(x)), optimizers, strict=True):
            critic(generator(batch)).square().mean().backward()
            own[step % 2].step()
            for optimizer in own:
                optimizer.zero_grad()
        for reference, prepared in zip(*pairs, strict=True):
            same_parameters(prepared, reference)


@on_ranks(2)
def test_a_part_of_a_model_is_prepared_separately() -> None:
    """Only the blocks are prepared; the head is the caller's own."""
    reference, model = built(Model), built(Model)
    done = parallelize_model(model.blocks[0], "fsdp")
    assert done.model is model.blocks[0]
    x = torch.randn(4, 4)
    reference(x).square().mean().backward()
    model(mine(x)).square().mean().backward()
    for parameter in [*model.blocks[1].parameters(), *model.head.parameters()]:
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    same_parameters(model, reference, gradients=True)
    # scale (a scalar), inner.weight and inner.bias of the first block; the second block; the head
    assert [isinstance(p, DTensor) for p in model.parameters()] == [False, True, True, *[False] * 5]


class Parts(nn.ModuleDict):
    """Two networks, for a loop that calls each; it has no forward."""

    def __init__(self) -> None:
        critic = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        super().__init__({"generator": Model(), "critic": critic, "score": nn.Identity()})


@pytest.mark.promise(14)
@pytest.mark.parametrize("config", ["fsdp", "ddp"])
@on_ranks(2)
def test_the_parts_of_a_container_are_trained_in_turn(config: str) -> None:
    reference, model = built(Parts), built(Parts)
    adam = partial(torch.optim.AdamW, lr=0.1)
    optimizers = [
        [adam(m["generator"].parameters()), adam(m["critic"].parameters())] for m in (reference, model)
    ]
    done = parallelize_model(model, config, optimizers[1])
    if config == "fsdp":
        units = ["critic", "generator", "generator.blocks.0", "generator.blocks.1"]
        assert sorted(unit.name for unit in done.plan.units) == units
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for number in (0, 1):
            for parts, steps, rows in ((reference, optimizers[0], x), (model, optimizers[1], mine(x))):
                faked = parts["generator"](rows)
                score = parts["critic"](faked.detach() if number else faked)
                (score.square().mean() if number else -score.mean()).backward()
                steps[number].step()
                for one in steps:
                    one.zero_grad()
    same_parameters(model, reference)
