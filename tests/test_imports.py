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
        "Trainer ComposerModel HuggingFaceModel Precision MeshConfig Rule FSDP2Config TPConfig DDPConfig "
        "ParallelismConfig"
    ),
    "composer_dist.distributed": (
        "parallelize_model parallelize_composer_model plan_parallelism init_context apply_ac meta_init "
        "prepare_fully_shard sync_module_states summon_full_params no_sync clip_grad_norm sampler_kwargs"
    ),
    "composer_dist.checkpoint": (
        "full_model_state load_full_model_state export_pretrained"  # optimizer states come with part 2
    ),
}


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
        "import sys, composer_dist.cli.launch, composer_dist.distributed.ranks.launcher;"
        "import torch.distributed.launcher.api;"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"torch.distributed.fsdp", "transformers", "composer_dist._torch"}.isdisjoint(loaded.split())


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in PUBLIC.items() for n in names.split()])
def test_public_names_resolve(package: str, name: str) -> None:
    module = importlib.import_module(package)
    assert name in dir(module)
    assert getattr(module, name).__name__ == name


@pytest.mark.parametrize("package", [*PUBLIC, "composer_dist.models", "composer_dist.trainer"])
def test_a_star_imports_every_public_name(package: str) -> None:
    found: dict[str, object] = {}
    exec(f"from {package} import *", found)
    assert set(PUBLIC.get(package, "").split()) <= set(found)
    assert set(dir(importlib.import_module(package))) == set(found) - {"__builtins__"}


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


def test_the_arrows_point_one_way() -> None:
    found = []
    for path in (PACKAGE / "distributed").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = (module or "").split(".")
            upward = parts[:2] in (["composer_dist", "trainer"], ["composer_dist", "checkpoint"])
            prepare = parts[-1] == "prepare" and path.name != "__init__.py"
            if upward or prepare:
                found.append(f"{path.name}: {module}")
    assert found == []
