"""Suggestions, against plans that are made one by one and against real prepared models."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.distributed import parallelize_model, plan_parallelism, suggest
from composer_dist.distributed.plan import trace
from composer_dist.distributed.plan.suggestion import Proposal, Suggestion
from composer_dist.distributed.plan.topology import Algorithm, Topology
from composer_dist.distributed.plan.trace import trace_step
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from tests.kit.compare import fails
from tests.kit.huggingface import llama
from tests.kit.world import World

pytestmark = pytest.mark.promise(116)

SLOW = (Algorithm("ring", 0.0, 0.0, 0.0, 1.0),)
LINKS = Topology(ranks_per_host=4, within=1e9, between=1e8, algorithms=SLOW)
"""On which collectives take longer than anything else."""
FAST = Topology(ranks_per_host=4, within=1e30, between=1e30, algorithms=SLOW)
ALL = 1 << 40


def model() -> Any:
    with torch.device("meta"):
        return llama(hidden_size=64, intermediate_size=96, vocab_size=200)


def asked(memory: float, batch: Any = (2, 64), **options: Any) -> Suggestion:
    given: dict[str, Any] = {"world_size": 4, "optimizer": "AdamW", "topology": FAST, **options}
    return suggest(given.pop("model", None) or model(), device_memory=int(memory), batch=batch, **given)


def best_of(found: Suggestion) -> Proposal:
    assert found.best is not None, str(found)
    return found.best


@pytest.mark.slow
def test_the_best_is_the_fastest_of_all_plans_that_fit() -> None:
    """Every mesh, reshard setting and kind of checkpointing is planned and estimated by itself."""
    every = {}
    for shards, reshard, chosen in product((1, 2), (True, False), (None, "selective", "composable")):
        config = ParallelismConfig(
            mesh=MeshConfig(dp_replicate=2 // shards, dp_shard=shards, device_type="cuda"),
            fsdp2=FSDP2Config(reshard_after_forward=reshard),
            activation_checkpointing=chosen,
        )
        plan = plan_parallelism(model(), config, world_size=2, optimizer="AdamW", precision="amp_bf16")
        both = plan.memory((2, 64)).peak, plan.compute((2, 64), topology=LINKS).seconds
        every[plan.digest()] = both
    peaks = sorted(peak for peak, _ in every.values())
    for limit in (peaks[4], peaks[-1]):
        found = asked(limit, world_size=2, topology=LINKS)
        fitting = [times for times in every.values() if times[0] <= limit]
        rows = [(one.memory.peak, one.seconds) for one in found.frontier]
        best = best_of(found)
        assert (best.memory.peak, best.seconds) == every[best.plan.digest()]
        assert best.memory.peak <= limit
        assert best.seconds <= 1.01 * min(seconds for _, seconds in fitting)
        assert rows == sorted(rows, reverse=True)
        assert all(any(peak <= one and time <= other for peak, time in rows) for one, other in fitting)
        assert found.advice == ()


def _prepared(config: ParallelismConfig) -> tuple[str, set[Any], int]:
    """A plan's digest, dtypes that are gathered and reduced, and the optimizer's bytes after a step."""
    torch.manual_seed(0)
    real = llama(hidden_size=64, intermediate_size=96, vocab_size=200)
    optimizer = torch.optim.AdamW(real.parameters())
    plan = parallelize_model(real, config, optimizer).plan
    tokens = torch.ones(2, 8, dtype=torch.long)
    real(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    state: list[Any] = [one for values in optimizer.state.values() for one in values.values()]
    held = sum((one.to_local() if hasattr(one, "to_local") else one).nbytes for one in state)
    return (
        plan.digest(),
        {(one.mp_policy.param_dtype, one.mp_policy.reduce_dtype) for one in plan.units},
        held,
    )


def test_the_suggested_config_is_taken_as_it_is(world2: World) -> None:
    base = {"mesh": {"device_type": "cpu"}, "activation_checkpointing": "selective"}
    best = best_of(found := asked(ALL, world_size=2, config=base))
    expected = best.plan.digest(), {(torch.bfloat16, torch.float32)}, best.memory.optimizer
    assert world2(_prepared, found.config) == [expected, expected]


def test_steps_are_traced_once_for_all_meshes_and_not_at_all_for_what_holds_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(trace, "trace_step", lambda *given: seen.append(given[1]) or trace_step(*given))
    found = asked(ALL)
    assert len(seen) == 3  # none, selective and composable
    best = best_of(found)
    assert best.plan.memory(best.batch).peak == best.memory.peak
    assert len(seen) == 3
    held = plan_parallelism(model(), FSDP2Config(), world_size=4, optimizer="AdamW").memory()
    seen.clear()
    offloaded = best_of(asked(held.peak - 1, batch=(1, 2)))
    assert (offloaded.offloads, offloaded.plan.mesh["dp_replicate"]) == (True, 1)  # hosts hold the model once
    assert all(any(unit.offload for unit in plan.units) for plan in seen[:3])


def test_a_batch_is_split_as_far_as_it_has_to_be() -> None:
    config = ParallelismConfig(activation_checkpointing="composable")
    whole = asked(ALL, batch=(8, 64), config=config)
    assert {one.microbatches for one in whole.frontier} == {1}
    smallest = min(one.memory.peak for one in whole.frontier)
    found = best_of(asked(0.7 * smallest, batch=(8, 64), config=config))
    assert (found.microbatches, found.sequences, found.batch) == (2, 4, (4, 64))
    alone = found.plan.memory((4, 64))
    assert alone.peak < found.memory.peak <= alone.peak + alone.gradients  # which the first one leaves
    assert found.seconds == 2 * found.plan.compute((4, 64), topology=FAST).seconds
    inputs = {"input_ids": torch.ones(8, 64, dtype=torch.long), "labels": torch.ones(8, 64, dtype=torch.long)}
    same = best_of(asked(0.7 * smallest, batch=inputs, config=config))
    assert (same.microbatches, same.memory.peak) == (2, found.memory.peak)


def deep() -> Any:
    with torch.device("meta"):
        return llama(hidden_size=64, intermediate_size=96, vocab_size=50, num_hidden_layers=8)


@pytest.mark.slow
def test_advice_names_the_ranks_from_which_it_fits() -> None:
    """Too much is held on four ranks; hosts have four."""
    held = plan_parallelism(deep(), FSDP2Config(), world_size=4, optimizer="AdamW").memory()
    limit = 0.85 * held.peak
    found = asked(limit, batch=(1, 4), model=deep())
    assert best_of(found).offloads
    assert "+: and copies to the host and back" in str(found)
    assert "Without offloading it fits with" in str(found)
    ranks, lower = found.advice
    config, world = ranks.proposal.config, ranks.proposal.plan.world_size
    assert str(ranks).startswith(f"{world} ranks or more: ")
    peaks = [
        plan_parallelism(deep(), config, world_size=one, optimizer="AdamW").memory((1, 4)).peak
        for one in (world - 4, world)
    ]
    assert peaks[1] <= limit < peaks[0]
    assert str(lower).startswith("parameters, gradients and optimizer state in bfloat16")
    low = deep().to(torch.bfloat16)
    plan = plan_parallelism(low, lower.proposal.config, world_size=4, optimizer="AdamW")
    assert plan.memory((1, 4)).peak == lower.proposal.memory.peak <= limit


@pytest.mark.slow
def test_advice_names_the_tokens_with_which_it_fits() -> None:
    long = asked(ALL, batch=(1, 4096), config=ParallelismConfig(activation_checkpointing="composable"))
    limit = best_of(long).memory.peak // 3
    found = asked(limit, batch=(1, 4096))
    assert found.best is None
    (advice,) = found.advice  # more ranks and lower precision do not help activations
    tokens = advice.proposal.batch[1]
    assert str(advice).startswith(f"sequences of {tokens} tokens: ")
    plan = advice.proposal.plan
    assert plan.memory((1, tokens)).peak <= limit < plan.memory((1, 2 * tokens)).peak
    assert "Nothing fits" in str(found)
    with fails(ParallelismValueError, "Nothing fits into", f"sequences of {tokens} tokens"):
        _ = found.config


def test_where_nothing_helps_there_is_no_advice() -> None:
    found = asked(1, world_size=1)
    assert (found.best, found.advice, found.to_dict()["best"]) == (None, (), None)
    assert "not even with more ranks" in str(found)


def test_what_the_config_sets_stays() -> None:
    base = ParallelismConfig(
        mesh=MeshConfig(dp_replicate=2, dp_shard=2),
        fsdp2=FSDP2Config(reshard_after_forward=False, mixed_precision="FULL"),
        activation_checkpointing="selective",
        rules=[Rule("lm_head", shard=True), Rule("", shard=True)],
    )
    (only,) = asked(ALL, config=base).frontier
    assert only.plan.mesh == {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}
    assert only.config.fsdp2 == base.fsdp2
    assert (only.config.activation_checkpointing, only.config.rules) == ("selective", base.rules)
    replicated = asked(ALL, config=DDPConfig(), precision="amp_bf16")
    assert {one.plan.mesh["dp_replicate"] for one in replicated.frontier} == {4}
    assert all(one.plan.replication for one in replicated.frontier)
    given = best_of(asked(ALL, precision="amp_bf16"))
    assert given.config.fsdp2 is not None
    assert given.config.fsdp2.mixed_precision == "DEFAULT"
    assert {unit.mp_policy.param_dtype for unit in given.plan.units} == {torch.bfloat16}


class Wide(nn.Module):
    """Two matrices, which tensor parallelism cuts, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4096, bias=False), nn.Linear(4096, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def test_tensor_parallelism_is_added_where_nothing_else_fits_or_the_links_are_slow() -> None:
    options: dict[str, Any] = {
        "model": Wide(),
        "batch": torch.ones(2, 8),
        "config": {"tp": {"plan": {"up": "colwise", "down": "rowwise"}}},
    }
    alone = asked(ALL, **options)
    assert {one.plan.mesh["tp"] for one in alone.frontier} == {1}
    smallest = min(one.memory.peak for one in alone.frontier)
    cut = best_of(asked(smallest - 1, **options))
    assert (cut.plan.mesh["tp"] > 1, cut.config.tp is not None, cut.offloads) == (True, True, False)
    assert cut.microbatches * cut.sequences == 2 * cut.plan.mesh["tp"]
    assert cut.plan.memory(cut.batch).peak <= cut.memory.peak < smallest
    assert best_of(asked(ALL, topology=LINKS, **options)).plan.mesh["tp"] > 1


@pytest.mark.slow
def test_context_parallelism_is_added_for_long_sequences() -> None:
    config = ParallelismConfig(activation_checkpointing="composable")
    whole = best_of(asked(ALL, batch=(1, 1024), config=config))
    limit = 0.7 * whole.memory.peak
    found = best_of(asked(limit, batch=(1, 1024), config=config))
    assert found.plan.mesh["cp"] * found.plan.mesh["tp"] > 1
    assert found.plan.memory((1, 1024)).peak <= found.memory.peak <= limit


def test_a_mesh_of_the_user_is_refused_and_so_is_what_cannot_be_planned() -> None:
    with fails(ParallelismValueError, "no topology 'h200'"):
        asked(ALL, topology="h200")
    with fails(ParallelismValueError, "No module matches 'layer'"):
        asked(ALL, config=ParallelismConfig(rules=[Rule("layer", shard=True)]))
    with fails(ParallelismTypeError, "model"):
        asked(ALL, model="model")
