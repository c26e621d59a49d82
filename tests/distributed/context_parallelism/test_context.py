"""`context_parallel`: loss, gradients and steps equal those of one process with the whole sequence."""

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_attention

from composer_dist import MeshConfig, ParallelismConfig, TPConfig
from composer_dist.distributed import (
    build_mesh,
    context_parallel,
    named_parameters_canonical,
    parallelize_model,
    sampler_kwargs,
)
from composer_dist.distributed.mesh.mesh import Mesh
from composer_dist.distributed.prepared import record
from composer_dist.errors import ParallelismKeyError, ParallelismRuntimeError, ParallelismValueError
from tests.kit.compare import full
from tests.kit.grids import slow
from tests.kit.huggingface import gpt2, llama
from tests.kit.toy import built
from tests.kit.world import WorkerError, World, on_ranks

VOCABULARY, WIDTH, LENGTH = 24, 16, 16
BUFFERS = {"table": 0}
ADAM = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Attention(nn.Module):
    """Two heads; `mix` is what it mixes positions by."""

    def __init__(self, causal: bool, mix: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.is_causal, self.mix = causal, mix
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        mixed = (self.mix or F.scaled_dot_product_attention)(*heads, is_causal=self.is_causal)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Plain(nn.Module):
    """Two blocks of attention, and a table of positions among the buffers."""

    def __init__(self, causal: bool = True, mix: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention(causal, mix) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("table", torch.randn(2 * LENGTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table[: ids.shape[1]]
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)))
        out: Tensor = self.head(x)
        return out


class Adapted(Plain):
    """Runs modules on a matrix too, as DoRA does, which has as many columns as a rank's few positions."""

    def __init__(self, causal: bool) -> None:
        super().__init__(causal)
        self.down, self.up = nn.Linear(VOCABULARY, 4, bias=False), nn.Linear(4, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        norm = self.up(self.down(torch.eye(VOCABULARY))).norm(dim=0)
        out = super().forward(ids)
        return out + self.up(self.down(out)) / norm


class Pooled(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1)


class OwnLoss(Plain):
    """Averages over the labels that it sees, unless it is told how many there are."""

    def forward(
        self, ids: Tensor, labels: Tensor, num_items_in_batch: float | None = None
    ) -> dict[str, Tensor]:
        logits = super().forward(ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def padded(step: int) -> dict[str, Tensor]:
    """The first labels of the first rows count for nothing, and the last rows are padded on the right."""
    ids = tokens(step)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:2, : 3 + step] = -100
    labels[2:, 11 + step :] = -100
    mask[2:, 11 + step :] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def own_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def square(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()


def rows(batch: Any, count: int, index: int) -> Any:
    """Part `index` of `count` of the samples."""
    if isinstance(batch, Tensor):
        return batch.chunk(count)[index]
    return {name: tensor.chunk(count)[index] for name, tensor in batch.items()}


def same_training(
    build: Callable[[], nn.Module],
    batch_of: Callable[[int], Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    mesh: dict[str, int],
    tolerance: float = 1e-4,
    config: dict[str, Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM,
    **options: Any,
) -> None:
    """Two steps of a model under context parallelism beside an unsharded one's with the same weights."""
    reference, model = built(build), built(build)
    optimizers = [optimizer(m.parameters()) for m in (reference, model)]
    settings = ParallelismConfig(mesh=MeshConfig(**mesh), **(config or {}))
    done = parallelize_model(model, settings, optimizers[1])
    count, index = sampler_kwargs(done.mesh).values()
    assert count * mesh["cp"] * mesh.get("tp", 1) == dist.get_world_size()
    for step in range(2):
        whole = batch_of(step)
        expected = torch.stack([loss_of(reference, rows(whole, count, i)) for i in range(count)]).mean()
        expected.backward()
        with context_parallel(model, rows(whole, count, index), **options) as part:
            ids = part if isinstance(part, Tensor) else part["input_ids"]
            assert ids.shape == (4 // count, LENGTH // mesh["cp"])
            loss = loss_of(model, part)
            loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        torch.testing.assert_close(mean, expected.detach(), rtol=tolerance / 10, atol=0)
        alike(reference, model, lambda p: p.grad, tolerance)
        for one in optimizers:
            one.step()
            one.zero_grad()
        alike(reference, model, lambda p: p.detach(), tolerance)
    for one in (reference, model):
        one.eval()
    with torch.no_grad():  # every rank has the whole sequence
        outputs = [one(rows(tokens(7), count, index)) for one in (reference, model)]
    logits = [full(one if isinstance(one, Tensor) else one.logits) for one in outputs]
    assert (logits[1] - logits[0]).abs().max() < tolerance * logits[0].abs().max()


def alike(
    reference: nn.Module, model: nn.Module, part: Callable[[nn.Parameter], Any], tolerance: float
) -> None:
    theirs = dict(named_parameters_canonical(model))
    for name, parameter in reference.named_parameters():
        expected, found = part(parameter), full(part(theirs[name]))
        difference = (found - expected).abs().max() / expected.abs().max()
        assert difference < tolerance, (name, float(difference))


# Dynamo looks whether a non-leaf tensor has a gradient, and hides torch's warning by a filter of its own.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [slow("llama"), slow("gpt2"), "bidirectional", "compiled"])
@on_ranks(2, timeout=180)
def test_cp_on_two_ranks_equals_one_process(kind: str) -> None:
    mesh = {"cp": 2}
    if kind == "llama":
        recomputed = {"activation_checkpointing": "composable"}
        same_training(llama, padded, own_loss, mesh, config=recomputed)
    elif kind == "gpt2":
        # Adam would blow up what rounding leaves of the gradient of the keys' biases, which is zero.
        same_training(gpt2, padded, own_loss, mesh, optimizer=SGD)
    elif kind == "bidirectional":
        same_training(partial(Adapted, False), tokens, square, mesh, buffers=BUFFERS)
    else:
        compiled = {"compile": {"backend": "aot_eager"}}
        same_training(partial(llama, use_cache=False), padded, own_loss, mesh, config=compiled)


@pytest.mark.slow
@on_ranks(4, timeout=180)
def test_cp_beside_data_and_tensor_parallelism_equals_one_process() -> None:
    same_training(Plain, tokens, square, {"dp_replicate": 2, "dp_shard": 1, "cp": 2}, buffers=BUFFERS)
    cut = {"tp": TPConfig(sequence_parallel=True, loss_parallel=True)}
    mesh = {"dp_shard": 1, "cp": 2, "tp": 2}
    same_training(llama, padded, own_loss, mesh, config=cut, optimizer=SGD)
    same_training(Plain, tokens, square, {"cp": 4}, buffers=BUFFERS, balanced=False)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "cp": 2}, {"cp": 4}])
@on_ranks(4, timeout=180)
def test_cp_of_a_llama_on_four_ranks_equals_one_process(mesh: dict[str, int]) -> None:
    same_training(llama, padded, own_loss, mesh)


def by_import(*heads: Tensor, is_causal: bool) -> Tensor:
    return imported_attention(*heads, is_causal=is_causal)


def of_its_own(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return (query @ key.transpose(-1, -2)).tril().softmax(-1) @ value


def with_a_mask(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, mask)


class Positions(Plain):
    """Learned positions, counted in each part from zero; those are what `std` makes them."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.positions = nn.Parameter(std * torch.randn(LENGTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids) + self.positions[: ids.shape[1]])
        return out


class Gated(Plain):
    """Mixes positions behind a gate, in training only."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((), gate))

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        return out + self.gate * out.roll(1, 1) if self.training else out


class Silent(Plain):
    """Attention of its own, whose output projection is initialized to zero, as in many recipes."""

    def __init__(self) -> None:
        super().__init__(mix=of_its_own)
        for layer in self.layers:
            nn.init.zeros_(cast(nn.Linear, layer.o).weight)


class Long(Plain):
    """Needs more positions than the check has; its norm is initialized to ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        if x.shape[1] < LENGTH // 2:
            raise ArithmeticError("too short")
        out: Tensor = self.head(x)
        return out


class Weighed(Plain):
    """A mean over something else than labels, or with a second term."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(ids).flatten(0, 1), labels.flatten())


def without_class_zero(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=0)


def by_class(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, torch.linspace(1, 2, VOCABULARY))


def with_balance(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 0.1 * logits.softmax(-1).mean(0).square().sum() * VOCABULARY


UNFIT: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (Plain, {}, "the output of layers.0.q depends on other positions, or on where a rank's part begins"),
    (partial(Plain, mix=by_import), {"buffers": BUFFERS}, "the output of layers.0.o depends on other"),
    (partial(Plain, mix=of_its_own), {"buffers": BUFFERS}, "called by that name"),
    (partial(Plain, mix=with_a_mask), {"buffers": BUFFERS}, r"layers.0: Attention with a mask \(4, 4\)"),
    (partial(nn.Linear, LENGTH, 4), {}, "Linear raised on 4 positions: RuntimeError: .*mat1 and mat2"),
    (Pooled, {"buffers": BUFFERS}, "the output of Pooled depends on other positions"),
    (OwnLoss, {"buffers": BUFFERS}, "losses that OwnLoss computes from parts of the labels is not the whole"),
    (partial(Positions, 0.0), {}, "the output of head depends on other positions"),
    (partial(Positions, 0.02), {}, "the output of head depends on other positions"),
    (partial(Gated, 0.0), {"buffers": BUFFERS}, "the output of Gated depends on other positions"),
    (partial(Gated, 0.01), {"buffers": BUFFERS}, "the output of Gated depends on other positions"),
    (Long, {}, "Long cannot be split over the sequence. Long raised on 4 positions: .* too short"),
    (Silent, {"buffers": BUFFERS}, "the output of layers.0.o depends on other positions"),
    *(
        (
            partial(Weighed, loss),
            {"buffers": BUFFERS},
            "losses that Weighed computes from parts of the labels",
        )
        for loss in (without_class_zero, by_class, with_balance)
    ),
]


@on_ranks(2)
def test_what_mixes_positions_otherwise_is_named_before_the_first_step() -> None:
    for build, options, message in UNFIT:
        model = build()
        parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2)))
        batch: Any = {"ids": tokens(0), "labels": tokens(1)}
        batch = torch.randn(4, LENGTH) if isinstance(model, nn.Linear) else batch
        hooks = len(model._forward_hooks)
        shards = [id(parameter) for parameter in model.parameters()]
        before = {name: full(value).clone() for name, value in model.state_dict().items()}
        with pytest.raises(ParallelismValueError, match=message):  # noqa: SIM117
            with context_parallel(model, batch, **options):
                raise AssertionError(f"nothing runs before the proof: {message}")
        for name, value in model.state_dict().items():
            assert torch.equal(full(value), before[name]), name
        assert [id(parameter) for parameter in model.parameters()] == shards
        assert model.training
        assert len(model._forward_hooks) == hooks

    model = Plain()
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2)))
    with torch.no_grad():
        model(tokens(0))
    with pytest.warns(
        UserWarning, match=r"cp=2, but the model trains outside of context_parallel\(model, batch"
    ):
        model(tokens(0))
    model(tokens(0))  # said once
    with pytest.raises(ParallelismValueError, match="Ranks 0 and 1 share a sequence but have different"):
        context_parallel(model, tokens(dist.get_rank())).__enter__()
    with pytest.raises(ParallelismValueError, match="missing a required argument: 'ids'. Pass a mapping"):
        context_parallel(model, {"tokens": tokens(0)}).__enter__()
    with pytest.raises(ParallelismKeyError, match="no buffer 'tables'. Did you mean 'table'?"):
        context_parallel(model, tokens(0), buffers={"tables": 0}).__enter__()
    with (
        context_parallel(model, tokens(0), buffers=BUFFERS) as part,
        pytest.raises(ParallelismRuntimeError, match="context_parallel cannot be nested"),
    ):
        context_parallel(model, part).__enter__()


class Encoder(nn.Module):
    """torch's own layer, which evaluates with a kernel that has attention of its own; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x)
        return out


@on_ranks(2)
def test_evaluation_inside_of_the_context_attends_to_all_parts() -> None:
    torch.manual_seed(0)
    reference, x = Encoder().eval(), torch.randn(2, LENGTH, WIDTH)
    model = copy.deepcopy(reference)
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2)))
    with torch.no_grad():
        expected = reference(x)
        with context_parallel(model, x) as part:
            assert model.calls == 0
            found = model(part)
        torch.testing.assert_close(found, expected.chunk(2, 1)[dist.get_rank()])
        torch.testing.assert_close(model(x), expected)
    drawn = torch.get_rng_state()
    with context_parallel(model.train(), x):  # its dropout draws random numbers
        assert torch.equal(torch.get_rng_state(), drawn)
        assert model.calls == 2
        assert all(module.training for module in model.modules())


class Careful(Plain):
    """Trains beside frozen parts, keeps what it computes once, and must not be evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        nn.init.zeros_(self.up.weight)
        self.dropout = nn.Dropout(0.0)
        self.seen: dict[str, Tensor] = {}
        self.merged = False

    def train(self, mode: bool = True) -> Self:
        self.merged = not mode
        return super().train(mode)

    def forward(self, ids: Tensor, position_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        assert not self.merged
        if "table" not in self.seen:
            self.seen["table"] = full(self.scale).clone()
        x = self.embed(ids) + position_ids[..., None].cos()
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)) * self.seen["table"])
        torch.rand(1)  # as dropout does
        logits = self.head(x + self.up(self.down(x))).flatten(0, 1)
        return logits, F.cross_entropy(logits, labels.flatten())


@on_ranks(2)
def test_the_check_leaves_nothing_behind() -> None:
    batch = {"ids": tokens(0), "labels": tokens(1)}
    losses: dict[bool, list[float]] = {}
    for check in (False, True):
        torch.manual_seed(0)
        model = Careful()
        optimizer = SGD([one for one in model.parameters() if one.requires_grad])
        parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2)), optimizer)
        losses[check] = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16), context_parallel(model, batch, check=check) as part:
                loss = model(**part)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[check].append(loss.item())
        assert torch.equal(model.seen["table"], torch.ones(WIDTH))
    assert losses[True] == losses[False]
    assert losses[True][2] < losses[True][0]


class Failing(Plain):
    """Its forward fails on rank 1."""

    def forward(self, ids: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise OSError("no such table")
        return super().forward(ids)


def check_and_exit() -> None:
    model = Failing()
    parallelize_model(model, ParallelismConfig(mesh=MeshConfig(cp=2)))
    try:
        context_parallel(model, tokens(0)).__enter__()
    except ParallelismValueError as error:
        print(error, flush=True)
        os._exit(3)


@pytest.mark.promise(117)
def test_a_forward_that_fails_on_one_rank_ends_the_others(world2: World) -> None:
    with pytest.raises(WorkerError) as caught:
        world2(check_and_exit)
    assert "exit code 3\nFailing cannot be split over the sequence" in caught.value.errors[1]
    assert "Failing raised on 8 positions: OSError: no such table" in caught.value.errors[1]
    assert "LostRankError: Rank 1 ended while rank 0 was at 'gather layers.0'" in caught.value.errors[0]


def test_without_context_parallel_ranks_the_batch_is_the_whole_one() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    model, batch = Plain(), {"ids": tokens(0)}
    with pytest.raises(ParallelismRuntimeError, match="prepared, not Plain"):
        context_parallel(model, batch).__enter__()
    record(model).mesh = Mesh(build_mesh(MeshConfig()))
    before = F.scaled_dot_product_attention
    with context_parallel(nn.Sequential(model), batch) as part:
        assert part is batch
        assert F.scaled_dot_product_attention is before
