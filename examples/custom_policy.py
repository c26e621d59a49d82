"""A model and a wrap policy of your own: `torchrun --nproc-per-node 2 examples/custom_policy.py`.

The two towers are units of their own; the small heads stay with the root, so that they cost no collective.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from composer_dist import ComposerModel, Trainer
from composer_dist.distributed import Preparation, init_context, parallelize_model, process_group
from composer_dist.trainer import DistributedDataLoader


def tower(width: int) -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.LayerNorm(width), *layers)


class TwoTowers(ComposerModel):
    """Says whether two things belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = tower(64), tower(64)
        self.left_head, self.right_head = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        left, right = self.left_head(self.left(batch["left"])), self.right_head(self.right(batch["right"]))
        return (left * right).sum(-1)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, batch["same"])


def policy(module: nn.Module) -> bool:
    """Whether a module is a unit of its own."""
    return isinstance(module, nn.Sequential)


def pairs(count: int) -> list[dict[str, Tensor]]:
    left, noise = torch.randn(2, count, 64, generator=torch.Generator().manual_seed(0))
    same = torch.arange(count) % 2
    right = torch.where(same.bool()[:, None], left, noise)
    return [{"left": a, "right": b, "same": c} for a, b, c in zip(left, right, same.float(), strict=True)]


def main(steps: int = 60) -> Preparation:
    """Train, and return how the model was prepared."""
    process_group.init()
    with init_context():  # no memory: each rank initializes its shards
        model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    preparation = parallelize_model(model, "fsdp", optimizer, fsdp_wrap_policy=policy)
    if process_group.world_and_rank()[1] == 0:
        print(preparation)
    trainer = Trainer(
        model=model,
        train_dataloader=DistributedDataLoader(pairs(512), global_batch_size=32, shuffle=True),
        optimizers=optimizer,
        max_duration=f"{steps}ba",
        seed=0,
    )
    with trainer:
        trainer.fit()
    return preparation


if __name__ == "__main__":
    main()
