"""Tensor parallelism, pure and with FSDP2, against the model on a single process."""

from collections.abc import Callable
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
from composer_dist.distributed.moving.whole import gather
from composer_dist.distributed.plan.build import build_plan
from composer_dist.distributed.steps import divide
from composer_dist.distributed.weights.storage import give_memory
from composer_dist.distributed.wishes import Request
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError
from composer_dist.structure.structure import read_structure
from tests.kit.compare import close, part_of, same
from tests.kit.decoder import Decoder, UnevenMlp, loss_of, token_batch
from tests.kit.huggingface import gpt2, llama, lora_gpt2, lora_llama, phi3, qwen3, tied_llama
from tests.kit.measure import Collectives
from tests.kit.toy import built
from tests.kit.world import run

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


def train(make: Make, settings: ParallelismConfig, before: int = 0, **options: Any) -> str:
    """Three steps, clipped, beside the reference; the full state, out of the model and into it."""
    reference, model = built(make), built(make)
    expected, optimizer = adam(reference), adam(model, **options)
    for step in range(before):
        for one, stepper in ((reference, expected), (model, optimizer)):
            loss_of(one, token_batch(step)).backward()
            stepper.step()
            stepper.zero_grad()
    done = parallelize_model(model, settings, optimizer)
    for step in range(3):
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


def check_mlp(tp: int, inner: int) -> dict[str, Any]:
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
    return {n: getattr(p, "placements", None) for n, p in model.named_parameters()} | {
        "shape": model.up.weight.to_local().shape
    }


@pytest.mark.promise(30)
def test_a_pair_of_matrices_equals_the_reference_forward_and_backward() -> None:
    for found in run(check_mlp, 2, 2, 6):
        assert found["up.weight"] == (Shard(0),)
        assert found["up.bias"] == (Shard(0),)
        assert found["down.weight"] == (Shard(1),)
        assert found["down.bias"] is None
        assert found["norm.weight"] is None
        assert found["shape"] == (3, 8)


def test_uneven_parts_equal_the_reference_too() -> None:
    assert [found["shape"] for found in run(check_mlp, 4, 4, 7)] == [(2, 8), (2, 8), (2, 8), (1, 8)]


@pytest.mark.promise(30, 32)
@pytest.mark.parametrize(
    ("ranks", "make"),
    [
        *((2, make) for make in (Decoder, llama, gpt2, lora_llama, qwen3, phi3)),
        *((4, make) for make in (Decoder, llama, gpt2, lora_llama, lora_gpt2)),
    ],
)
def test_tensor_parallel_alone_and_with_fsdp2_equals_the_reference(ranks: int, make: Make) -> None:
    run(train, ranks, make, config())


@pytest.mark.promise(83)
def test_an_optimizer_with_state_follows_through_both() -> None:
    run(train, 4, gpt2, config(), before=2)


def test_hsdp_and_foreach_optimizers_go_with_it() -> None:
    run(train, 4, tied_llama, config(replicas=2), foreach=True)


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
        (4, gpt2, SEQUENCE),
        (2, lora_llama, SEQUENCE),
        (2, llama, SEQUENCE | {"loss_parallel": True}),
        (4, llama, SEQUENCE | {"loss_parallel": True}),
        (2, llama, SEQUENCE | {"activation_checkpointing": "composable"}),
        (2, llama, SEQUENCE | {"activation_checkpointing": "wrapped"}),
        *((2, Decoder, recomputed(mode)) for mode in ("composable", REENTRANT)),
        *((2, Decoder, recomputed(mode, **SEQUENCE)) for mode in ("composable", REENTRANT)),
    ],
)
def test_sequence_and_loss_parallel_and_checkpointing_equal_the_reference(
    ranks: int, make: Make, options: dict[str, Any]
) -> None:
    for explained in run(train, ranks, make, config(**options)):
        assert "Tensor parallel" not in explained


def deliver(make: Make, transport: Any) -> bool:
    """Weights of rank 0 where the others have none; initialization where nobody has any."""
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
    return True


@pytest.mark.parametrize(("world", "transport"), [(2, "auto"), (4, "messages")])
@pytest.mark.parametrize("make", [Decoder, gpt2], ids=lambda make: make.__name__)
def test_weights_come_from_rank_0_or_from_initializers_bit_for_bit(
    make: Make, world: int, transport: str
) -> None:
    assert run(deliver, world, make, transport) == [True] * world


def lightnings_mesh() -> str:
    """A mesh of the user's own, whose dimensions have the names of Lightning's."""
    reference, model = built(UnevenMlp), built(UnevenMlp)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = TPConfig(plan={"up": "colwise", "down": "rowwise"})
    parallelize_model(model, ParallelismConfig(mesh=mesh, tp=plan), torch.optim.SGD(model.parameters()))
    same(full_model_state(model, ranks="all"), reference.state_dict())
    torch.testing.assert_close(model(torch.ones(2, 8)), reference(torch.ones(2, 8)))
    return str(dict(named_parameters_canonical(model))["up.weight"].placements)


@pytest.mark.promise(3)
def test_a_mesh_of_the_users_own_is_read_by_its_names() -> None:
    assert set(run(lightnings_mesh, 4)) == {"(_StridedShard(dim=0, sf=2), Shard(dim=0))"}


def test_eight_ranks_replicate_shard_and_cut() -> None:
    dist.init_process_group("fake", rank=5, world_size=8)
    settings = ParallelismConfig(mesh=MeshConfig(dp_replicate=2, dp_shard=2, tp=2), tp=TPConfig())
    model, mesh = built(gpt2, device="meta"), mesh_for(settings.mesh)
    structure = read_structure(model)
    plan = build_plan(structure, Request(config=settings), mesh.sizes)
    local = give_memory(structure, divide(structure, plan, mesh)[1], torch.device("cpu"))
    fused = model.transformer.h[0].attn.c_attn.bias
    assert str(fused.placements) == "(Replicate(), _StridedShard(dim=0, sf=2), _StridedShard(dim=0, sf=3))"
    layout = Layout.of(fused)
    assert (layout.rows, layout.tp_dim, layout.tp_groups) == (True, 0, 3)
    assert local["transformer.wte.weight"].shape == (13, 32)  # of 51 rows the last 25, of them 13
    assert model.lm_head.weight is model.transformer.wte.weight


def count() -> list[int]:
    """All-reduces of a forward, and of a backward."""
    model = built(Decoder)
    parallelize_model(model, config())
    with Collectives() as counted:
        loss = loss_of(model, token_batch())
        forward = counted.counts["all_reduce"]
        loss.backward()
    return [forward, counted.counts["all_reduce"] - forward]


def test_query_key_and_value_sum_the_gradient_of_their_input_once() -> None:
    # Forward: the embedding, two a block (the head gathers). Backward: the head, two a block.
    assert run(count, 2) == [[5, 5]] * 2


def low_precision() -> tuple[int, float]:
    """Gradients of a model that computes in bfloat16, against one that does not; their relative distance."""
    reference, model = built(Decoder), built(Decoder)
    done = parallelize_model(model, config(), precision="amp_bf16")
    loss_of(reference, token_batch()).backward()
    loss_of(model, part_of(token_batch(), done.mesh)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    far = [(gather(p.grad) - q.grad).norm() / q.grad.norm().clamp(min=1e-3) for p, q in pairs]  # type: ignore
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    return len(done.plan.units), float(max(far))


@pytest.mark.parametrize("world", [2, 4])
def test_mixed_precision_is_fsdp2s_on_one_data_parallel_rank_too(world: int) -> None:
    for units, distance in run(low_precision, world):
        assert units == 3
        assert 1e-4 < distance < 0.05


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


def with_torch_styles() -> dict[str, Any]:
    """Torch's style objects, one of them by a rule; two micro-batches under no_sync."""
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
    return {name: str(parameter.placements) for name, parameter in model.named_parameters()}


def test_torchs_own_style_objects_are_taken() -> None:
    for found in run(with_torch_styles, 4):
        assert found["up.weight"].endswith("Shard(dim=0))")
        assert found["down.weight"].endswith("Shard(dim=1))")
        assert found["norm.weight"] == "(Shard(dim=0), Replicate())"


AGAIN = "The model is already sharded; prepare an unsharded model, once."


def misuse() -> list[str]:
    """What is called out of turn is refused, and what is refused leaves the model as it was."""
    texts = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises((ParallelismRuntimeError, ParallelismValueError)) as error:
            call()
        texts.append(str(error.value))

    model = built(lambda: Decoder(num_heads=4, num_kv_heads=1))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    refused(lambda: parallelize_model(model, config()))
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert model.layers[0].attention.num_heads == 4
    assert "forward" not in vars(model.head)
    model = built(Decoder)
    done = parallelize_model(model, config(sequence_parallel=True))
    if done.plan.units:
        refused(lambda: model.head(torch.ones(1, 16)))
    else:
        refused(lambda: model(token_batch()[:, :7]))
    with summon_full_params(model):
        assert type(model.head.weight) is nn.Parameter
        assert model.head.weight.shape == (21, 16)
        refused(lambda: model.head(torch.ones(1, 16)))
    model = built(llama)
    parallelize_model(model, config())
    for again in (ParallelismConfig(), config()):
        refused(lambda again=again: parallelize_model(model, again))
    return texts


@pytest.mark.promise(31)
def test_what_is_refused_is_named_and_changes_nothing() -> None:
    for texts in run(misuse, 2):
        assert "layers.0.attention (GroupedAttention) has num_kv_heads=1, which tp=2 does" in texts[0]
        assert "layers.1.attention (GroupedAttention) has num_kv_heads=1" in texts[0]
        assert "the 7 positions" in texts[1]
        assert "pad the sequences" in texts[1]
        assert "outside of summon_full_params" in texts[2]
        assert texts[3:] == [AGAIN] * 2
    for texts in run(misuse, 4):
        assert "while its weight is sharded; call the prepared model" in texts[1]


def read_back() -> None:
    model = built(llama)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2, tp=2), tp=TPConfig()))
    same(full_model_state(model, ranks="all"), expected)


def test_states_are_whole_beside_context_parallelism() -> None:
    run(read_back, 4)
