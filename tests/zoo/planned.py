"""Plans of toy models in every parallel mode, beside real prepared ones."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from composer_dist.config.mesh import MeshConfig
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.config.replicate import DDPConfig
from composer_dist.config.tensor_parallel import TPConfig
from composer_dist.distributed import context_parallel, parallelize_model, plan_parallelism
from composer_dist.errors import ParallelismError
from composer_dist.recipe.other_libraries import nf4
from composer_dist.tensors.inner import inner_tensors, local_part
from tests.kit.estimates import planned_and_real_traffic
from tests.zoo import toy

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "gpt2", "gpt_neox", "opt"),
    *("bloom", "falcon", "stablelm", "olmo2", "cohere", "granite", "mixtral", "qwen3_moe", "deepseek_v3"),
    *("gpt_oss", "mamba", "t5", "bart", "bert", "roberta", "modernbert", "vit", "clip", "whisper"),
)


class Way(NamedTuple):
    """A parallel mode."""

    worlds: tuple[int, ...]
    config: Callable[[int], ParallelismConfig]
    """By number of ranks."""
    adapted: Callable[[Any], Any] = lambda model: model


def _config(**sizes: int) -> ParallelismConfig:
    return ParallelismConfig(mesh=MeshConfig(**sizes), tp=TPConfig() if "tp" in sizes else None)


def _lora(model: Any) -> Any:
    import peft

    kinds, others = (nn.Linear, transformers.pytorch_utils.Conv1D), ("head", "mlp", "out_proj")
    linear = [name for name, one in model.named_modules() if isinstance(one, kinds)]
    names = [name for name in linear if not any(other in name for other in others)]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))


def _qlora(model: Any) -> Any:
    with mock.patch.multiple(nf4, _BLOCK=16, _SCALES=4):  # toy matrices are smaller than a usual block
        nf4.quantize(model)
    return _lora(model)


WAYS: dict[str, Way] = {
    "FSDP2": Way((1, 2, 4), lambda ranks: ParallelismConfig()),
    "HSDP": Way((4,), lambda ranks: _config(dp_replicate=2, dp_shard=2)),
    "TP": Way((2,), lambda ranks: _config(dp_shard=1, tp=2)),
    "FSDP2 x TP": Way((4,), lambda ranks: _config(dp_shard=2, tp=2)),
    "CP": Way((2, 4), lambda ranks: _config(dp_shard=ranks // 2, cp=2)),
    "DDP": Way((1, 2, 4), lambda ranks: ParallelismConfig(ddp=DDPConfig(find_unused_parameters=True))),
    "LoRA": Way((1, 2, 4), lambda ranks: ParallelismConfig(), _lora),
    "QLoRA": Way((1, 2, 4), lambda ranks: ParallelismConfig(), _qlora),
}


def held_by_plan_and_rank(name: str, way: str) -> str:
    """Plans and prepares toy model `name`, and makes a step with AdamW.

    Returns:
        "equal", which bytes are not, or why the model is refused.
    """
    return _answer(_held, name, way)


def sent_by_plan_and_rank(name: str, way: str) -> str:
    """Compares counts and bytes of collectives in the third step of toy model `name`; returns as above."""
    return _answer(_sent, name, way)


def _answer(compare: Callable[[str, str], str], name: str, way: str) -> str:
    warnings.simplefilter("ignore")
    try:
        return compare(name, way)
    except (ParallelismError, ValueError, NotImplementedError) as error:  # on all ranks
        return f"refused: {error}"


def _held(name: str, way: str) -> str:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    real, alone = _built(name, way), _built(name, way)
    config, optimizer = WAYS[way].config(ranks), _adam(real)
    batch = _batch(name, way)
    plan = plan_parallelism(alone, config, world_size=ranks, optimizer=_adam(alone))
    estimate = plan.memory(batch, rank=rank)
    parallelize_model(real, config, optimizer)
    with _part_of(batch, real, way) as part:
        toy.loss(real, part).backward()
    gradients = nbytes(one.grad for one in real.parameters() if one.grad is not None)
    optimizer.step()
    state = nbytes(one for values in optimizer.state.values() for one in values.values())
    found = {"parameters": nbytes(real.parameters()), "gradients": gradients, "optimizer": state}
    differ = [
        f"{key} {real_bytes - planned:+,} of {planned:,}"
        for key, real_bytes in found.items()
        if (planned := getattr(estimate, key)) != real_bytes
    ]
    return ", ".join(differ) or "equal"


def _sent(name: str, way: str) -> str:
    config = replace(WAYS[way].config(dist.get_world_size()), check_order=False)
    batch = _batch(name, way)

    def loss(model: Any) -> Tensor:
        with _part_of(batch, model, way) as part:
            return toy.loss(model, part)

    planned, sent = planned_and_real_traffic(lambda: _built(name, way).train(), batch, loss, config)
    differ = [
        f"{' '.join(map(str, key))} {sent[key]:,} for {planned[key]:,}"
        for key in sent | planned
        if sent[key] != planned[key]
    ]
    return ", ".join(differ) or "equal"


def nbytes(tensors: Iterable[Any]) -> int:
    """Of this rank's parts, quantized ones by what they consist of."""
    parts = [[*inner_tensors(one).values()] or [one] for one in tensors if isinstance(one, Tensor)]
    return sum(local_part(one).nbytes for some in parts for one in some)


def _built(name: str, way: str) -> Any:
    return WAYS[way].adapted(toy.build(name))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])


def _batch(name: str, way: str) -> dict[str, Tensor]:
    batch = dict(toy.inputs(name, toy.build(name, "meta")))
    if way == "CP":
        batch.pop("labels", None)  # some losses are not sums over positions
    return batch


@contextlib.contextmanager
def _part_of(batch: Any, model: Any, way: str) -> Iterator[Any]:
    if way != "CP":
        yield batch
        return
    with context_parallel(model, batch) as part:
        yield part
