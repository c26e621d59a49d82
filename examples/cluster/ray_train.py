"""A prepared model under Ray Train: `python examples/cluster/ray_train.py [workers]`.

Ray starts the workers and their process group; `parallelize_model` takes it as it is. With GPUs, set
`use_gpu=True`. The text is random, so that nothing has to be downloaded.
"""

import sys
from typing import Any

import torch
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import AutoModelForCausalLM, LlamaConfig

from composer_dist import FSDP2Config
from composer_dist.distributed import clip_grad_norm, init_context, parallelize_model, sampler_kwargs

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def train_worker(settings: dict[str, Any]) -> dict[str, float]:
    """What every worker does: prepare, train on its part of the batches, report; returns the last report."""
    torch.manual_seed(0)
    with init_context():
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mesh = parallelize_model(model, FSDP2Config(), optimizer).mesh
    part = sampler_kwargs(mesh)
    batches = torch.randint(64, (settings["steps"], 4, 16), generator=torch.Generator().manual_seed(1))
    for batch in batches:
        mine = batch.chunk(part["num_replicas"])[part["rank"]]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"loss": loss.item(), "norm": norm.item()}
        train.report(metrics)
    return metrics


def main(workers: int = 2, steps: int = 3) -> dict[str, Any]:
    """The last report of the first worker."""
    scaling = ScalingConfig(num_workers=workers, use_gpu=False)
    trainer = TorchTrainer(train_worker, train_loop_config={"steps": steps}, scaling_config=scaling)
    # Result.metrics are those of checkpoints (Ray 2.60), of which there are none.
    metrics: dict[str, Any] = trainer.fit().return_value
    return metrics


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))
