"""Any tree of modules, ties, rules and mesh: the plan covers every parameter once, or names its trouble."""

import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from composer_dist import FSDP2Config, MeshConfig, ParallelismConfig, ParallelismError, Rule
from composer_dist.config.parallelism import resolve_config
from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.mesh.build import mesh_for
from composer_dist.distributed.sharding.apply import finish
from composer_dist.distributed.steps import divide
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.structure.structure import read_structure

WORLD = 4


class Leaf(nn.Module):
    """A few parameters and a buffer; called with anything."""

    def __init__(self, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], frozen: bool) -> None:
        super().__init__()
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            value = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=not frozen))
        self.register_buffer("steps", torch.zeros(2, device="meta"))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.ones_(self.steps)


class Branch(nn.Module):
    """Children under names of their own."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        for letter, child in zip("abcdef", children, strict=False):
            self.add_module(letter, child)


shapes = st.sampled_from([(4, 3), (8, 2), (5,), (1, 4), (3, 1, 2)])
dtypes = st.sampled_from([torch.float32] * 4 + [torch.bfloat16])
leaves = st.lists(st.tuples(shapes, dtypes), min_size=0, max_size=3).flatmap(
    lambda found: st.builds(
        Leaf, st.just([s for s, _ in found]), st.just([d for _, d in found]), st.booleans()
    )
)


def containers(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    several = st.lists(children, min_size=1, max_size=4)
    return st.one_of(
        several.map(Branch),
        several.map(nn.ModuleList),
        several.map(lambda found: nn.Sequential(*found)),
        several.map(lambda found: nn.ModuleDict(dict(zip("wxyz", found, strict=False)))),
    )


trees = st.lists(st.recursive(leaves, containers, max_leaves=12), min_size=1, max_size=4).map(Branch)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A tree, some of whose parameters are held under a second name."""
    model = draw(trees)
    places = [
        (module, key)
        for module in model.modules()
        for key, value in module._parameters.items()
        if value is not None
    ]
    for _ in range(draw(st.integers(0, 3))):
        if len(places) > 1:
            (here, key), (there, other) = draw(st.tuples(*[st.sampled_from(places)] * 2))
            if here._parameters[key].shape == there._parameters[other].shape:
                there._parameters[other] = here._parameters[key]
    return model


@st.composite
def configurations(draw: st.DrawFn, model: nn.Module) -> ParallelismConfig:
    """Rules for some of its modules, and a mesh."""
    names = [name for name, _ in model.named_modules()]
    match = st.one_of(
        st.sampled_from(names),
        st.sampled_from(names).map(lambda name: f"re:{re.escape(name)}"),
        st.sampled_from([Leaf, Branch, nn.Sequential]),
        st.lists(st.sampled_from(names), min_size=1, max_size=3),
    )
    rule = st.builds(
        Rule,
        match,
        shard=st.sampled_from([None, True, True, False]),
        reshard_after_forward=st.sampled_from([None, None, True, False]),
        optional=st.booleans(),
    )
    replicate = draw(st.sampled_from([1, 2, 4]))
    return ParallelismConfig(
        mesh=MeshConfig(dp_replicate=replicate, dp_shard=WORLD // replicate),
        fsdp2=FSDP2Config(reshard_after_forward=draw(st.booleans())),
        rules=draw(st.lists(rule, max_size=3)),
        containers=draw(st.sampled_from(["expand", "skip"])),
        strict=draw(st.booleans()),
    )


@pytest.fixture(autouse=True)
def fake_world() -> None:
    """This process is rank 1 of four that do not exist."""
    dist.init_process_group("fake", rank=1, world_size=WORLD)


@settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(st.data())
def test_every_parameter_is_covered_once_or_the_trouble_is_named(data: Any) -> None:
    model = data.draw(models())
    config = data.draw(configurations(model))
    names = dict(model.named_parameters())
    everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = plan_parallelism(model, config, world_size=WORLD)
        except ParallelismError as error:
            event("refused")
            text = str(error)
            known = everything | modules | {rule_name(rule) for rule in config.rules}
            assert any(name and name in text for name in known) or "no parameters" in text, text
            assert all(p is q for p, q in zip(names.values(), model.parameters(), strict=True))
            return
        covered = Counter([*(name for unit in plan.units for name in unit.parameters), *plan.plain])
        assert covered == Counter(list(names))
        for unit in plan.units:
            for name in unit.parameters:
                assert any(inside(name, module) for module in unit.modules), (name, unit.modules)
        sharded = {id(names[name]) for unit in plan.units for name in unit.parameters}
        tied = {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)}
        structure = read_structure(model)
        mesh = mesh_for(resolve_config(config).mesh)
        give_memory(structure, divide(structure, plan, mesh)[1], torch.device("cpu"))
        finish(structure, plan.sharding)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == tied.keys()
    for name, parameter in after.items():
        assert isinstance(parameter, DTensor) == (tied[name] in sharded), name
        for other, same in after.items():
            assert (parameter is same) == (tied[name] == tied[other]), (name, other)


def rule_name(rule: Rule) -> str:
    return rule.match if isinstance(rule.match, str) else getattr(rule.match, "__name__", str(rule.match))


def inside(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")
