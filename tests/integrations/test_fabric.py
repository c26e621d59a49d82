"""Fabric on several ranks gives what it gives in one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install 'composer_dist[lightning]'")

from composer_dist import DDPConfig  # noqa: E402
from composer_dist.checkpoint import full_model_state  # noqa: E402
from composer_dist.distributed import parallelize_model, sampler_kwargs, unparallelize_model  # noqa: E402
from composer_dist.errors import ParallelismRuntimeError, ParallelismValueError  # noqa: E402
from composer_dist.integrations.lightning import ComposerDistFabricStrategy  # noqa: E402
from tests.integrations.test_lightning import MODELS, WAIT, Result, same_run  # noqa: E402
from tests.kit.compare import fails, same  # noqa: E402
from tests.kit.measure import with_reductions  # noqa: E402
from tests.kit.meshes import MESHES  # noqa: E402
from tests.kit.world import World  # noqa: E402

pytestmark = [
    pytest.mark.promise(121),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
NORM, VALUE = {"max_norm": 0.05}, {"clip_val": 1e-3}


def fabric(strategy: Any = None, **options: Any) -> Any:
    """Of all ranks; without a strategy, of this process."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    os.environ["LOCAL_RANK"] = str(dist.get_rank() if dist.is_initialized() else 0)
    one = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy or "auto", **options)
    one.launch()
    return one


def trained(
    kind: str,
    mesh: str | None,
    clipping: Any = None,
    every: int = 1,
    path: str = "",
    resume: bool = False,
    full: bool = False,
    **options: Any,
) -> Result:
    """A loop as its users write it; one that resumes begins at batch 3, where the other one saves."""
    config = MESHES[mesh][1] if mesh else None
    options["save_distributed_checkpoint"] = not full
    one = fabric(ComposerDistFabricStrategy(config, **options) if mesh else None)
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)
    model, optimizer = one.setup(model, optimizer)
    replicas = sampler_kwargs(one.strategy.device_mesh)["num_replicas"] if mesh else 1
    ids: Any = torch.randint(16, (24, 5), generator=torch.Generator().manual_seed(0))
    loader = one.setup_dataloaders(DataLoader(ids, 4 // replicas))
    state, losses = {"model": model, "optimizer": optimizer, "batch": 0}, []
    if resume:
        one.load(path, state)
    for number, batch in enumerate(loader, 1):
        if number <= state["batch"]:
            continue
        last = number % every == 0
        with one.no_backward_sync(model, enabled=not last):
            loss = _loss(model, batch) / every
            one.backward(loss)
        losses.append(one.all_reduce(loss.detach().clone()).item())
        if last:
            if clipping:
                one.clip_gradients(model, optimizer, **clipping)
            optimizer.step()
            optimizer.zero_grad()
        if path and number == 3 and not resume:
            one.save(path, state | {"batch": number})
    return losses, full_model_state(model.module, ranks="all")


def _loss(model: Any, batch: Tensor) -> Tensor:
    out = model(batch)
    return functional.cross_entropy(getattr(out, "logits", out).flatten(0, 1), batch.flatten() * 3 % 4)


@pytest.mark.parametrize(
    ("mesh", "kind", "options"),
    [
        ("fsdp2", "lora", {"clipping": NORM, "every": 2}),
        pytest.param("ddp", "body", {"clipping": VALUE, "every": 2}, marks=pytest.mark.slow),
        pytest.param("tp", "llama", {"clipping": NORM}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(world2: World, mesh: str, kind: str, options: Any) -> None:
    expected = trained(kind, None, **options)
    for found in world2(trained, kind, mesh, **options, **WAIT):
        same_run(found, expected)


def test_gradients_may_be_reduced_once_a_step(world2: World) -> None:
    (each, expected), (once, found) = (
        world2(with_reductions, trained, "llama", "fsdp2", every=2, accumulate=how, **WAIT)[0]
        for how in ("sharded", "unsharded")
    )
    assert each == 2 * once > 0
    same_run(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), [("hsdp", "body"), ("fsdp_tp", "llama")])
def test_four_ranks_train_as_one_process(world4: World, mesh: str, kind: str) -> None:
    expected = trained(kind, None, NORM, 2)
    for found in world4(trained, kind, mesh, NORM, 2, **WAIT):
        same_run(found, expected)


@pytest.mark.parametrize("full", [False, True])
def test_a_loop_that_resumes_in_a_new_world_ends_with_the_same_bits(
    world2: World, tmp_path: Path, full: bool
) -> None:
    run: dict[str, Any] = {"path": str(tmp_path / "saved"), "full": full, **WAIT}
    whole = world2(trained, "body", "fsdp2", **run)
    for found, expected in zip(world2(trained, "body", "fsdp2", resume=True, **run), whole, strict=True):
        assert found[0] == expected[0][3:]
        same(found[1], expected[1])


def separately() -> None:
    one = fabric("composer_dist", precision="bf16-mixed")
    with one.init_module(empty_init=True):
        model = MODELS["body"]()
    assert all(p.is_meta for p in model.parameters())
    model = one.setup_module(model)
    optimizer = one.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    one.backward(_loss(model, torch.arange(10).view(2, 5)))
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for parameter in model.parameters():
        parameter.grad *= torch.inf
    with fails(ParallelismRuntimeError, "The norm of the gradients is", "error_if_nonfinite"):
        one.clip_gradients(model, optimizer, max_norm=1.0)


def test_a_module_on_meta_and_then_its_optimizer(world2: World) -> None:
    world2(separately, **WAIT)


def prepared_otherwise() -> None:
    one, model = fabric("composer_dist"), MODELS["body"]()
    parallelize_model(model, DDPConfig())
    with fails(
        ParallelismValueError, "is prepared already, on a mesh of {'dp_replicate': 2}", "'dp_shard': 2"
    ):
        one.setup_module(model)
    unparallelize_model(model)
    one.setup_module(model)


def test_a_module_that_is_prepared_on_another_mesh_is_refused(world2: World) -> None:
    world2(prepared_otherwise, **WAIT)
