"""What importing the package costs, offers and touches."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import composer_dist

PACKAGE = Path(composer_dist.__file__).parent

PUBLIC = {
    "composer_dist": (
        "CheckpointError ComposerClassifier ComposerModel DDPConfig FSDP2Config HuggingFaceModel "
        "MeshConfig ParallelismConfig ParallelismError Precision Rule TPConfig Trainer"
    ),
    "composer_dist.distributed": (
        "DDPSyncStrategy ParallelPlan Preparation accumulate accumulated_bytes apply_ac assert_no_meta "
        "build_mesh clip_grad_norm clip_grad_value context_parallel convert_sync_batch_norm "
        "ddp_sync_context fsdp_mesh init_context launch meta_init named_parameters_canonical no_sync "
        "parallel_cross_entropy parallelize_composer_model parallelize_model plan_parallelism "
        "prepare_fully_shard register_strategy register_tensor_codec revert_sync_batch_norm "
        "sampler_kwargs submesh summon_full_params sync_module_states presets process_group"
    ),
    "composer_dist.checkpoint": (
        "LoadResult PendingSave export_pretrained full_model_state full_optimizer_state latest_checkpoint "
        "load_checkpoint load_full_model_state load_full_optimizer_state load_pretrained save_checkpoint"
    ),
    "composer_dist.models": ("ComposerClassifier ComposerModel HuggingFaceModel"),
    "composer_dist.trainer": (
        "Callback CheckpointSaver ConsoleLogger ConstantWithWarmupScheduler "
        "CosineAnnealingWithWarmupScheduler DistributedDataLoader EMA EarlyStopping Evaluator Event "
        "FileLogger FineTuningPhases Generate GradientClipping GradientNorm InMemoryLogger LRMonitor "
        "LinearWithWarmupScheduler Logger LoggerDestination LossScaling MLflowLogger MemoryMonitor "
        "NaNMonitor NoImprovement OptimizerMonitor PackedDataset PackedStream Phase ProgressBar Resume "
        "RuntimeEstimator SpeedMonitor State TensorBoardLogger Time TimeUnit Timestamp Trainer "
        "WandBLogger default_phases dump_schedule load_schedule seed_all"
    ),
    "composer_dist.trainer.callbacks": (
        "Callback CheckpointSaver EMA EarlyStopping Generate GradientNorm LRMonitor MemoryMonitor "
        "NaNMonitor OptimizerMonitor ProgressBar RuntimeEstimator SpeedMonitor"
    ),
    "composer_dist.trainer.loggers": (
        "ConsoleLogger FileLogger InMemoryLogger Logger LoggerDestination MLflowLogger TensorBoardLogger "
        "WandBLogger WritingLogger"
    ),
}
"""Every public name by its documented path. None of them may disappear or move."""


def test_importing_the_package_costs_little_more_than_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import composer_dist, composer_dist.distributed;"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) == {
        "composer_dist",
        "lazy_loader",
        "composer_dist.distributed",
    }


def test_configuring_and_planning_need_no_heavy_package() -> None:
    code = (
        "import sys; from composer_dist.distributed import parallelize_model, plan_parallelism;"
        "from composer_dist import FSDP2Config; import torch;"
        "plan_parallelism(torch.nn.Linear(2, 2), FSDP2Config(), world_size=2);"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"transformers", "peft", "rich", "pydantic", "torchmetrics"}.isdisjoint(loaded.split())


def test_launching_needs_nothing_that_only_the_launched_need() -> None:
    code = (
        "import sys, composer_dist.cli.launch, composer_dist.distributed.ranks.cpus;"
        "import torch.distributed.launcher.api;"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"torch.distributed.fsdp", "transformers", "composer_dist._torch"}.isdisjoint(loaded.split())


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in PUBLIC.items() for n in names.split()])
def test_public_names_resolve(package: str, name: str) -> None:
    module = importlib.import_module(package)
    assert name in dir(module)
    assert getattr(module, name).__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("package", PUBLIC)
def test_a_star_imports_every_public_name_and_no_other(package: str) -> None:
    found: dict[str, object] = {}
    exec(f"from {package} import *", found)
    assert set(found) - {"__builtins__"} == set(PUBLIC[package].split())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No composer_dist attribute Trainr"):
        composer_dist.Trainr  # noqa: B018


def test_only_one_file_imports_private_names_of_torch() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            private = [n for n in names if any(part.startswith("_") for part in n.split("."))]
            found += [f"{path.relative_to(PACKAGE)}: {name}" for name in private]
    assert found == []
