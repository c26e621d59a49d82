"""Runs of transformers' and TRL's trainers: in one process, and with ComposerDistMixin on several ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kit.compare import close, weights
from tests.kit.huggingface import llama
from tests.kit.worker import forget_accelerate

BATCH = 8
"""Rows in each step, of all ranks together."""


class Ran(NamedTuple):
    """What a run logged at each step, and the parameters at its end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def same_training(found: Ran, expected: Ran) -> None:
    """Equal to rounding, of which AdamW makes more where a gradient is almost zero."""
    assert len(expected.losses) > 1
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    close(found.parameters, expected.parameters, rtol=1e-4, atol=5e-5)


def rows(count: int = 48, seed: int = 1) -> list[dict[str, list[int]]]:
    """Sequences of 12 tokens, the first of which have no label: as many as the row's number says."""
    ids = torch.randint(3, 50, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [
        {"input_ids": one.tolist(), "labels": [-100] * (row % 7) + one.tolist()[row % 7 :]}
        for row, one in enumerate(ids)
    ]


def arguments(folder: Path | str, cls: Any = None, share: int = 1, **options: Any) -> Any:
    """Arguments on the CPU; `share` ranks divide the rows of a step."""
    from transformers import TrainingArguments

    micro = BATCH // share // options.get("gradient_accumulation_steps", 1)
    fixed = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    sizes = {"per_device_train_batch_size": micro, "per_device_eval_batch_size": BATCH // share}
    rates = {"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "max_steps": 4}
    return (cls or TrainingArguments)(output_dir=str(folder), **(fixed | sizes | rates | options))


def made(
    folder: Path | str,
    config: Any = None,
    model: Callable[[], Any] = llama,
    trainer: dict[str, Any] | None = None,
    kinds: Callable[[], tuple[Any, Any]] | None = None,
    **options: Any,
) -> Any:
    """A trainer of the rows.

    Args:
        folder: its output.
        config: the mixin's parallelism; None leaves the mixin out.
        model: makes the model.
        trainer: further arguments of the trainer.
        kinds: gives the classes of the trainer and of its arguments, by default transformers' own.
        **options: of its arguments.
    """
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, default_data_collator

    forget_accelerate()
    plain, settings = kinds() if kinds else (Trainer, TrainingArguments)
    given: dict[str, Any] = {} if kinds else {"data_collator": default_data_collator}
    given |= {"train_dataset": Dataset.from_list(rows())} | (trainer or {})
    torch.manual_seed(0)
    built = model()
    if config is None:
        return plain(model=built, args=arguments(folder, settings, **options), **given)
    args = arguments(folder, settings, share_of(config), **options)
    return mixed(plain)(model=built, args=args, parallelism=config, **given)


def mixed(trainer: Any) -> Any:
    """The class with the mixin."""
    from composer_dist.integrations.transformers import ComposerDistMixin

    return type(trainer.__name__, (ComposerDistMixin, trainer), {})


def share_of(config: Any) -> int:
    """How many ranks have rows of their own."""
    mesh = config.get("mesh", {}) if isinstance(config, dict) else {}
    peers: int = mesh.get("tp", 1) * mesh.get("cp", 1)
    return int(os.environ.get("WORLD_SIZE", "1")) // peers


def run(folder: Path | str, config: Any = None, resume: str | bool | None = None, **options: Any) -> Ran:
    """Train as `made` says, from the beginning or from a checkpoint."""
    trainer = made(folder, config, **options)
    trainer.train(resume_from_checkpoint=resume)
    return result(trainer)


def result(trainer: Any) -> Ran:
    """What it logged, and the parameters."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = [entry["loss"] for entry in history], [entry["grad_norm"] for entry in history]
    found = weights(trainer.model)
    found |= {
        name: one.get_original_weight() for name, one in found.items() if hasattr(one, "quantized_data")
    }
    return Ran(losses, norms, found)
