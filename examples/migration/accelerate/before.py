"""A loop of accelerate with its FSDP2 (DDP on CPUs). Run it with torchrun --nproc-per-node 2 before.py."""

import tempfile
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_model() -> nn.Module:
    """Three layers."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def main() -> list[float]:
    """Train, save; return the loss of each step on this rank."""
    sharded: dict[str, Any] = {"cpu": True}
    if torch.cuda.is_available():  # accelerate has FSDP on accelerators only
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Sequential"],
            reshard_after_forward=True,
        )
        sharded = {"fsdp_plugin": plugin}
    accelerator = Accelerator(gradient_accumulation_steps=2, **sharded)
    set_seed(7)
    inputs = torch.randn(128, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    losses = []
    for batch, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    (path,) = broadcast_object_list([tempfile.mkdtemp()])
    accelerator.save_state(path)
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
