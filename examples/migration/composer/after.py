"""The same classifier, sharded by composer_dist. Run it with torchrun --nproc-per-node 2 after.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composer_dist import ComposerClassifier, FSDP2Config, Trainer
from composer_dist.distributed import process_group
from composer_dist.trainer import InMemoryLogger


def build_model() -> ComposerClassifier:
    """Four layers; each is a unit of FSDP."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    module = nn.Sequential(*layers, nn.Linear(16, 4))
    module.fsdp_wrap_fn = lambda one: isinstance(one, nn.Sequential | nn.Linear)
    return ComposerClassifier(module, num_classes=4)


def main() -> list[float]:
    """Train, and return the loss of each batch."""
    process_group.init()
    torch.manual_seed(7)
    inputs = torch.randn(128, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = build_model()
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)),
        max_duration="1ep",
        device_train_microbatch_size=4,
        parallelism_config=FSDP2Config(reshard_after_forward=False),
        precision="fp32",
        loggers=[logger],
        progress_bar=False,
    )
    trainer.fit()
    return logger.values("loss/train/total")


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
