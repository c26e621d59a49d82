"""What importing the package costs, offers and touches."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import composer_dist
from tests.kit.grids import in_the_default_run

PACKAGE = Path(composer_dist.__file__).parent

PUBLIC = {
    "composer_dist": (
        "CheckpointError ComposerClassifier ComposerModel DDPConfig FSDP2Config HuggingFaceModel MeshConfig "
        "ParallelismConfig ParallelismError Precision Rule TPConfig Trainer"
    ),
    "composer_dist.distributed": (
        "DDPSyncStrategy HangGuard ParallelPlan Preparation Verification accumulate accumulated_bytes "
        "apply_ac assert_no_meta build_mesh clip_grad_norm clip_grad_value context_parallel "
        "convert_sync_batch_norm ddp_sync_context device_mesh_of fsdp_mesh init_context launch meta_init "
        "named_parameters_canonical no_sync parallel_cross_entropy parallelize_composer_model "
        "parallelize_model plan_parallelism prepare_fully_shard register_strategy register_tensor_codec "
        "resolve_config revert_sync_batch_norm sampler_kwargs submesh suggest summon_full_params "
        "sync_module_states unparallelize_model presets process_group verify_model"
    ),
    "composer_dist.checkpoint": (
        "LoadResult PendingSave export_pretrained full_model_state full_optimizer_state latest_checkpoint "
        "load_checkpoint load_full_model_state load_full_optimizer_state load_pretrained save_checkpoint "
        "weight_source"
    ),
    "composer_dist.integrations.transformers": "ComposerDistMixin ParallelArguments",
    "composer_dist.losses": "chunked_cross_entropy",
    "composer_dist.models": (
        "ComposerClassifier ComposerModel DPOModel HuggingFaceModel LanguagePerplexity PreferenceAccuracy "
        "TokenAccuracy"
    ),
    "composer_dist.trainer": (
        "Callback ChatTokenizer CheckpointSaver ConsoleLogger ConstantWithWarmupScheduler "
        "CosineAnnealingWithWarmupScheduler DistributedDataLoader EMA EarlyStopper EarlyStopping "
        "Evaluator Event FileLogger FineTuningPhases Generate GradientClipping GradientNorm "
        "InMemoryLogger LRMonitor LinearWithWarmupScheduler Logger LoggerDestination LossScaling "
        "MLFlowLogger MLflowLogger MemoryMonitor NaNMonitor NoImprovement OptimizerMonitor PackedDataset "
        "PackedStream PadPreferences PadRows Phase PreferenceTokenizer Profiler ProgressBar "
        "ReplicaCheck Resume RuntimeEstimator "
        "SpeedMonitor State StreamingDataLoader TableTokenizer TensorBoardLogger TensorboardLogger Time "
        "TimeUnit Timestamp Trainer WandBLogger default_phases dump_schedule load_schedule"
    ),
    "composer_dist.trainer.callbacks": (
        "Callback CheckpointSaver EMA EarlyStopper EarlyStopping Generate GradientNorm LRMonitor "
        "MemoryMonitor NaNMonitor OptimizerMonitor Profiler ProgressBar ReplicaCheck RuntimeEstimator "
        "SpeedMonitor"
    ),
    "composer_dist.trainer.loggers": (
        "ConsoleLogger FileLogger InMemoryLogger Logger LoggerDestination MLFlowLogger MLflowLogger "
        "TensorBoardLogger TensorboardLogger WandBLogger WritingLogger"
    ),
}
"""Every public name by its documented path. None of them may disappear or move."""


LIGHT = {
    "planning": (
        "from composer_dist.distributed import parallelize_model, plan_parallelism;"
        "from composer_dist import FSDP2Config; import torch;"
        "plan_parallelism(torch.nn.Linear(2, 2), FSDP2Config(), world_size=2)",
        {"transformers", "peft", "rich", "pydantic", "torchmetrics"},
    ),
    "a run": (
        "import composer_dist.recipe.read, composer_dist.recipe.session",
        {"torchmetrics", "matplotlib", "datasets", "trl", "lightning"},
    ),
    "launching": (
        "import composer_dist.cli.launch, composer_dist.cli.rendezvous, composer_dist.distributed.ranks.cpus;"
        "import torch.distributed.launcher.api",
        {"torch.distributed.fsdp", "transformers", "composer_dist._torch"},
    ),
}
"""What a process does that must stay light, and what it must not import."""


def modules_of(code: str, after: str = "") -> set[str]:
    """What a fresh interpreter imports for `code`, after other code."""
    code = f"import sys\n{after}\nbefore = {{*sys.modules}}\n{code}\nprint(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_costs_little_more_than_torch() -> None:
    more = modules_of("import composer_dist, composer_dist.distributed", after="import torch")
    assert more == {"composer_dist", "lazy_loader", "composer_dist.distributed"}


@pytest.mark.parametrize("what", in_the_default_run("a run", among=LIGHT))
def test_only_what_is_needed_is_imported(what: str) -> None:
    code, unneeded = LIGHT[what]
    assert unneeded.isdisjoint(modules_of(code))


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


NEED_HUGGING_FACE = {
    "composer_dist.integrations.transformers": PUBLIC["composer_dist.integrations.transformers"],
    # torchmetrics imports transformers, where that is installed.
    "composer_dist.models": "DPOModel LanguagePerplexity PreferenceAccuracy TokenAccuracy",
}
"""Public names that do not resolve where transformers is installed but cannot be imported."""


def test_all_other_names_resolve_without_transformers_and_peft() -> None:
    names = {(package, name) for package, found in PUBLIC.items() for name in found.split()}
    names -= {(package, name) for package, found in NEED_HUGGING_FACE.items() for name in found.split()}
    code = (
        "import sys, importlib; sys.modules['transformers'] = sys.modules['peft'] = None;"
        f"[getattr(importlib.import_module(package), name) for package, name in {sorted(names)}]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No composer_dist attribute Trainr"):
        composer_dist.Trainr  # noqa: B018


def _outside_of_torch_room() -> dict[str, ast.Module]:
    """The syntax tree of every file that must not use private names of torch, by path."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {n: ast.parse(p.read_text()) for n, p in files.items() if not n.startswith("_torch/")}


def test_only_one_package_imports_private_names_of_torch() -> None:
    found = []
    for path, tree in _outside_of_torch_room().items():
        names: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        found += [f"{path}: {name}" for name in names if name.startswith("torch.") and "._" in name]
    assert found == []


NOT_TORCHS = {
    "_modules _parameters _buffers": "torch's, but what every module library walks",
    "_attn_implementation _init_weights _name_or_path _supports_sdpa _tp_plan": "transformers'",
    "_is_fsdp_managed_module": "transformers'",
    "_defaults": "torchmetrics'",
    "_disable_adapters": "peft's",
    "_new_buffer": "torchao's",
    "_exit _current_frames": "os's and sys's",
}


def _own_attributes(trees: Iterable[ast.Module]) -> set[str]:
    """Private attributes of this package's own classes and modules."""
    own = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.ClassDef, ast.Module)):
            own |= {n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
            targets = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
    return own


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_only_one_package_touches_private_attributes_of_torch() -> None:
    one = torch.ones(1)
    objects = [torch, nn, nn.Linear(1, 1), one, one.untyped_storage(), DTensor, DeviceMesh, FSDPModule]
    objects += [torch.optim.Optimizer, dist, dist.ProcessGroup, torch.ops.aten.mm.default]
    torchs = {name for one in objects for name in dir(one)}
    trees = _outside_of_torch_room()
    allowed = {name for names in NOT_TORCHS for name in names.split()}
    own = _own_attributes(trees.values()) - torchs
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not _is_self(node.value)
        and node.attr not in own | allowed
    ]
    assert found == []
