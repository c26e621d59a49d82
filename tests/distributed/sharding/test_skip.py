"""Modules that some ranks skip: a toy multimodal model whose batches have images on some ranks only."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_dist import MeshConfig, ParallelismConfig, Rule
from composer_dist.distributed import (
    named_parameters_canonical,
    no_sync,
    parallelize_model,
    plan_parallelism,
    prepare_fully_shard,
)
from composer_dist.errors import ParallelismValueError
from tests.kit.compare import same_parameters
from tests.kit.grids import slow
from tests.kit.models import WIDTH, Layer, Multimodal
from tests.kit.toy import built
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(35)
ROOT = ParallelismConfig(rules=[Rule("vision", skippable="root")])


def _loss(model: nn.Module, rows: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The mean over the ranks' batches, which a reference computes one by one."""
    losses = []
    for text, images in rows:
        logits, hidden = model(text, images)
        losses.append(logits.square().mean() + hidden.square().mean())
    return torch.stack(losses).mean()


WHO_SEES = [(True, False), (False, True), (False, False), (True, True)]
"""Which of two data-parallel ranks have images, step by step; with more ranks it repeats."""


@pytest.mark.parametrize(
    ("ranks", "policy", "frozen", "replicas", "passes", "by_steps"),
    [
        (2, "replicate", True, 1, 1, False),
        slow(2, "replicate", False, 1, 1, False),
        slow(2, "root", True, 1, 1, False),
        (2, "root", False, 1, 1, False),
        slow(4, "root", False, 2, 2, False),
        (2, "root", False, 1, 1, True),
    ],
)
@on_ranks("ranks")
def test_towers_that_a_rank_skips_train_like_one_process(
    ranks: int, policy: str, frozen: bool, replicas: int, passes: int, by_steps: bool
) -> None:
    reference, model = (built(lambda: Multimodal(frozen)) for _ in range(2))
    rules = [Rule("vision", skippable=policy)]
    config = ParallelismConfig(mesh=MeshConfig(dp_replicate=replicas), rules=rules)
    if by_steps:
        plan = prepare_fully_shard(model, config)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in (reference, model)]
    if not by_steps:
        plan = parallelize_model(model, config, optimizers[1]).plan
    rank = dist.get_rank()
    for sees in WHO_SEES:
        texts, images = torch.randn(2, ranks, 3, WIDTH)
        rows = [(texts[i], images[i] if sees[i % 2] else None) for i in range(ranks)]
        _loss(reference, rows).backward()
        for _ in range(passes):
            (_loss(model, rows[rank : rank + 1]) / passes).backward()
        same_parameters(model, reference, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(model, reference)
        with torch.no_grad():
            losses = (_loss(one, rows[rank : rank + 1]) for one in (model, reference))
            torch.testing.assert_close(*losses)
    theirs = dict(named_parameters_canonical(model))
    plain = {name for name, p in theirs.items() if not isinstance(p, DTensor)}
    vision = {name for name in theirs if name.startswith("vision")}
    assert plain == (vision if policy == "replicate" else {"vision.gain"})
    assert [unit.name for unit in plan.units] == ["", "layers.0", "layers.1"]


class Spare(Multimodal):
    """Its tower has a layer that no loss uses, as LLaVA's has."""

    def __init__(self) -> None:
        super().__init__()
        self.vision.layers.append(Layer())

    def forward(self, text: Tensor, images: Tensor | None = None) -> tuple[Tensor, Tensor]:
        last = self.vision.layers.pop(2)
        try:
            return super().forward(text, images)
        finally:
            self.vision.layers.append(last)


@on_ranks(2)
def test_what_no_loss_uses_of_a_tower_gets_no_gradient() -> None:
    reference, model = (built(Spare) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in (reference, model)]
    parallelize_model(model, ROOT, optimizers[1])
    rank = dist.get_rank()
    for sees in WHO_SEES:
        texts, images = torch.randn(2, 2, 3, WIDTH)
        rows = [(texts[i], images[i] if sees[i] else None) for i in range(2)]
        _loss(reference, rows).backward()
        for microbatch in range(2):
            with no_sync(model, microbatch == 0):
                (_loss(model, rows[rank : rank + 1]) / 2).backward()
        same_parameters(model, reference, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(model, reference)


def test_the_plan_says_so() -> None:
    config = ParallelismConfig(rules=[Rule("vision", skippable="replicate")])
    plan = plan_parallelism(Multimodal(), config, world_size=2)
    assert plan.explain("vision.layers.0") == (
        "vision.layers.0: replicated, because the rule 'vision' lets ranks skip it."
    )
    assert [(one.module, one.unit) for one in plan.sharding.skippable] == [("vision", None)]
    plan = plan_parallelism(Multimodal(), ROOT, world_size=2)
    assert plan.explain("vision.layers.0") == "vision.layers.0: part of unit root, because it lies inside it."
    scalar, one = plan.sharding.skippable
    assert (one.module, one.unit, len(one.parameters)) == ("vision", "", 8)
    assert scalar.parameters == ("vision.gain",)  # plain, and averaged
    assert plan.to_dict()["sharding"]["skippable"][1] == vars(one) | {"parameters": list(one.parameters)}


def test_the_unit_around_is_the_nearest() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"inner": Multimodal()}))
    rules = [Rule(["1.inner", ""], shard=True), Rule("1.inner.vision", skippable="root")]
    found = plan_parallelism(model, ParallelismConfig(rules=rules), world_size=2).sharding.skippable
    assert [one.unit for one in found] == [None, "1.inner"]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            [Rule("vision.layers.0", shard=True), Rule("vision", skippable="root")],
            "The rule 'vision.layers.0' makes vision.layers.0 a unit, but the rule 'vision' lets ranks skip "
            "vision.layers.0, and a unit needs every rank.",
        ),
        (
            [Rule("", skippable="root")],
            "The rule '' makes the root a unit, but the rule '' lets ranks skip it",
        ),
        (
            [Rule("layers.0", shard=True), Rule("vision", skippable="root")],
            "to the unit that contains it, but there is none. Add Rule('', shard=True), or use skippable=",
        ),
    ],
)
def test_what_cannot_be_skipped_is_refused(rules: list[Rule], text: str) -> None:
    with pytest.raises(ParallelismValueError, match=re.escape(text)):
        plan_parallelism(Multimodal(), ParallelismConfig(rules=rules), world_size=2)


def test_a_tower_of_another_dtype_is_replicated_or_refused() -> None:
    model = Multimodal()
    model.vision.to(torch.bfloat16)
    model.head = nn.Linear(WIDTH, 200)
    with pytest.raises(ParallelismValueError, match="vision inside it is a unit, because it trains bfloat16"):
        plan_parallelism(model, ROOT, world_size=2)


def test_policies_and_attributes_make_no_unit_in_what_is_skipped() -> None:
    model: Any = Multimodal()
    model.vision.layers[0]._fsdp_wrap = True
    for policy in (None, lambda module: isinstance(module, Layer)):
        plan = plan_parallelism(model, ROOT, world_size=2, fsdp_wrap_policy=policy)
        assert [unit.name for unit in plan.units] == ["", "layers.0", "layers.1"]
