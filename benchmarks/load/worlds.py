"""What each rank of a world does; see `benchmarks.load`."""

import importlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.rounds import reduced, timed
from composer_dist import DDPConfig, FSDP2Config, MeshConfig, ParallelismConfig, Rule, TPConfig
from composer_dist.checkpoint import full_model_state, load_checkpoint, save_checkpoint
from composer_dist.distributed import parallelize_model, plan_parallelism, process_group, unparallelize_model
from composer_dist.trainer.finetuning.schedule import Phase
from composer_dist.trainer.finetuning.selection import select

STRUCK = 37
"""The rank of 64 that fails."""
Measured = dict[str, dict[str, float]]
"""Stage to its figures."""


def stage(found: Measured, name: str, body: Callable[[], Any], made: int = 0) -> Any:
    """Run a stage on all ranks, and note what it took."""
    results: list[Any] = []
    found[name] = timed(lambda: results.append(body()), made)
    return results[0]


class Chain(nn.Sequential):
    """Small layers in ten blocks."""

    def __init__(self, layers: int, width: int = 4) -> None:
        blocks = (nn.Sequential(*(nn.Linear(width, width) for _ in range(layers // 10))) for _ in range(10))
        super().__init__(*blocks)


class Leaf(nn.Module):
    """A hundred small parameters."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(100):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        """Use all of them."""
        return x + torch.stack(list(self.parameters())).sum()


def on_rank_0(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with values on rank 0, and on meta elsewhere."""
    torch.manual_seed(0)
    with torch.device("cpu" if process_group.world_and_rank()[1] == 0 else "meta"):
        return make()


def modules(folder: Path, size: int, every: bool) -> Measured:
    process_group.init()
    found: Measured = {}
    model = on_rank_0(lambda: Chain(size))
    rules = [Rule(nn.Linear, shard=True)] if every else []
    config = ParallelismConfig(fsdp2=FSDP2Config(), rules=rules)
    stage(found, "prepare", lambda: parallelize_model(model, config))
    stage(found, "forward and backward", lambda: model(torch.ones(1, 4)).sum().backward())
    stage(found, "undo", lambda: unparallelize_model(model))
    return found


def parameters(folder: Path, size: int) -> Measured:
    process_group.init()
    found: Measured = {}
    model = on_rank_0(
        lambda: nn.Sequential(*(nn.Sequential(*(Leaf() for _ in range(size // 1000))) for _ in range(10)))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    stage(found, "prepare", lambda: parallelize_model(model, FSDP2Config(), optimizer))

    def step() -> None:
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    stage(found, "first step", step)
    stage(found, "save, with AdamW's state", lambda: save_checkpoint(folder / "checkpoint", state))
    stage(found, "load", lambda: load_checkpoint(folder / "checkpoint", state))
    stage(found, "full_model_state", lambda: full_model_state(model))
    stage(found, "undo, with AdamW's state", lambda: unparallelize_model(model, optimizer))
    return found


def tensor(folder: Path, size: int) -> Measured:
    """One matrix of so many MB, in float32."""
    process_group.init()
    rank, found = process_group.world_and_rank()[1], Measured()
    rows = size * 10**6 // 4096

    def make() -> nn.Module:
        return nn.Embedding(rows, 1024, _weight=torch.arange(float(rows))[:, None].repeat(1, 1024))

    def check() -> None:
        part = model.weight.to_local()  # type: ignore[union-attr, operator]
        first = rank * -(-rows // 2)
        wanted = torch.arange(float(first), float(first + len(part)))
        assert torch.equal(part[:, ::1023], wanted[:, None].expand(-1, 2)), "other values"

    model, part, file = on_rank_0(make), rows * 2048, folder / "model.safetensors"
    if rank == 0:
        save_file({"weight": model.weight.data}, file)  # type: ignore[dict-item]
    stage(found, "prepare from rank 0", lambda: parallelize_model(model, FSDP2Config()), part)
    check()
    stage(found, "save", lambda: save_checkpoint(folder / "checkpoint", {"model": model}))
    stage(found, "load", lambda: load_checkpoint(folder / "checkpoint", {"model": model}))
    check()
    for name, path in (
        ("prepare from safetensors", file),
        ("prepare from a checkpoint", folder / "checkpoint"),
    ):
        with torch.device("meta"):
            model = nn.Embedding(rows, 1024)
        stage(found, name, partial(parallelize_model, model, FSDP2Config(), weights=path), part)
        check()
    return found


def ranks(folder: Path, size: int) -> Measured:
    began = time.monotonic()
    process_group.init()
    joined = time.monotonic() - began
    found: Measured = {}
    model = on_rank_0(lambda: Chain(20, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    stage(found, "prepare from rank 0", lambda: parallelize_model(model, FSDP2Config(), optimizer))

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    stage(found, "first step", step)
    stage(found, "second step", step)
    stage(found, "save", lambda: save_checkpoint(folder / "checkpoint", state))
    stage(found, "load", lambda: load_checkpoint(folder / "checkpoint", state))
    process = psutil.Process()
    memory = process.memory_full_info()
    held = {
        "resident MiB": memory.rss / 2**20,
        "own MiB": memory.uss / 2**20,
        "with its share of shared pages, MiB": memory.pss / 2**20,
    }
    held |= {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "until all have joined, s": joined,
    }
    found["held"] = reduced(held)
    return found


def failing(folder: Path, size: int, kind: str) -> Measured:
    """One rank fails while the model is prepared."""

    def strike(model: nn.Module, mesh: Any) -> None:
        if process_group.world_and_rank()[1] == STRUCK:
            if kind == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("struck")

    process_group.init()
    print(f"STRIKES {time.monotonic()}", flush=True)
    parallelize_model(on_rank_0(lambda: Chain(20, 64)), FSDP2Config(), parallelize_fn=strike)
    return {}


class Block(nn.Sequential):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))


def rule_kinds(names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """What takes a list of rules, each with one rule for each name: mesh and options, or phases."""
    two, tp = MeshConfig(dp_shard=2), MeshConfig(dp_shard=1, tp=2)
    ddp = MeshConfig(dp_replicate=2, dp_shard=1)
    patterns = [f"re:{re.escape(name)}" for name in names]
    torchs = importlib.import_module("torch.distributed.tensor.parallel").ColwiseParallel
    style = {name: ("colwise", "rowwise")[number % 2] for number, name in enumerate(names)}
    blocks = [name.rpartition(".")[0] for name in names]
    return {
        "Rule(name, shard=True)": (two, {"rules": [Rule(name, shard=True) for name in names]}),
        "Rule('re:...', shard=True)": (two, {"rules": [Rule(name, shard=True) for name in patterns]}),
        "Rule(['re:...', ...])": (two, {"rules": [Rule(patterns, shard=True)]}),
        "Rule(name, act_ckpt=True)": (two, {"rules": [Rule(name, act_ckpt=True) for name in blocks]}),
        "Rule(name, skippable=...)": (two, {"rules": [Rule(name, skippable="replicate") for name in blocks]}),
        "TPConfig(plan={name: ...})": (tp, {"tp": TPConfig(plan=style)}),
        "TPConfig(plan={'re:...': ...})": (tp, {"tp": TPConfig(plan=dict.fromkeys(patterns, "colwise"))}),
        "TPConfig, torch's styles": (tp, {"tp": TPConfig(plan={name: torchs() for name in names})}),
        "Rule(name, tp=...)": (tp, {"rules": [Rule(name, tp="colwise") for name in names]}),
        "DDPConfig(ignored=[...])": (ddp, {"ddp": DDPConfig(ignored=list(names))}),
        "phases, one name each": ([Phase(params=[name]) for name in names],),
        "one phase, 're:...'": ([Phase(params=patterns)],),
        "rules that match nothing": (two, {"rules": [Rule(f"{name}.no", shard=True) for name in names]}),
    }


def rules(folder: Path, size: int) -> Measured:
    process_group.init()
    found: Measured = {}
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(2500)))
    names = [f"{number}.{number % 4}" for number in range(size)]
    for kind, given in rule_kinds(names).items():

        def body(given: tuple[Any, ...] = given) -> None:
            if len(given) == 1:
                select(given[0], model).check()
                return
            mesh, options = given
            plan_parallelism(model, ParallelismConfig(mesh=mesh, **options), world_size=2)

        if "nothing" in kind:
            stage(found, kind, partial(refused, body))
        else:
            stage(found, kind, body)
    return found


def refused(body: Callable[[], None]) -> None:
    try:
        body()
    except ValueError:
        return
    raise AssertionError("nothing was refused")
