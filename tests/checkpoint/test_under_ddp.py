"""States and exports of a model that DDP replicates are the plain model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composer_dist.checkpoint import export_pretrained, full_model_state, load_full_model_state
from composer_dist.config.replicate import DDPConfig
from composer_dist.distributed import parallelize_model
from tests.kit.compare import equal
from tests.kit.huggingface import logits, pretrained_llama
from tests.kit.toy import stateful
from tests.kit.world import World


def state_and_back() -> dict[str, Any]:
    model = stateful()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallelize_model(model, DDPConfig(), optimizer)
    state = full_model_state(model, ranks="all")
    zero = full_model_state(model)
    assert bool(zero) == (dist.get_rank() == 0)
    held = [*model.parameters()]
    changed = {k: v + 1 if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in state.items()}
    result = load_full_model_state(model, changed if dist.get_rank() == 0 else {})
    assert result == ([], [])
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    equal(full_model_state(model, ranks="all"), changed)
    return state


@pytest.mark.promise(61)
def test_state_keys_and_values_are_the_plain_model_s(world2: World) -> None:
    for state in world2(state_and_back):
        equal(state, stateful().state_dict())


def export(path: Path) -> None:
    model = pretrained_llama()
    parallelize_model(model, DDPConfig())
    export_pretrained(model, path)
    assert type(model).__name__ == "DDPLlamaForCausalLM"  # as before the export


@pytest.mark.promise(96)
def test_transformers_loads_what_ddp_exports(world2: World, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    world2(export, tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(logits(model), logits(pretrained_llama()))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
