"""On a GPU, with one rank and NCCL: what other tests show on CPUs, where the device makes a difference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist import DDPConfig, FSDP2Config, ParallelismConfig
from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.distributed import clip_grad_norm, parallelize_model, process_group
from tests.kit.compare import Tensors, close, same, values, weights
from tests.kit.decoder import token_batch
from tests.kit.estimates import planned_and_allocated
from tests.kit.huggingface import llama, lora_llama
from tests.kit.toy import built
from tests.kit.training import fitted, momentum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
]
FSDP2 = FSDP2Config()
WAYS: dict[str, dict[str, Any]] = {
    "one process": {},
    "FSDP2": {"fsdp2": FSDP2},
    "FSDP2, parameters offloaded": {"fsdp2": FSDP2Config(cpu_offload=True)},
    "FSDP2, activations recomputed": {"fsdp2": FSDP2, "activation_checkpointing": "composable"},
    "FSDP2, activations offloaded": {"fsdp2": FSDP2, "activation_checkpointing": "offload"},
    "FSDP2, order unchecked": {"fsdp2": FSDP2, "check_order": False},
    "DDP": {"ddp": DDPConfig()},
}


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    process_group.init(device="cuda")
    yield
    process_group.destroy()


def on_host(tensors: Tensors) -> Tensors:
    """The tensors in host memory."""
    return {name: value.cpu() for name, value in tensors.items()}


def trained(make: Any, options: dict[str, Any] | None) -> tuple[list[float], Tensors]:
    """Losses and weights of three steps: of a plain model on the CPU, or of a prepared one on the GPU."""
    model = built(make)
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, eps=1e-3)
    if options is not None:
        parallelize_model(model, ParallelismConfig(**options), optimizer)
    losses = []
    for step in range(3):
        ids = token_batch(step).to("cpu" if options is None else "cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, on_host(weights(model))


@pytest.mark.parametrize("make", [llama, lora_llama])
@pytest.mark.parametrize("way", WAYS)
def test_three_steps_equal_those_on_the_cpu(way: str, make: Any) -> None:
    expected, found = trained(make, None), trained(make, WAYS[way])
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    close(found[1], expected[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", ["FSDP2", "FSDP2, parameters offloaded", "DDP"])
@pytest.mark.parametrize("source", ["memory", "file"])
def test_weights_arrive_bit_for_bit(source: str, way: str, tmp_path: Path) -> None:
    """The tables of rotary embeddings, which no file has, are those that a model on the CPU has."""
    real = built(llama)
    expected, path = values(real), tmp_path / "model.safetensors"
    save_file(weights(real), path)
    model = built(llama, device="meta") if source == "file" else real
    parallelize_model(model, ParallelismConfig(**WAYS[way]), weights=path if source == "file" else None)
    assert {one.device.type for one in model.parameters()} == {"cpu" if "offloaded" in way else "cuda"}
    same(on_host(values(model)), expected)


def test_meta_initialization_has_the_bits_of_an_unsharded_model() -> None:
    """The seed and the names decide, not the sharding."""
    found = []
    for way in ("one process", "FSDP2", "DDP"):
        torch.manual_seed(7)
        model = built(llama, seed=7, device="meta")
        parallelize_model(model, ParallelismConfig(**WAYS[way]))
        found.append(on_host(weights(model)))
    same(found[1], found[0])
    same(found[2], found[0])
    assert all(value.std() > 0 for name, value in found[0].items() if "norm" not in name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_comes_back(asynchronous: bool, tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = token_batch(0).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model = built(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parallelize_model(model, FSDP2, optimizer)
    step(model, optimizer)
    state, path = {"model": model, "optimizer": optimizer}, tmp_path / "checkpoint"
    pending = save_checkpoint(path, state, asynchronous=asynchronous)
    saved = on_host(weights(model))
    step(model, optimizer)
    expected = on_host(weights(model))
    if asynchronous:
        pending.wait()
    load_checkpoint(path, state)
    same(on_host(weights(model)), saved)
    step(model, optimizer)
    same(on_host(weights(model)), expected)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_the_trainer_trains_as_on_the_cpu(strategy: str, precision: str) -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        config = strategy if device == "cuda" else None
        _, log = fitted(device=device, optimizers=momentum, precision=precision, parallelism_config=config)
        losses[device] = log.values("loss/train/total")
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    ("precision", "kept"),
    [(None, None), ("amp_bf16", None), ("amp_bf16", "composable"), ("amp_bf16", "offload")],
)
@pytest.mark.parametrize("way", ["FSDP2", "DDP"])
def test_the_plan_knows_the_peak(way: str, precision: str | None, kept: str | None) -> None:
    def build() -> Any:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=32000, num_attention_heads=16, use_cache=False, **sizes)
        )

    config = ParallelismConfig(**WAYS[way], activation_checkpointing=kept)
    estimate, peak, _ = planned_and_allocated(build, (8, 1024), config, precision)
    assert peak == pytest.approx(estimate.peak, rel=0.05)
