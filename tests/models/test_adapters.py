"""Checkpoints of a peft model's adapters alone: hardly a byte moves, and they load on any mesh."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from composer_dist.checkpoint import export_pretrained, full_model_state, load_checkpoint, save_checkpoint
from composer_dist.distributed import parallelize_model
from composer_dist.models import HuggingFaceModel
from tests.kit.compare import equal
from tests.kit.measure import messages
from tests.kit.meshes import MESHES
from tests.kit.world import run

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def base() -> Any:
    """9 MiB of a Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 2048}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()


def tuned(seed: int) -> HuggingFaceModel:
    """The same base with adapters that depend on the seed, of which alone its `state_dict` speaks."""
    model = base()
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return HuggingFaceModel(model, peft_config=config, should_save_peft_only=True).eval()


def save(directory: Path) -> tuple[int, list[int], dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    model = tuned(0)
    parallelize_model(model, "fsdp")
    size = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)
    moved = []
    for number in range(4):
        with messages() as sent:
            if number == 0:
                state = full_model_state(model, select="adapters", ranks="all")
            elif number == 3:
                export_pretrained(model, directory / "peft")
            else:
                save_checkpoint(directory / f"{number}", {"model": model}, sharded=number == 1)
        moved.append(sum(sent))
    return size, moved, state


def load(path: Path, mesh: str) -> None:
    warnings.simplefilter("ignore")
    model, expected = tuned(1), tuned(0)
    parallelize_model(model, MESHES[mesh][1])
    load_checkpoint(path, {"model": model})
    model.should_save_peft_only = expected.should_save_peft_only = False
    equal(full_model_state(model, ranks="all"), dict(expected.state_dict()))


def written(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))


@pytest.mark.promise(43)
@pytest.mark.parametrize(
    "loads", [[("1", "tp")], pytest.param([("2", "tp"), ("1", "ddp"), ("2", "ddp")], marks=pytest.mark.slow)]
)
def test_of_a_peft_model_less_than_a_hundredth_of_the_base_moves(
    tmp_path: Path, loads: list[tuple[str, str]]
) -> None:
    for size, moved, state in run(save, 2, tmp_path):
        assert len(state) == 8
        assert all("lora_" in name for name in state)
        assert size > 9e6
        assert all(0 <= one < size / 100 for one in moved), moved
        assert all(0 < written(tmp_path / name) < size / 100 for name in ("1", "2", "peft"))
    for name, mesh in loads:
        run(load, 2, tmp_path / name, mesh)
    loaded, expected = PeftModel.from_pretrained(base(), tmp_path / "peft"), tuned(0)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        found, wanted = (one(input_ids=ids).logits for one in (loaded.eval(), expected.model))
    assert torch.equal(found, wanted)
