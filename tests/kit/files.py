"""Weight files: what a test writes and finds."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from composer_dist.structure.structure import read_structure


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def saved(model: nn.Module, directory: Path, dtype: torch.dtype | None = None, **changes: Any) -> Path:
    """The model's state, each tied tensor once, in one safetensors file; None leaves a name out."""
    state = {
        held.info.name: held.get().detach().to(dtype).contiguous()
        for held in read_structure(model).tensors.values()
        if held.info.name in model.state_dict()
    }
    path = directory / "toy.safetensors"
    save_file({name: value for name, value in (state | changes).items() if value is not None}, path)
    return path
