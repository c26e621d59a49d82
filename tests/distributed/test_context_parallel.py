"""`composer_dist.distributed.context_parallel`: loss, gradients and steps equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from composer_dist.distributed import context_parallel, parallelize_model, sampler_kwargs
from composer_dist.distributed.config import MeshConfig, ParallelismConfig
from composer_dist.distributed.names import named_parameters_canonical
from tests.conftest import World
from tests.distributed.structures import full

VOCABULARY, WIDTH, LENGTH = 24, 16, 16


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.is_causal = causal
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.is_causal)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Plain(nn.Module):
    """Two blocks of attention over learned positions, which it has from a buffer."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention(causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("table", torch.randn(2 * LENGTH, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.table[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)))
        out: Tensor = self.head(x)
        return out


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return LlamaForCausalLM(config)


def tokens(step: int, rows: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def llama_batch(step: int) -> dict[str, Tensor]:
    """The first labels of the first rows count for nothing, and the last rows are padded on the right."""
    ids = tokens(step)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:2, : 3 + step] = -100
    labels[2:, 11 + step :] = -100
    mask[2:, 11 + step :] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def llama_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def plain_batch(step: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(step), "targets": tokens(step + 100)}


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())


def same_training(
    build: Callable[[], nn.Module],
    batch_of: Callable[[int], dict[str, Tensor]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    mesh: dict[str, int],
    **options: Any,
) -> None:
    """Three steps of a model under context parallelism and of an unsharded one with the same weights."""
    torch.manual_seed(3)
    reference = build()
    torch.manual_seed(3)
    model = build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, model)]
    done = parallelize_model(model, ParallelismConfig(mesh=MeshConfig(**mesh)), optimizers[1])
    data = sampler_kwargs(done.mesh)
    for step in range(3):
        whole = batch_of(step)
        parts = [
            {k: v.chunk(data["num_replicas"])[i] for k, v in whole.items()}
            for i in range(data["num_replicas"])
        ]
        expected = torch.stack([loss_of(reference, part) for part in parts]).mean()
        expected.backward()
        mine = parts[data["rank"]]
        before = {name: tensor.clone() for name, tensor in mine.items()}
        with context_parallel(model, mine, **options) as part:
            assert part["input_ids"].shape[1] == LENGTH // mesh["cp"]
            loss = loss_of(model, part)
            loss.backward()
        assert all(torch.equal(before[name], tensor) for name, tensor in mine.items())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach(), rtol=1e-5, atol=0)
        same(reference, model, lambda p: p.grad, 1e-4)
        for one in optimizers:
            one.step()
            one.zero_grad()
        same(reference, model, lambda p: p.detach(), 1e-4)
    reference.eval()
    model.eval()
    with torch.no_grad():  # every rank has the whole sequence
        ids = tokens(7)
        outputs = [m(ids) for m in (reference, model)]
        logits = [o if isinstance(o, Tensor) else o.logits for o in outputs]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def same(
    reference: nn.Module, model: nn.Module, part: Callable[[nn.Parameter], Any], tolerance: float
) -> None:
    theirs = dict(named_parameters_canonical(model))
    for name, parameter in reference.named_parameters():
        expected, found = part(parameter), full(part(theirs[name]))
        difference = (found - expected).abs().max() / expected.abs().max()
        assert difference < tolerance, (name, float(difference))


def _train(ranks: int) -> None:
    mesh = {"dp_shard": ranks // 2, "cp": 2}
    same_training(llama, llama_batch, llama_loss, mesh)


def test_cp2_equals_one_process(world2: World) -> None:
    world2(_train, 2)


def test_cp2_beside_dp2_equals_one_process(world4: World) -> None:
    world4(_train, 4)
