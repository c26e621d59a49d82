"""Lightning's Trainer on several ranks gives what it gives in one process."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install 'composer_dist[lightning]'")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from composer_dist.checkpoint import full_model_state, full_optimizer_state, load_checkpoint  # noqa: E402
from composer_dist.distributed import init_context, unparallelize_model  # noqa: E402
from composer_dist.errors import CheckpointValueError, ParallelismError, ParallelismValueError  # noqa: E402
from composer_dist.integrations.lightning import ComposerDistStrategy  # noqa: E402
from tests.kit.compare import close, equal, fails, same  # noqa: E402
from tests.kit.grids import slow  # noqa: E402
from tests.kit.huggingface import llama, lora_llama  # noqa: E402
from tests.kit.measure import with_reductions  # noqa: E402
from tests.kit.meshes import MESHES  # noqa: E402
from tests.kit.training import Body  # noqa: E402
from tests.kit.world import World  # noqa: E402

PEFT, LIGHTNING = "ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:.*LeafSpec:FutureWarning"
SAVED = "ignore:Checkpoint directory|The dirpath:UserWarning"
HINTS = "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
pytestmark = [pytest.mark.promise(121)]
pytestmark += [pytest.mark.filterwarnings(one) for one in (PEFT, LIGHTNING, SAVED, HINTS)]
MODELS = {"body": Body, "llama": llama, "lora": lora_llama}
SAMPLES, BATCH = 32, 4
REPLICAS = {None: 0, "fsdp2": 2, "fsdp4": 4, "ddp": 2, "hsdp": 4, "tp": 1, "fsdp_tp": 2, "hsdp_tp": 2}
"""Ranks that read different data; 0 for a Trainer without our strategy."""
Result = tuple[list[float], dict[str, Tensor]]


class Lit(lightning.LightningModule):
    """A tagger of tokens that logs its losses over all ranks."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Tensor:
        out = self.net(ids)
        return getattr(out, "logits", out)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return self._loss("loss", ids)

    def validation_step(self, ids: Tensor, index: int) -> None:
        self._loss("val", ids)

    def test_step(self, ids: Tensor, index: int) -> None:
        self._loss("test", ids)

    def predict_step(self, ids: Tensor, index: int) -> Tensor:
        return self(ids).argmax(-1)

    def _loss(self, name: str, ids: Tensor) -> Tensor:
        loss = functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten() * 3 % 4)
        self.log(name, loss, sync_dist=True, on_step=name == "loss", on_epoch=name != "loss")
        return loss

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.02, eps=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Losses(Callback):
    """What each batch's loss and learning rate were."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen += [float(trainer.callback_metrics["loss"]), trainer.optimizers[0].param_groups[0]["lr"]]


def data(replicas: int = 0, shuffle: bool = True) -> DataLoader[Any]:
    """One process reads, with torch's sampler, what Lightning gives to several replicas."""
    ids: Any = torch.randint(16, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    if replicas:
        return DataLoader(ids, BATCH // replicas)
    return DataLoader(ids, BATCH, sampler=DistributedSampler(ids, 1, 0, shuffle=shuffle))


def lit(kind: str) -> Lit:
    torch.manual_seed(0)
    return Lit(MODELS[kind]())


def trainer(strategy: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """A quiet Trainer of all ranks; without a strategy, of this process."""
    if dist.is_initialized():
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    options = {"enable_checkpointing": False, "max_epochs": 1, "devices": ranks} | options
    return lightning.Trainer(
        accelerator="cpu", strategy=strategy or "auto", callbacks=list(callbacks), **quiet, **options
    )


def fitted(kind: str, mesh: str | None, **options: Any) -> Result:
    losses, module = Losses(), lit(kind)
    replicas = REPLICAS[mesh]
    how = {"accumulate": options.pop("accumulate", "sharded")}
    strategy = ComposerDistStrategy(MESHES[mesh][1], **how) if mesh else None
    one = trainer(strategy, [losses], **options)
    one.fit(module, data(replicas), data(replicas, shuffle=False))
    one.validate(module, data(replicas, shuffle=False), verbose=False)
    losses.seen.append(float(one.callback_metrics["val"]))
    return losses.seen, full_model_state(module, ranks="all")


def same_run(found: Result, expected: Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    close(found[1], expected[1], atol=5e-6)


def saved(
    folder: str, kind: str, mesh: str | None, epochs: int, resume: str | None = None, full: bool = False
) -> Any:
    """A run that saves each epoch: the paths of its best and last checkpoints, losses, weights, optimizer."""
    losses, module = Losses(), lit(kind)
    keep = ModelCheckpoint(
        folder, "{epoch}", monitor="val", save_top_k=1, save_last=True, enable_version_counter=False
    )
    strategy = ComposerDistStrategy(MESHES[mesh][1], save_distributed_checkpoint=not full) if mesh else None
    replicas = REPLICAS[mesh]
    one = trainer(strategy, [losses, keep], max_epochs=epochs, enable_checkpointing=True)
    one.fit(module, data(replicas), data(replicas, shuffle=False), ckpt_path=resume)
    state = full_optimizer_state(module, one.strategy.optimizers[0])
    return (
        keep.best_model_path,
        keep.last_model_path,
        losses.seen,
        full_model_state(module, ranks="all"),
        state,
    )


CLIPPING = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
BY_VALUE = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
WAIT = {"timeout": 300}
"""For workers that import Lightning first."""


@pytest.mark.parametrize(
    ("mesh", "kind", "options"),
    [
        ("fsdp2", "lora", CLIPPING),
        ("ddp", "body", CLIPPING),
        pytest.param("fsdp2", "body", BY_VALUE, marks=pytest.mark.slow),
        pytest.param("ddp", "lora", BY_VALUE, marks=pytest.mark.slow),
        pytest.param("tp", "llama", {}, marks=pytest.mark.slow),
        pytest.param("tp", "lora", CLIPPING, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(world2: World, mesh: str, kind: str, options: Any) -> None:
    expected = fitted(kind, None, **options)
    for found in world2(fitted, kind, mesh, **options, **WAIT):
        same_run(found, expected)


@pytest.mark.slow  # as in Fabric
def test_gradients_may_be_reduced_once_a_step(world2: World) -> None:
    (each, expected), (once, found) = (
        world2(with_reductions, fitted, "llama", "fsdp2", **CLIPPING, accumulate=how, **WAIT)[0]
        for how in ("sharded", "unsharded")
    )
    assert each == 2 * once > 0
    same_run(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind", "options"),
    [
        ("hsdp", "body", CLIPPING),
        ("hsdp", "lora", BY_VALUE),
        ("fsdp_tp", "llama", CLIPPING),
        ("fsdp_tp", "llama", BY_VALUE),
        ("hsdp_tp", "llama", {}),
    ],
)
def test_four_ranks_train_as_one_process(world4: World, mesh: str, kind: str, options: Any) -> None:
    expected = fitted(kind, None, **options)
    for found in world4(fitted, kind, mesh, **options, **WAIT):
        same_run(found, expected)


def check_resumed(world: Any, folder: Path, kind: str, mesh: str, full: bool) -> None:
    run = partial(world, saved, kind=kind, mesh=mesh, full=full, **WAIT)
    whole = run(str(folder / "whole"), epochs=3)
    first = run(str(folder / "parts"), epochs=2)[0]
    rest = run(str(folder / "parts"), epochs=3, resume=first[1])
    for found, expected in zip(rest, whole, strict=True):
        assert found[2] == expected[2][len(first[2]) :]
        same(found[3], expected[3])
    equal(rest[0][4], whole[0][4])


@pytest.mark.parametrize("full", [slow(False), True])
def test_a_run_that_resumes_in_a_new_world_ends_with_the_same_bits(
    world2: World, tmp_path: Path, full: bool
) -> None:
    check_resumed(world2, tmp_path, "body", "fsdp2", full)


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("mesh", "kind"), [("hsdp", "lora"), ("fsdp_tp", "llama")])
def test_a_run_of_four_that_resumes_ends_with_the_same_bits(
    world4: World, tmp_path: Path, mesh: str, kind: str, full: bool
) -> None:
    check_resumed(world4, tmp_path, kind, mesh, full)


def test_checkpoints_load_under_other_strategies_in_one_process_and_in_the_plain_module(
    world2: World, tmp_path: Path
) -> None:
    """Files are Lightning's own, both ways; a directory loads by this library's `load_checkpoint`."""
    whole = saved(str(tmp_path / "whole"), "body", None, 2)
    plain = saved(str(tmp_path / "plain"), "body", None, 1)
    files, directories = (
        world2(saved, str(tmp_path / name), "body", "fsdp2", 1, full=name == "file", **WAIT)[0]
        for name in ("file", "directory")
    )
    for name, path, mesh in (("x", plain[1], "ddp"), ("y", directories[1], "ddp"), ("z", files[0], None)):
        if mesh is None:
            found = saved(str(tmp_path / name), "body", None, 2, path)
        else:
            found = world2(saved, str(tmp_path / name), "body", mesh, 2, path, **WAIT)[0]
        assert found[2] == pytest.approx(whole[2][len(plain[2]) :], rel=1e-5)
        close(found[3], whole[3])
    module = Lit.load_from_checkpoint(files[0], net=Body())
    same(dict(module.state_dict()), files[3])
    again = lit("body")
    torch.nn.init.zeros_(again.net.head.weight)
    rest = load_checkpoint(directories[0], {"state_dict": again})
    same(dict(again.state_dict()), directories[3])
    assert rest["global_step"] == SAMPLES // BATCH


class Manual(Lit):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, ids: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self._loss("loss", ids))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def optimized_by_hand(strategy: str | None) -> Result:
    torch.manual_seed(0)
    losses, module = Losses(), Manual(Body())
    trainer(ComposerDistStrategy(strategy) if strategy else None, [losses]).fit(
        module, data(2 if strategy else 0)
    )
    return losses.seen, full_model_state(module, ranks="all")


def one_after_another(folder: str) -> None:
    """What else a Trainer does, on two ranks: a string, a model on meta, predictions, second Trainers."""
    same_run(optimized_by_hand("fsdp"), optimized_by_hand("ddp"))
    ids = torch.randint(16, (5, 5), generator=torch.Generator().manual_seed(3))
    one, module = trainer("composer_dist"), lit("body")
    expected = module(ids).argmax(-1)
    found = one.predict(module, DataLoader(ids, 1))  # rank 0 has one batch more
    assert torch.equal(torch.cat(found), expected[dist.get_rank() :: 2])
    one.fit(module, data(2))
    before = one.test(module, data(2), verbose=False)
    assert trainer(ComposerDistStrategy()).test(module, data(2), verbose=False) == before
    with fails(
        ParallelismValueError, "prepared already, on a mesh of {'dp_shard': 2}", "call unparallelize_model"
    ):
        trainer(ComposerDistStrategy({"mesh": {"tp": 2}})).test(module, data(2), verbose=False)
    unparallelize_model(module)
    torch.testing.assert_close(
        trainer(ComposerDistStrategy("ddp")).test(module, data(2), verbose=False), before
    )
    with init_context():
        empty = Lit(Body())
    with one.init_module(empty_init=True):
        assert all(p.is_meta for p in Body().parameters())
    trainer(ComposerDistStrategy(), precision="bf16-mixed").fit(empty, data(2))
    assert all(p.dtype == torch.float32 for p in empty.parameters())


@pytest.mark.filterwarnings("ignore:.*AdamW holds:UserWarning")  # the first Trainer's, which is still there
def test_a_trainer_predicts_evaluates_and_begins_with_other_models(world2: World, tmp_path: Path) -> None:
    world2(one_after_another, str(tmp_path), setup="environment", **WAIT)


def changed_on_save(names: str, module: Any, content: dict[str, Any]) -> None:
    if names == "removed":
        content["state_dict"].pop("net.head.bias", None)
    else:
        content["state_dict"]["net.head.bias"] = torch.zeros(4)


def refused(folder: str) -> None:
    def fit(parallelism: Any = "fsdp", resume: Any = None, **options: Any) -> Any:
        one, module = trainer(ComposerDistStrategy(parallelism), **options), lit("body")
        one.fit(module, data(2), ckpt_path=resume)
        return one, module

    with fails(ParallelismValueError, "no context parallelism (cp)", "Fabric or composer_dist.Trainer"):
        fit({"mesh": {"cp": 2}})
    with fails(ParallelismValueError, "DDPConfig(sync_batch_norm=True)"):
        fit(sync_batchnorm=True)
    with fails(ParallelismValueError, "does not match a world of 2 ranks"):
        fit({"mesh": {"dp_replicate": 3}})
    with fails(ParallelismValueError, "StochasticWeightAveraging copies the model"):
        fit(callbacks=[StochasticWeightAveraging(0.01)])
    with fails(ParallelismValueError, "precision='16-mixed'", "'bf16-mixed'"):
        trainer(ComposerDistStrategy(), plugins=[MixedPrecision("16-mixed", "cpu")])
    with fails(ParallelismValueError, "Pass precision= to the Trainer"):
        ComposerDistStrategy(precision="amp_bf16")
    with fails(ParallelismError, "Lightning counts 1 processes", "the process group has 2", "Pass devices="):
        trainer(ComposerDistStrategy(), devices=1).fit(lit("body"), data(2))
    one, module = fit()
    module.on_save_checkpoint = partial(changed_on_save, "changed", module)
    with fails(CheckpointValueError, "on_save_checkpoint has changed state_dict['net.head.bias']"):
        one.save_checkpoint(f"{folder}/changed")
    module.on_save_checkpoint = partial(changed_on_save, "removed", module)
    one.save_checkpoint(f"{folder}/removed")
    with fails(ParallelismError, "net.head.bias"):
        fit(resume=f"{folder}/removed", max_epochs=2)
    module.on_save_checkpoint = lambda content: None
    one.save_checkpoint(f"{folder}/weights", weights_only=True)
    with fails(KeyError, "checkpoint contains only the model"):
        fit(resume=f"{folder}/weights", max_epochs=2)


def test_what_does_not_fit_is_refused_by_name_on_every_rank(world2: World, tmp_path: Path) -> None:
    world2(refused, str(tmp_path), **WAIT)
