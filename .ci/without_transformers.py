"""Plan, train, verify and save a plain module in an environment that has neither transformers nor peft."""

import importlib.util

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer_dist import ComposerClassifier, Trainer
from composer_dist.checkpoint import load_checkpoint, save_checkpoint
from composer_dist.distributed import plan_parallelism, verify_model
from composer_dist.models import DPOModel, HuggingFaceModel, LanguagePerplexity, TokenAccuracy

NAMES = (DPOModel, HuggingFaceModel, LanguagePerplexity, TokenAccuracy)  # importing them needs neither


def main() -> None:
    """Use what needs no other library."""
    assert not any(map(importlib.util.find_spec, ("transformers", "peft")))
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    print(plan_parallelism(module, "fsdp", world_size=2))
    rows = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    model = ComposerClassifier(module, num_classes=2)
    with Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        train_dataloader=DataLoader(rows, batch_size=4),
        max_duration="1ep",
        parallelism_config="fsdp",
    ) as trainer:
        trainer.fit()
        assert verify_model(model).ok
        save_checkpoint("saved", {"model": model, "step": 1})
        state = {"model": model, "step": 0}
        load_checkpoint("saved", state)
        assert state["step"] == 1


if __name__ == "__main__":
    main()
