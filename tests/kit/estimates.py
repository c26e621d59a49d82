"""What plans say of a step, and what the step of a real prepared model does."""

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_dist.config.parallelism import MeshConfig, ParallelismConfig
from composer_dist.distributed import parallelize_model, plan_parallelism
from composer_dist.distributed.plan.memory import MemoryEstimate
from composer_dist.distributed.steps import collector_paused
from tests.kit.measure import Collectives, InTurn, by_messages, profiled


def planned_and_real_peak(
    build: Callable[[], Any], shape: tuple[int, int], config: ParallelismConfig, precision: str | None = None
) -> tuple[MemoryEstimate, int]:
    """A rank's estimate, and the most bytes of a real step with AdamW, the lesser of two.

    The real one counts every allocation of torch on the CPU, gloo's buffers included, beside what is held.

    Args:
        build: makes a model of transformers.
        shape: sequences and tokens of the batch.
        config, precision: as for `parallelize_model`, on the ranks that call this.
    """
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.device("meta"):
        alone = build().train()
    adam, ranks = torch.optim.AdamW(alone.parameters()), dist.get_world_size()
    plan = plan_parallelism(alone, config, world_size=ranks, optimizer=adam, precision=precision)
    estimate = plan.memory(shape, rank=dist.get_rank())
    parallelize_model(model, config, optimizer, precision)
    ids = torch.ones(shape, dtype=torch.long)

    def step() -> None:
        outputs = model(input_ids=ids, labels=ids, use_cache=False)  # kept, as plans assume
        outputs.loss.backward()
        del outputs
        optimizer.step()
        optimizer.zero_grad()

    with collector_paused(), InTurn(), by_messages():
        step()  # makes the optimizer's state
        step()  # DDP rebuilds its buckets
        peaks = [profiled(step) for _ in range(2)]
    always = estimate.parameters + estimate.padding + estimate.optimizer + estimate.buffers
    always += estimate.gradients if config.ddp else 0  # DDP's buckets
    return estimate, min(peaks) + always


def planned_and_allocated(
    build: Callable[[], Any], shape: tuple[int, int], config: ParallelismConfig, precision: str | None = None
) -> tuple[MemoryEstimate, int, int]:
    """For one rank on a GPU: the estimate, and the most bytes of a step that are allocated and reserved.

    The step is the fourth one, with AdamW; the bytes are those of torch's caching allocator.

    Args:
        build: makes a model of transformers.
        shape: sequences and tokens of the batch.
        config, precision: as for `parallelize_model`.
    """

    def optimized(model: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])

    config = dataclasses.replace(config, mesh=MeshConfig(device_type="cuda"))
    with torch.device("meta"):
        alone = build().train()
    plan = plan_parallelism(alone, config, world_size=1, optimizer=optimized(alone), precision=precision)
    estimate = plan.memory(shape)
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()  # cuBLAS keeps up to 64 MiB of workspace
    assert left <= 64 << 20, f"{left} bytes of something else are still allocated"
    with torch.device("cuda"):
        model, ids = build().train(), torch.ones(shape, dtype=torch.long)
    optimizer = optimized(model)
    parallelize_model(model, config, optimizer, precision)
    gc.collect()
    torch.cuda.empty_cache()
    for number in range(4):
        if number == 2:  # DDP has new buckets; NCCL's watchdog keeps the old ones until it looks again
            torch.cuda.synchronize()
            time.sleep(1)
        if number == 3:
            torch.cuda.reset_peak_memory_stats()
        outputs = model(input_ids=ids, labels=ids, use_cache=False)  # kept, as plans assume
        outputs.loss.backward()
        del outputs
        optimizer.step()
        optimizer.zero_grad()
    return estimate, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def planned_and_real_traffic(
    build: Callable[[], nn.Module],
    batch: Any,
    loss: Callable[[Any], Tensor],
    config: ParallelismConfig,
    precision: str | None = None,
) -> tuple[Counter[Any], Counter[Any]]:
    """Counts and bytes by collective and ranks: of a plan, and of the third step of a real model.

    Args:
        build: makes the model, for the plan under the meta device.
        batch: what the plan is asked about.
        loss: of the real model's step.
        config, precision: as for `parallelize_model`, on the ranks that call this.
    """
    with torch.device("meta"):
        alone = build()
    plan = plan_parallelism(alone, config, world_size=dist.get_world_size(), precision=precision)
    planned: Counter[Any] = Counter()
    rows = plan.communication(batch, rank=dist.get_rank())
    for row in (one for one in rows if one.phase != "start-up"):
        planned[row.collective, row.ranks] += row.bytes
        planned[row.collective, row.ranks, "count"] += row.count
    real = build()
    parallelize_model(real, config, precision=precision)
    sent: Counter[Any] = Counter()
    for _ in range(3):
        with by_messages(), Collectives() as found:
            loss(real).backward()
        real.zero_grad()
    for collective, ranks, nbytes in found.sent:
        sent[collective, ranks] += nbytes
        sent[collective, ranks, "count"] += 1
    return planned, sent
