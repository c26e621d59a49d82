"""A loop of Fabric with ModelParallelStrategy. Run it with torchrun --nproc-per-node 2 before.py."""

import os
import tempfile

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Shard each layer, and then the model."""
    for layer in model:
        if isinstance(layer, nn.Sequential):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> list[float]:
    """Train, save; return the loss of each step on this rank."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(devices=ranks, strategy=strategy, accelerator="auto")
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    inputs = torch.randn(64, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    with fabric.init_module(empty_init=False):
        layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
        model = nn.Sequential(*layers, nn.Linear(16, 4))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    losses = []
    for batch, targets in loader:
        loss = nn.functional.cross_entropy(model(batch), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    path = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(f"{path}/last", {"model": model, "optimizer": optimizer})
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
