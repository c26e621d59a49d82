"""A ComposerAccelerator on several ranks gives what an Accelerator gives in one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

accelerate = pytest.importorskip(
    "accelerate", reason="needs accelerate: pip install 'composer_dist[accelerate]'"
)

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin  # noqa: E402

from composer_dist.checkpoint import full_model_state, full_optimizer_state  # noqa: E402
from composer_dist.distributed import init_context  # noqa: E402
from composer_dist.errors import CheckpointValueError, ParallelismRuntimeError, ParallelismValueError  # noqa: E402
from composer_dist.integrations.accelerate import ComposerAccelerator  # noqa: E402
from tests.kit.compare import close, equal, fails, same  # noqa: E402
from tests.kit.huggingface import llama, lora_llama  # noqa: E402
from tests.kit.measure import with_reductions  # noqa: E402
from tests.kit.meshes import MESHES  # noqa: E402
from tests.kit.training import Body  # noqa: E402
from tests.kit.world import World  # noqa: E402

pytestmark = [
    pytest.mark.promise(122),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's own
]
MODELS = {"body": Body, "llama": llama, "lora": lora_llama}
WAIT = {"timeout": 300}
SPLIT = DataLoaderConfiguration(split_batches=True, dispatch_batches=False)


def made(mesh: str | None, **options: Any) -> Any:
    """An Accelerator of all ranks; without a mesh, accelerate's own of this process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if dist.is_initialized():
        ranks = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
        ranks |= {"LOCAL_RANK": ranks["RANK"], "LOCAL_WORLD_SIZE": ranks["WORLD_SIZE"]}
        os.environ.update({name: str(value) for name, value in ranks.items()})
    if mesh is None:
        return accelerate.Accelerator(cpu=True, **options)
    return ComposerAccelerator(MESHES[mesh][1], **options)


def data(samples: int = 24, batch: int = 4) -> Any:
    ids: Any = torch.randint(16, (samples, 5), generator=torch.Generator().manual_seed(0))
    return DataLoader(ids, batch)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    out = model(batch)
    return functional.cross_entropy(getattr(out, "logits", out).flatten(0, 1), batch.flatten() * 3 % 4)


def trained(
    kind: str,
    mesh: str | None,
    clipping: str = "",
    every: int = 1,
    path: str = "",
    resume: bool = False,
    **options: Any,
) -> Any:
    """A loop as its users write it; one that resumes begins at batch 3, where the other one saves."""
    one = made(mesh, **options, gradient_accumulation_steps=every, dataloader_config=SPLIT)
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    given = model
    model, optimizer, loader, scheduler = one.prepare(model, optimizer, data(), scheduler)
    assert model is given
    seen: list[float] = []
    first = 3 if resume else 0
    if resume:
        one.load_state(path)
        loader = one.skip_first_batches(loader, first)
    for number, batch in enumerate(loader, first + 1):
        with one.accumulate(model):
            loss = loss_of(model, batch)
            one.backward(loss)
            if one.sync_gradients and clipping == "norm":
                seen.append(float(one.clip_grad_norm_(model.parameters(), 0.05)))
            if one.sync_gradients and clipping == "value":
                one.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += [float(one.reduce(loss.detach(), "mean")), scheduler.get_last_lr()[0]]
        if path and number == 3 and not resume:
            one.save_state(path)
            seen.clear()
    return seen, full_model_state(model, ranks="all"), full_optimizer_state(model, optimizer.optimizer)


def test_gradients_may_be_reduced_once_a_step(world2: World) -> None:
    with pytest.raises(ParallelismValueError, match="accumulate must be one of 'sharded', 'unsharded'"):
        ComposerAccelerator(accumulate="both")
    (each, expected), (once, found) = (
        world2(with_reductions, trained, "llama", "fsdp2", every=2, accumulate=how)[0]
        for how in ("sharded", "unsharded")
    )
    assert each == 2 * once > 0
    same_run(found, expected)


def same_run(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    close(found[1], expected[1], atol=5e-6)


@pytest.mark.parametrize(
    ("mesh", "kind", "options"),
    [
        ("fsdp2", "lora", {"clipping": "norm", "every": 2}),
        pytest.param("fsdp2", "body", {"clipping": "value"}, marks=pytest.mark.slow),
        pytest.param("ddp", "body", {"clipping": "value", "every": 2}, marks=pytest.mark.slow),
        pytest.param("tp", "llama", {"clipping": "norm"}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(world2: World, mesh: str, kind: str, options: Any) -> None:
    expected = trained(kind, None, **options)
    for found in world2(trained, kind, mesh, **options, **WAIT):
        same_run(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), [("hsdp", "body"), ("fsdp_tp", "llama"), ("hsdp", "lora")])
def test_four_ranks_train_as_one_process(world4: World, mesh: str, kind: str) -> None:
    expected = trained(kind, None, "norm", 2)
    for found in world4(trained, kind, mesh, "norm", 2, **WAIT):
        same_run(found, expected)


def check_resumed(world: Any, folder: Path, kind: str, mesh: str) -> None:
    path = str(folder / "state")
    whole = world(trained, kind, mesh, path=path, **WAIT)
    rest = world(trained, kind, mesh, path=path, resume=True, **WAIT)
    for found, expected in zip(rest, whole, strict=True):
        assert found[0] == expected[0]
        same(found[1], expected[1])
    equal(rest[0][2], whole[0][2])


def test_a_loop_that_resumes_in_a_new_world_ends_with_the_same_bits(
    world1: World, world2: World, tmp_path: Path
) -> None:
    check_resumed(world2, tmp_path, "body", "fsdp2")
    whole = trained("body", None)
    alone = world1(trained, "body", "fsdp1", path=str(tmp_path / "state"), resume=True, **WAIT)[0]
    close(alone[1], whole[1])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), [("hsdp", "lora"), ("fsdp_tp", "llama")])
def test_a_loop_of_four_that_resumes_ends_with_the_same_bits(
    world4: World, tmp_path: Path, mesh: str, kind: str
) -> None:
    check_resumed(world4, tmp_path, kind, mesh)


def exported(folder: str, mesh: str) -> None:
    """Files, states and metrics; ranks that share samples count once."""
    one = made(mesh, mixed_precision="bf16")
    with init_context():
        model = llama()
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = one.prepare(model, optimizer, data(7, 2), scheduler)
    replicas = 1 if mesh == "tp" else 2
    gathered = []
    for batch in loader:
        out = model(batch).logits
        assert out.dtype == torch.float32
        gathered.append(one.gather_for_metrics(batch))
        one.backward(out.sum())
        optimizer.step()
        scheduler.step()
    assert torch.equal(torch.cat(gathered), data(7, 7).dataset)
    assert scheduler.scheduler.last_epoch == len(loader) * replicas
    expected = model(batch).logits
    assert one.unwrap_model(model) is model
    assert torch.equal(model(batch).logits, expected)
    assert one.unwrap_model(model, keep_fp32_wrapper=False) is model
    out = model(batch).logits  # no longer cast to float32
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), expected)
    state = one.get_state_dict(model)
    expected = full_model_state(model, ranks="all")
    assert bool(state) == one.is_main_process
    one.save_model(model, folder)
    plain = llama()
    accelerate.load_checkpoint_in_model(plain, folder)
    same(dict(plain.state_dict()), expected)
    one.end_training()


@pytest.mark.parametrize("mesh", ["fsdp2", "tp"])
def test_metrics_states_and_files(world2: World, tmp_path: Path, mesh: str) -> None:
    world2(exported, str(tmp_path), mesh, **WAIT)


def saved_as_documented(folder: str, mesh: str) -> None:
    """By the lines of accelerate's documentation."""
    from transformers import LlamaForCausalLM

    one = made(mesh)
    torch.manual_seed(0)
    model = one.prepare(llama())
    state = one.get_state_dict(model)
    how = {"is_main_process": one.is_main_process, "save_function": one.save, "state_dict": state}
    one.unwrap_model(model).save_pretrained(folder, **how)
    one.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    same(dict(loaded.state_dict()), full_model_state(model, ranks="all"))


@pytest.mark.parametrize("mesh", ["fsdp2", "ddp"])
def test_what_accelerate_s_own_lines_save_is_what_one_process_saves(
    world2: World, tmp_path: Path, mesh: str
) -> None:
    world2(saved_as_documented, str(tmp_path), mesh, **WAIT)


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield from torch.zeros(8, 5).long()


def refused() -> None:
    with fails(ParallelismValueError, "fsdp_plugin", "Use parallelism= instead"):
        made("fsdp2", fsdp_plugin=FullyShardedDataParallelPlugin())
    with fails(ParallelismValueError, "mixed_precision='fp16' needs loss scaling", "'bf16'"):
        made("fsdp2", mixed_precision="fp16")
    with fails(ParallelismValueError, "dispatch_batches", "DataLoaderConfiguration(dispatch_batches=False)"):
        made("tp").prepare(DataLoader(Endless(), 4))
    one = made("fsdp2")
    model = one.prepare(Body())
    with fails(CheckpointValueError, "integrations has no composer_dist/", "load_pretrained(model, '"):
        one.load_state(str(Path(__file__).parent))
    assert one.prepare(model) is model
    with fails(ParallelismValueError, "join_uneven_inputs needs torch's Dist", "with even_batches"):
        one.join_uneven_inputs([model])
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"
    with fails(ParallelismValueError, "to compile with EAGER", "parallelism= does the rest"):
        made("fsdp2")
    del os.environ["ACCELERATE_DYNAMO_BACKEND"]
    os.environ.pop("WORLD_SIZE")
    os.environ.pop("LOCAL_RANK")
    AcceleratorState._reset_state(True)
    with fails(ParallelismRuntimeError, "accelerate counts 1 processes", "the process group has 2"):
        ComposerAccelerator().prepare(Body())


def test_what_does_not_fit_is_refused_by_name_on_every_rank(world2: World) -> None:
    world2(refused, **WAIT)
