"""Estimates of memory, against real prepared models and by hand."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.rule import Rule
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import parallelize_model, plan_parallelism
from composer_dist.distributed.feature_plan import StepEvent
from composer_dist.distributed.plan import trace
from composer_dist.distributed.plan.memory import held_memory, rank_of
from composer_dist.distributed.plan.trace import trace_step
from composer_dist.distributed.sharding.memory import UnitMemory, UnitSizes
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from tests.kit.compare import fails
from tests.kit.estimates import planned_and_real_peak
from tests.kit.grids import in_the_default_run
from tests.kit.huggingface import llama
from tests.kit.world import on_ranks

pytestmark = pytest.mark.promise(111)


class Uneven(nn.Module):
    """Dimensions that two and four ranks cannot cut evenly, a frozen layer, a buffer and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(31, 31) for _ in range(3)])
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(31, 31, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale.sum()


CONFIGS: dict[str, Callable[[int], ParallelismConfig]] = {
    "fsdp2": lambda ranks: ParallelismConfig(),
    "hsdp": lambda ranks: ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=ranks // 2)),
    "whole": lambda ranks: ParallelismConfig(rules=[Rule("layers.2", shard=False)]),
    "ddp": lambda ranks: ParallelismConfig(ddp=DDPConfig()),
    "tp": lambda ranks: ParallelismConfig(
        mesh=MeshConfig(dp_shard=ranks // 2, tp=2), tp=TPConfig(plan={"layers.2": "colwise_gather"})
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
}


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(4)
def test_what_a_rank_holds_is_exact(kind: str) -> None:
    config = CONFIGS[kind](4)
    names = {"fsdp2": list(OPTIMIZERS), "hsdp": ["Adam"], "ddp": ["AdamW"]}.get(kind, ["SGD"])
    for name in names:
        torch.manual_seed(0)
        model = Uneven()
        optimizer = OPTIMIZERS[name](model)
        with torch.device("meta"):
            alone = Uneven()
        estimate = plan_parallelism(alone, config, world_size=4, optimizer=OPTIMIZERS[name](alone)).memory(
            rank=dist.get_rank()
        )
        parallelize_model(model, config, optimizer)
        model(torch.ones(2, 31)).sum().backward()
        optimizer.step()
        parts = [_local(one) for one in model.parameters()]
        grads = [_local(one.grad) for one in model.parameters() if one.grad is not None]
        state = [_local(one) for values in optimizer.state.values() for one in values.values()]
        found = [sum(one.nbytes for one in some) for some in (parts, grads, state)]
        assert found == [estimate.parameters, estimate.gradients, estimate.optimizer], name
        stored = sum(one.untyped_storage().nbytes() for one in parts)
        assert stored >= estimate.parameters + estimate.padding
        assert estimate.buffers == 28


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _model() -> Any:
    return llama(hidden_size=128, intermediate_size=384, num_hidden_layers=3, vocab_size=500)


@pytest.mark.parametrize(
    ("ddp", "precision", "recomputed"),
    in_the_default_run(
        (False, None, None),
        among=itertools.product((False, True), (None, "amp_bf16"), (None, "composable", "selective")),
    ),
)
@on_ranks(2)
def test_the_peak_of_a_step_is_that_of_a_real_one(
    ddp: bool, precision: str | None, recomputed: str | None
) -> None:
    """Of every allocation of torch on the CPU, gloo's buffers included."""
    kind: dict[str, Any] = {"ddp": DDPConfig()} if ddp else {"check_order": False}
    config = ParallelismConfig(activation_checkpointing=recomputed, **kind)
    estimate, real = planned_and_real_peak(_model, (4, 64), config, precision)
    assert 0.98 * real <= estimate.peak <= 1.02 * real
    assert sum(estimate.at_peak.values()) == estimate.peak


def test_a_fused_step_has_no_temporary_tensors() -> None:
    """AdamW of a weight (3, 4), unless fused: two tensors of 48 bytes at a time."""
    for fused, nbytes in ((True, 0), (False, 96)):
        model = nn.Linear(4, 3, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        plan = plan_parallelism(model, FSDP2Config(), world_size=1, optimizer=optimizer)
        assert plan.subject is not None
        here = rank_of(plan, plan.subject.structure, 0)
        assert held_memory(plan, plan.subject, here)[1] == nbytes


def test_units_gather_free_and_reduce_in_the_order_of_fsdp2() -> None:
    """Two units of 100 and 10 bytes; the inner one is resharded after forward."""
    sizes = {
        "": UnitSizes(gathered=100, cast=0, gradients=200, reduced=50, stored=25, reshards=False),
        "block": UnitSizes(gathered=10, cast=3, gradients=20, reduced=5, stored=0, reshards=True),
    }
    follow, seen = UnitMemory(sizes, ranks=4, staged=False), []
    for moment, unit in (
        ("before forward", ""),
        ("before forward", "block"),
        ("after forward", "block"),
        ("after forward", ""),
        ("before backward", ""),
        ("before backward", "block"),
        ("before reduction", "block"),
        ("after reduction", "block"),
        ("before reduction", ""),
        ("after reduction", ""),
        ("after backward", ""),
    ):
        changes = follow(StepEvent(moment, "forward", unit))  # type: ignore[arg-type]
        seen.append([(change.kind[0], change.nbytes) for change in changes if change.nbytes])
    assert seen == [
        [("c", 100), ("g", 100)],
        [("c", 3), ("c", 10), ("c", -3), ("c", -100), ("g", 10)],
        [("g", -10)],
        [("c", -10)],
        [("c", 3), ("c", 10), ("c", -3)],  # in advance
        [("g", 10), ("c", -10)],
        [("g", -10), ("c", 20)],
        [("g", 5)],
        [("g", -100), ("c", -20), ("c", 200)],
        [("g", 50), ("g", 25), ("g", -50)],
        [("c", -200)],
    ]


def test_what_is_offloaded_is_uploaded_to_be_gathered_and_its_gradients_leave_again() -> None:
    """A weight of (3, 4) on two ranks, whose parts of two rows take 32 bytes."""
    config = ParallelismConfig(fsdp2=FSDP2Config(cpu_offload=True), mesh=MeshConfig(device_type="cuda"))
    with torch.device("meta"):
        plan = plan_parallelism(nn.Linear(4, 3, bias=False), config, world_size=2, optimizer="SGD")
    found = plan.memory(torch.ones(2, 4))
    assert (found.host, found.parameters, found.optimizer) == (2 * 32, 0, 0)
    assert found.gathered == 64
    assert found.communication == 32 + 64
    assert [now["gradients"] for phase, _, now in found.timeline if phase == "step"] == [0]


def test_a_rank_or_batch_that_does_not_suit_is_refused() -> None:
    plan = plan_parallelism(Uneven(), FSDP2Config(), world_size=2)
    with fails(ParallelismValueError, "rank=2", "ranks 0 to 1"):
        plan.memory(rank=2)
    with fails(ParallelismValueError, "batch=(2, 31)", "Give Uneven example inputs"):
        plan.memory((2, 31))


def test_a_step_of_one_matrix() -> None:
    """A weight of (3, 4) on two ranks, two rows of inputs, and the sum of the squared outputs."""
    plan = plan_parallelism(nn.Linear(4, 3, bias=False), FSDP2Config(), world_size=2)
    assert plan.subject is not None

    def run(model: nn.Module, part_of: Any) -> tuple[Tensor, Tensor]:
        outputs = model(torch.ones(2, 4))
        return (outputs * outputs).sum(), outputs

    signs = {"allocate": 1, "free": -1}
    here = rank_of(plan, plan.subject.structure, 0)
    events = [one for one in trace_step(plan.subject.structure, plan, run, here) if one.moment != "compute"]
    assert [signs[one.moment] * one.nbytes if one.moment in signs else one.moment for one in events] == [
        "begin",
        *(32, "before forward", 24, "after forward"),  # inputs and outputs
        *(24, 4, -24),  # squares, their sum
        *(4, 24, 24, 24, -24, -24),  # gradients of the loss, by each factor, and their sum
        *("before backward", 48, -24, -32, -4),  # the weight's gradient
        *("before reduction", -48, "after reduction", "after backward"),
        *(-4, -24),  # the loss and the outputs
    ]
    own = plan.memory(torch.ones(2, 4, device="meta"), loss=lambda outputs, batch: (outputs * outputs).sum())
    whole, shard = 4 * 4 * 4, 2 * 4 * 4
    assert (own.parameters, own.gathered, own.gradients) == (shard, whole, shard)
    # inputs, outputs, the loss, its gradient and that of the outputs twice, beside the whole weight
    assert own.at_peak == {
        "parameters": shard,
        "padding": 0,
        "buffers": 0,
        "optimizer": 0,
        "gathered": whole,
        "communication": 0,
        "activations": 32 + 24 + 4 + 4 + 3 * 24,
    }
    assert own.peak == shard + whole + 136
    assert "activations" in str(own)


@on_ranks(2)
def test_an_optimizer_by_name_counts_and_is_not_followed() -> None:
    """No warning tells of a forgotten optimizer, and the plan is the same as without one."""
    model = Uneven()
    by_name = plan_parallelism(model, FSDP2Config(), optimizer="adamW")
    frozen_too = plan_parallelism(model, FSDP2Config(), optimizer=torch.optim.AdamW(model.parameters()))
    assert by_name.memory().optimizer == frozen_too.memory().optimizer > 0
    assert by_name.digest() == plan_parallelism(model, FSDP2Config()).digest() == frozen_too.digest()
    del frozen_too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, by_name, optimizer)
    before = [_local(one).clone() for one in model.parameters()]
    model(torch.ones(2, 31)).sum().backward()
    optimizer.step()
    after = [_local(one) for one in model.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adamv", "Did you mean 'adam'? Valid names: ASGD, "),
        ("Muon", "Muon does not take all trainable parameters"),
        ("Adafactor", "Adafactor cannot step on sharded parameters"),
    ],
)
def test_an_optimizer_that_there_is_not_or_that_cannot_step_is_refused(name: str, words: str) -> None:
    with fails(ParallelismValueError, words):
        plan_parallelism(Uneven(), FSDP2Config(), optimizer=name)


def test_an_optimizer_whose_step_needs_values_is_named() -> None:
    plan = plan_parallelism(Uneven(), FSDP2Config(), optimizer="ASGD")
    with fails(ParallelismValueError, "What ASGD needs is not known"):
        plan.memory()
    with fails(ParallelismTypeError, "not str"):
        parallelize_model(Uneven(), FSDP2Config(), "AdamW")  # type: ignore[arg-type]


def test_offloaded_activations_are_the_hosts_where_the_device_is_another() -> None:
    """Of three blocks, and inputs of them in half precision; the second is recomputed at the peak."""
    inputs = 4 * 64 * 128 * 2
    for device, host in (("cpu", 0), ("cuda", 3 * inputs)):
        found = []
        for offload in (False, True):
            checkpointing = ("composable", {"offload": offload})
            mesh = MeshConfig(device_type=device)
            config = ParallelismConfig(mesh=mesh, activation_checkpointing=checkpointing)
            with torch.device("meta"):
                model = _model()
            found.append(plan_parallelism(model, config, world_size=2, precision="amp_bf16").memory((4, 64)))
        kept, moved = found
        assert kept.peak_at == moved.peak_at == "backward of model.layers.1"
        assert (kept.host, moved.host) == (0, host)
        assert kept.peak - moved.peak == (2 * inputs if host else 0)


@pytest.mark.parametrize(
    ("precision", "key_heads", "scores"), [(None, 2, 4), (None, 4, 0), ("amp_bf16", 2, 0)]
)
def test_float32_attention_with_grouped_queries_makes_all_scores_on_a_gpu(
    precision: str | None, key_heads: int, scores: int
) -> None:
    """Both layers keep theirs for backward, which makes two more at a time."""
    found = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            model = llama(num_attention_heads=4, num_key_value_heads=key_heads, max_position_embeddings=512)
        config = ParallelismConfig(mesh=MeshConfig(device_type=device))
        plan = plan_parallelism(model, config, world_size=2, precision=precision)
        found.append(plan.memory((2, 512)).activations)
    every = 2 * 4 * 512 * 512 * 4
    assert round((found[1] - found[0]) / every) == scores, (found, every)


class Attending(nn.Module):
    """One attention of heads of some width, with a mask or without."""

    def __init__(self, width: int, masked: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * width, 2 * width, dtype=dtype)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        heads = self.proj(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if self.masked else None
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).sum()


@pytest.mark.parametrize(
    ("width", "masked", "dtype", "whole"),
    [
        (8, True, torch.float32, False),
        (6, False, torch.float32, True),
        (8, False, torch.float64, True),
        (12, False, torch.bfloat16, False),
        (12, True, torch.bfloat16, True),
        (16, True, torch.bfloat16, False),
    ],
)
def test_attention_without_a_fused_kernel_on_a_gpu(
    width: int, masked: bool, dtype: torch.dtype, whole: bool
) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model, batch = Attending(width, masked, dtype), torch.ones(2, 512, 2 * width, dtype=dtype)
        config = ParallelismConfig(mesh=MeshConfig(device_type=device))
        found.append(plan_parallelism(model, config, world_size=2).memory(batch).activations)
    scores = 2 * 2 * 512 * 512 * dtype.itemsize
    assert (found[1] - found[0] > scores) == whole
    assert whole or found[1] == found[0]


def test_one_trace_serves_all_estimates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(trace, "trace_step", lambda *given: seen.append(given) or trace_step(*given))
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    plan = plan_parallelism(model, FSDP2Config(), world_size=2)
    for estimate in (plan.memory, plan.communication, plan.compute):
        estimate(batch, rank=1)
    plan.to_html(tmp_path / "report.html", torch.zeros(2, 4))
    assert len(seen) == 1
    assert plan.memory(torch.ones(3, 4)).activations > plan.memory(batch).activations
    assert len(seen) == 2
    plan.memory(batch, loss=lambda outputs, batch: outputs.sum())
    model.eval()
    plan.memory(batch)
    assert len(seen) == 4


class Asks(nn.Module):
    """Its forward depends on whether all and any inputs are true, and with `count` on how many."""

    def __init__(self, count: bool) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), count

    def forward(self, x: Tensor) -> Tensor:
        positive = x > 0
        assert positive.all()
        assert not torch.isnan(x).any()
        return self.linear(x[: int(positive.sum())] if self.count else x)


def test_values_are_those_of_masks_that_hide_nothing_or_an_error_names_the_unit() -> None:
    plans = [
        plan_parallelism(nn.Sequential(Asks(count)), FSDP2Config(), world_size=2) for count in (False, True)
    ]
    assert plans[0].memory(torch.ones(2, 4)).activations > 0
    with fails(ParallelismValueError, "cannot be traced", "forward depends on the values", "Without batch="):
        plans[1].memory(torch.ones(2, 4))
    assert plans[1].memory().parameters == 40


def test_a_mixture_of_experts_is_traced_in_its_own_dtype() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 16, "intermediate_size": 24}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**experts, **sizes))
    estimate = plan_parallelism(model, FSDP2Config(), world_size=2).memory((2, 8))
    tokens, chosen = 2 * 8, 2
    assert estimate.activations > tokens * chosen * (2 * 24 + 24 + 16) * 4  # up and gate, their product, down
