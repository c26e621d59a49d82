"""Tensor parallelism, pure and with FSDP2, against the model on a single process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from composer_dist import MeshConfig, ParallelismConfig, Rule, TPConfig
from composer_dist.checkpoint import full_model_state, load_full_model_state
from composer_dist.distributed import (
    clip_grad_norm,
    clip_grad_value,
    meta_init,
    named_parameters_canonical,
    no_sync,
    parallelize_model,
    summon_full_params,
)
from composer_dist.distributed.mesh.build import mesh_for
from composer_dist.distributed.mesh.layout import Layout
from composer_dist.distributed.moving.gather import gather
from composer_dist.distributed.plan.build import build_plan
from composer_dist.distributed.steps import divide
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.distributed.wishes import Request
from composer_dist.errors import ParallelismError, ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit.compare import close, fails, part_of, same
from tests.kit.decoder import Decoder, UnevenMlp, loss_of, token_batch
from tests.kit.grids import crossed, slow
from tests.kit.huggingface import gpt2, llama, lora_gpt2, lora_llama, mixtral, phi3, qwen3, tied_llama
from tests.kit.measure import Collectives
from tests.kit.toy import built
from tests.kit.world import on_ranks, run

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own

Make = Callable[[], nn.Module]


def config(replicas: int = 1, tp: int = 2, **options: Any) -> ParallelismConfig:
    """Tensor parallel over pairs of ranks, the rest of the world shards."""
    chosen = {
        key: options.pop(key) for key in ("plan", "sequence_parallel", "loss_parallel") if key in options
    }
    mesh = MeshConfig(dp_replicate=replicas, tp=tp)
    return ParallelismConfig(mesh=mesh, tp=TPConfig(**chosen), bucket_bytes=4096, **options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW; epsilon well above the rounding of gradients that are zero but for it (biases of keys)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=0.01, eps=1e-4, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter in full."""
    return {name: gather(parameter).detach() for name, parameter in named_parameters_canonical(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient in full."""
    return {n: gather(p.grad) for n, p in named_parameters_canonical(model) if p.grad is not None}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """A tenth of AdamW's operations on DTensors."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def train(
    make: Make,
    settings: ParallelismConfig,
    before: int = 0,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> str:
    """Two steps, clipped, beside the reference; the full state, out of the model and into it."""
    reference, model = built(make), built(make)
    expected, optimizer = optimizer_of(reference), optimizer_of(model)
    for step in range(before):
        for one, stepper in ((reference, expected), (model, optimizer)):
            loss_of(one, token_batch(step)).backward()
            stepper.step()
            stepper.zero_grad()
    done = parallelize_model(model, settings, optimizer)
    for step in range(2):
        loss_of(reference, token_batch(step)).backward()
        loss_of(model, part_of(token_batch(step), done.mesh)).backward()
        found = gradients(model)
        close(found, gradients(reference), rtol=1e-3, atol=1e-5)
        norm = clip_grad_norm(model, 0.5)
        torch.testing.assert_close(norm, nn.utils.get_total_norm(found.values()), rtol=1e-6, atol=0)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for stepper in (expected, optimizer):
            stepper.step()
            stepper.zero_grad()
    close(whole(model), whole(reference), rtol=1e-3, atol=2e-5)
    state = full_model_state(model, ranks="all")
    assert state.keys() == reference.state_dict().keys()
    close(state, reference.state_dict(), rtol=1e-3, atol=2e-5)
    doubled = {name: value * 2 for name, value in state.items()}
    load_full_model_state(model, doubled if dist.get_rank() == 0 else {})
    same(full_model_state(model, ranks="all"), doubled)
    with summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.div_(2)
    same(full_model_state(model, ranks="all"), state)
    return done.plan.explain("")


def trained_mlp(tp: int, inner: int) -> Any:
    """Forward, backward and placements of a pair of matrices."""
    reference, model = built(lambda: UnevenMlp(inner)), built(lambda: UnevenMlp(inner))
    parallelize_model(model, config(tp=tp, plan={"up": "colwise", "down": "rowwise"}))
    x, y = (torch.arange(32.0).view(4, 8).sin().requires_grad_() for _ in range(2))
    out, expected = model(x), reference(y)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(x.grad, y.grad)
    close(gradients(model), gradients(reference))
    clip_grad_value(model, 0.01)
    nn.utils.clip_grad_value_(reference.parameters(), 0.01)
    close(gradients(model), gradients(reference))
    return model


@pytest.mark.promise(30)
@on_ranks(2)
def test_a_pair_of_matrices_equals_the_reference_forward_and_backward() -> None:
    model = trained_mlp(2, 6)
    found = {name: getattr(p, "placements", None) for name, p in model.named_parameters()}
    cut = {"up.weight": (Shard(0),), "up.bias": (Shard(0),), "down.weight": (Shard(1),)}
    assert found == dict.fromkeys(found) | cut
    assert model.up.weight.to_local().shape == (3, 8)


@on_ranks(4)
def test_uneven_parts_equal_the_reference_too() -> None:
    assert trained_mlp(4, 7).up.weight.to_local().shape == (1 if dist.get_rank() == 3 else 2, 8)


@pytest.mark.promise(30, 32)
@pytest.mark.parametrize(
    ("ranks", "make"),
    [
        *((2, make) for make in (llama, gpt2, lora_gpt2, mixtral)),
        *((4, Decoder), slow(2, Decoder), slow(2, lora_llama), slow(2, qwen3), slow(2, phi3)),
        *(slow(4, make) for make in (llama, gpt2, lora_gpt2, lora_llama)),
    ],
)
@on_ranks("ranks")
def test_tensor_parallel_alone_and_with_fsdp2_equals_the_reference(ranks: int, make: Make) -> None:
    train(make, config())


@pytest.mark.promise(83)
@on_ranks(4)
def test_an_optimizer_with_state_follows_through_both() -> None:
    train(gpt2, config(), before=2, optimizer_of=adam)


@pytest.mark.slow
@on_ranks(4)
def test_hsdp_and_foreach_optimizers_go_with_it() -> None:
    train(tied_llama, config(replicas=2), optimizer_of=partial(adam, foreach=True))


def recomputed(mode: Any, **options: Any) -> dict[str, Any]:
    """Cut modules that are checkpointed themselves."""
    rules = [Rule(match, act_ckpt=mode) for match in (nn.Linear, nn.LayerNorm, nn.RMSNorm)]
    return {"rules": [*rules, Rule("", shard=True)]} | options


SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
REENTRANT = ("wrapped", {"checkpoint_impl": "REENTRANT"})


@pytest.mark.parametrize(
    ("ranks", "make", "options"),
    [
        (2, Decoder, SEQUENCE),
        slow(4, gpt2, SEQUENCE),
        (2, lora_llama, SEQUENCE),
        (2, llama, SEQUENCE | {"loss_parallel": True}),
        slow(4, llama, SEQUENCE | {"loss_parallel": True}),
        (2, llama, SEQUENCE | {"activation_checkpointing": "composable"}),
        slow(2, llama, SEQUENCE | {"activation_checkpointing": "wrapped"}),
        (2, Decoder, recomputed("composable")),
        slow(2, Decoder, recomputed(REENTRANT)),
        slow(2, Decoder, recomputed("composable", **SEQUENCE)),
        (2, Decoder, recomputed(REENTRANT, **SEQUENCE)),
    ],
)
@on_ranks("ranks")
def test_sequence_and_loss_parallel_and_checkpointing_equal_the_reference(
    ranks: int, make: Make, options: dict[str, Any]
) -> None:
    assert "Tensor parallel" not in train(make, config(**options))


@crossed({"ranks, transport": [(2, "auto"), (4, "messages")], "make": [Decoder, gpt2]})
@on_ranks("ranks")
def test_weights_come_from_rank_0_or_from_initializers_bit_for_bit(
    make: Make, ranks: int, transport: Any
) -> None:
    reference = built(make)
    model = built(make, device="cpu" if dist.get_rank() == 0 else "meta")
    parallelize_model(model, config(transport=transport))
    same(full_model_state(model, ranks="all"), reference.state_dict())

    reference = built(make, device="meta")
    torch.manual_seed(7)
    meta_init(reference)
    model = built(make, device="meta")
    torch.manual_seed(7)
    parallelize_model(model, config(transport=transport))
    same(full_model_state(model, ranks="all"), reference.state_dict())
    batches = loss_of(model, token_batch()), loss_of(reference, token_batch())
    torch.testing.assert_close(*batches)


@pytest.mark.promise(3)
@on_ranks(4)
def test_a_mesh_of_the_users_own_is_read_by_its_names() -> None:
    """The names are Lightning's."""
    reference, model = built(UnevenMlp), built(UnevenMlp)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = TPConfig(plan={"up": "colwise", "down": "rowwise"})
    parallelize_model(model, ParallelismConfig(mesh=mesh, tp=plan), torch.optim.SGD(model.parameters()))
    same(full_model_state(model, ranks="all"), reference.state_dict())
    torch.testing.assert_close(model(torch.ones(2, 8)), reference(torch.ones(2, 8)))
    placements = dict(named_parameters_canonical(model))["up.weight"].placements
    assert str(placements) == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"


def test_eight_ranks_replicate_shard_and_cut() -> None:
    dist.init_process_group("fake", rank=5, world_size=8)
    settings = ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2, tp=2), tp=TPConfig())
    model, mesh = built(gpt2, device="meta"), mesh_for(settings.mesh)
    structure = read_structure(model)
    plan = build_plan(structure, Request(config=settings), mesh.sizes)
    give_memory(structure, divide(structure, plan, mesh)[1], torch.device("cpu"))
    fused = model.transformer.h[0].attn.c_attn.bias
    assert str(fused.placements) == "(Replicate(), _StridedShard(dim=0, sf=2), _StridedShard(dim=0, sf=3))"
    layout = Layout.of(fused)
    assert (layout.rows, layout.tp_dim, layout.tp_groups) == (True, 0, 3)
    assert model.transformer.wte.weight.to_local().shape == (13, 32)  # of 51 rows the last 25, of them 13
    assert model.lm_head.weight is model.transformer.wte.weight


@on_ranks(2)
def test_query_key_and_value_sum_the_gradient_of_their_input_once() -> None:
    model = built(Decoder)
    parallelize_model(model, config())
    with Collectives() as counted:
        loss = loss_of(model, token_batch())
        forward = counted.counts["all_reduce"]
        loss.backward()
    # Forward: the embedding, two a block (the head gathers). Backward: the head, two a block.
    assert (forward, counted.counts["all_reduce"] - forward) == (5, 5)


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_mixed_precision_is_fsdp2s_on_one_data_parallel_rank_too(ranks: int) -> None:
    reference, model = built(Decoder), built(Decoder)
    done = parallelize_model(model, config(), precision="amp_bf16")
    loss_of(reference, token_batch()).backward()
    loss_of(model, part_of(token_batch(), done.mesh)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    far = [(gather(p.grad) - q.grad).norm() / q.grad.norm().clamp(min=1e-3) for p, q in pairs]  # type: ignore
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert len(done.plan.units) == 3
    assert 1e-4 < max(far) < 0.05


def drop_out() -> tuple[Tensor, Tensor, Tensor]:
    """Losses of a model with dropout on ranks that were seeded differently, and what is drawn afterwards."""
    model = built(lambda: Decoder(dropout=0.5))
    torch.manual_seed(dist.get_rank())
    parallelize_model(model, config())
    first, second = (loss_of(model, token_batch()).detach() for _ in range(2))
    return first, second, torch.rand(1)


def test_dropout_draws_the_same_on_ranks_that_share_activations() -> None:
    (first, second, drawn), other = run(drop_out, 2)
    assert (first, second, drawn) == other
    assert first != second


@on_ranks(4)
def test_torchs_own_style_objects_are_taken() -> None:
    """One of them by a rule; two microbatches under no_sync."""
    reference, model = built(UnevenMlp), built(UnevenMlp)
    sequence = SequenceParallel(sequence_dim=1, use_local_output=True)
    done = parallelize_model(
        model,
        config(
            plan={"up": ColwiseParallel(), "norm": sequence},
            rules=[Rule("down", tp=RowwiseParallel()), Rule("", shard=True)],
        ),
    )
    torch.manual_seed(0)
    x = torch.randn(4, 8, 8)
    model.norm.register_forward_hook(lambda module, args, output: torch.cat([output, output], 1))
    reference.norm.register_forward_hook(lambda module, args, output: torch.cat([output, output], 1))
    mine = part_of(x, done.mesh)
    with no_sync(model):
        model(mine).square().mean().backward()
    model(mine).square().mean().backward()
    (2 * reference(x).square().mean()).backward()
    found = {n: gather(p.grad) for n, p in model.named_parameters() if "norm" not in n}
    close(found, {n: p.grad for n, p in reference.named_parameters() if "norm" not in n})
    placed = {name: str(parameter.placements) for name, parameter in model.named_parameters()}
    assert placed["up.weight"].endswith("Shard(dim=0))")
    assert placed["down.weight"].endswith("Shard(dim=1))")
    assert placed["norm.weight"] == "(Shard(dim=0), Replicate())"


def _single(weight: nn.Parameter) -> None:
    torch.optim.SGD([weight], 0.1, foreach=False).step()


def _foreach(weight: nn.Parameter) -> None:
    torch.optim.AdamW([weight], 0.1, foreach=True).step()


def _fused(weight: nn.Parameter) -> None:
    torch.optim.AdamW([weight], 0.1, fused=True).step()


def _twice(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _part(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.to_local().mul_(2)


@pytest.mark.parametrize("change", [_single, _foreach, _fused, _twice, _part])
@on_ranks(2)
def test_cut_weights_that_change_between_a_forward_and_its_backward_are_refused(
    change: Callable[[nn.Parameter], None],
) -> None:
    model = built(lambda: UnevenMlp(6))
    parallelize_model(model, config(tp=2, plan={"up": "colwise", "down": "rowwise"}))
    x = torch.ones(4, 8)
    for _ in range(2):  # gradients are accumulated
        model(x).sum().backward()
    refused, later = model(x).sum(), model(x).sum()
    later.backward()
    change(model.down.weight)
    found = model(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace|has changed since"):
        refused.backward()
    found.backward()


@pytest.mark.promise(31)
@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_what_is_refused_is_named_and_changes_nothing(ranks: int) -> None:
    model = built(lambda: Decoder(num_heads=4, num_kv_heads=1))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    text = "(GroupedAttention) have num_kv_heads=1, which tp=2 does"
    with fails(ParallelismValueError, "layers.0.attention", f"layers.1.attention {text}"):
        parallelize_model(model, config())
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert model.layers[0].attention.num_heads == 4
    assert "forward" not in vars(model.head)
    model = built(Decoder)
    parallelize_model(model, config(sequence_parallel=True))
    if ranks == 4:
        with fails(
            ParallelismRuntimeError, "head was used while its parameters are sharded", "the root only"
        ):
            model.head(torch.ones(1, 16))
    else:
        with fails(ParallelismValueError, "the 7 positions", "pad the sequences"):
            model(token_batch()[:, :7])
    with summon_full_params(model):
        assert type(model.head.weight) is nn.Parameter
        assert model.head.weight.shape == (21, 16)
        with fails(ParallelismRuntimeError, "outside of summon_full_params"):
            model.head(torch.ones(1, 16))
    model = built(llama)
    parallelize_model(model, config())
    for again in (ParallelismConfig(), config(), "ddp"):
        with fails(ParallelismError, "The model is already sharded"):
            parallelize_model(model, again)


@on_ranks(4)
def test_states_are_whole_beside_context_parallelism() -> None:
    model = built(llama)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2, tp=2), tp=TPConfig()))
    same(full_model_state(model, ranks="all"), expected)
