"""Every mode with every kind of model: three optimizer steps equal those of one process."""

import itertools
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_dist.distributed import (
    clip_grad_norm,
    context_parallel,
    named_parameters_canonical,
    parallelize_model,
    sampler_kwargs,
)
from composer_dist.distributed.moving.gather import gather
from tests.kit.decoder import token_batch
from tests.kit.grids import in_the_default_run
from tests.kit.huggingface import gpt2, llama, lora_llama
from tests.kit.meshes import MESHES
from tests.kit.toy import built
from tests.kit.world import run

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own

Trained = tuple[list[float], dict[str, Tensor]]


class Mlp(nn.Module):
    """Pairs of matrices in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


MODELS = {"llama": llama, "tied gpt2": gpt2, "mlp": Mlp, "lora": lora_llama}
MODES = ("fsdp2", "fsdp4", "hsdp", "tp", "fsdp_tp", "ddp", "cp", "fsdp_cp", "hsdp_tp")


def train(kind: str, dtype: torch.dtype, mode: str | None = None) -> Trained:
    """Losses of this rank's part of the batch, and final parameters."""
    model = built(MODELS[kind]).to(dtype)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, eps=1e-3)
    rows = {"num_replicas": 1, "rank": 0}
    if mode is not None:
        rows = sampler_kwargs(parallelize_model(model, MESHES[mode][1], optimizer).mesh)
    losses = []
    for step in range(3):
        mine = token_batch(step).chunk(rows["num_replicas"])[rows["rank"]]
        inputs = {"input_ids": mine} | ({"next": mine.roll(-1, 1)} if kind == "mlp" else {"labels": mine})
        with context_parallel(model, inputs) if "cp" in (mode or "") else nullcontext(inputs) as part:
            loss = loss_of(model, part)
            loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: gather(p).detach().float() for name, p in named_parameters_canonical(model)}


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """A causal language model's own loss; the next token's for plain modules."""
    if "labels" in inputs or "shift_labels" in inputs:
        loss: Tensor = model(**inputs).loss
        return loss
    logits = model(inputs["input_ids"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), inputs["next"].flatten())


def train_all(mode: str, cells: list[tuple[str, torch.dtype]]) -> dict[tuple[str, str], Trained]:
    return {(kind, str(dtype)): train(kind, dtype, mode) for kind, dtype in cells}


def quarter(mode: str, which: int) -> list[tuple[str, torch.dtype]]:
    """A kind in float32 and one in bfloat16, by turns: the default run has one quarter of each mode."""
    turns = ((MODES.index(mode) + which + number) % 4 for number in range(len(MODELS)))
    dtypes = {0: torch.float32, 1: torch.bfloat16}
    return [(kind, dtypes[turn]) for kind, turn in zip(MODELS, turns, strict=True) if turn in dtypes]


@cache
def reference(kind: str, dtype: str) -> Any:
    return train(kind, getattr(torch, dtype.removeprefix("torch.")))


@pytest.mark.parametrize(
    ("mode", "which"),
    in_the_default_run(
        *((mode, 0) for mode in MODES if mode not in ("fsdp4", "hsdp_tp", "fsdp_cp")),
        among=itertools.product(MODES, range(4)),
    ),
)
def test_three_steps_equal_one_process(mode: str, which: int) -> None:
    ranks = run(train_all, MESHES[mode][0], mode, quarter(mode, which), timeout=180)
    for kind, dtype in ranks[0]:
        losses, expected = reference(kind, dtype)
        found = [rank[kind, dtype] for rank in ranks]
        rough = dtype == "torch.bfloat16"
        for step, want in enumerate(losses):
            mean = sum(one[0][step] for one in found) / len(found)
            assert mean == pytest.approx(want, rel=2e-2 if rough else 1e-5), (kind, dtype, step)
        for _, parameters in found:
            assert parameters.keys() == expected.keys()
            for name, value in expected.items():
                tolerance = {"rtol": 0.05, "atol": 0.02} if rough else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(
                    parameters[name], value, **tolerance, msg=lambda m, n=(kind, dtype, name): f"{n}: {m}"
                )
