"""A classifier, sharded by Composer. Run it with torchrun --nproc-per-node 2 before.py."""

import torch
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.utils import dist, reproducibility
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_model() -> ComposerClassifier:
    """Four layers; each is a unit of FSDP."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    module = nn.Sequential(*layers, nn.Linear(16, 4))
    module.fsdp_wrap_fn = lambda one: isinstance(one, nn.Sequential | nn.Linear)
    return ComposerClassifier(module, num_classes=4)


def main() -> list[float]:
    """Train, and return the loss of each batch."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    dist.initialize_dist(device)
    reproducibility.seed_all(7)
    inputs = torch.randn(128, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = build_model()
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=DataLoader(data, batch_size=8, sampler=dist.get_sampler(data)),
        max_duration="1ep",
        device_train_microbatch_size=4,
        parallelism_config={"fsdp2": {"reshard_after_forward": False, "activation_checkpointing": False}},
        precision="fp32",
        device=device,
        loggers=[logger],
        progress_bar=False,
    )
    trainer.fit()
    return [float(value) for _, value in logger.data["loss/train/total"]]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
