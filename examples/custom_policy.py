"""A model and a wrap policy of your own: `torchrun --nproc-per-node 2 examples/custom_policy.py`.

The two towers are units of their own; the small heads stay with the root, so that they cost no collective.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from composer_dist import ComposerModel, Trainer
from composer_dist.distributed import Preparation, init_context, parallelize_model, process_group
from composer_dist.trainer import DistributedDataLoader


def tower() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(64), *(one for _ in range(4) for one in (nn.Linear(64, 64), nn.GELU())))


class TwoTowers(ComposerModel):
    """Says whether two things belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = tower(), tower()
        self.left_head, self.right_head = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        left, right = self.left_head(self.left(batch["left"])), self.right_head(self.right(batch["right"]))
        return (left * right).sum(-1)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, batch["same"])


def pairs(count: int) -> list[dict[str, Tensor]]:
    left, noise = torch.randn(2, count, 64, generator=torch.Generator().manual_seed(0))
    same = torch.arange(count) % 2
    right = torch.where(same.bool()[:, None], left, noise)
    return [{"left": a, "right": b, "same": c} for a, b, c in zip(left, right, same.float(), strict=True)]


def main(steps: int = 60) -> Preparation:
    process_group.init()
    with init_context():  # no memory: each rank initializes its shards
        model = TwoTowers()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The policy says whether a module is a unit of its own.
    done = parallelize_model(model, "fsdp", adam, fsdp_wrap_policy=lambda one: isinstance(one, nn.Sequential))
    if process_group.world_and_rank()[1] == 0:
        print(done)
    data = DistributedDataLoader(pairs(512), global_batch_size=32, shuffle=True)
    trainer = Trainer(model=model, train_dataloader=data, optimizers=adam, max_duration=f"{steps}ba", seed=0)
    with trainer:
        trainer.fit()
    return done


if __name__ == "__main__":
    main()
