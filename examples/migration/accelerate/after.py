"""The same loop of accelerate with composer_dist. Run it with torchrun --nproc-per-node 2 after.py."""

import tempfile

import torch
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_dist import ParallelismConfig, Rule
from composer_dist.integrations.accelerate import ComposerAccelerator


def build_model() -> nn.Module:
    """Three layers."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def main() -> list[float]:
    """Train, save; return the loss of each step on this rank."""
    units = [Rule(nn.Sequential, shard=True)]  # of a transformer they are known
    accelerator = ComposerAccelerator(ParallelismConfig(rules=units), gradient_accumulation_steps=2)
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
