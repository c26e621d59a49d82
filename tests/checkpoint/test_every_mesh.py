"""From every mesh: adapters that peft loads, parameters summoned and changed, tokens of `generate`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.checkpoint import export_pretrained, full_model_state, load_pretrained
from composer_dist.distributed import parallelize_model, summon_full_params
from composer_dist.models import HuggingFaceModel
from tests.kit.huggingface import LORA, gpt2, llama
from tests.kit.meshes import BY_WORLD
from tests.kit.world import run

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
PLACES = [
    (2, ["tp"]),
    pytest.param(2, ["ddp", "hsdp"], marks=pytest.mark.slow),
    pytest.param(4, ["tp"], marks=pytest.mark.slow),
]


def seeded(kind: str, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return LORA[kind]().eval()


def ids() -> Tensor:
    return torch.arange(3, 15).reshape(2, 6)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids()).logits
    return found


def adapters(directory: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        for kind in LORA:
            model = seeded(kind)
            parallelize_model(model, BY_WORLD[name]())
            export_pretrained(model, directory / name / kind)
            other = seeded(kind, seed=4)
            parallelize_model(other, BY_WORLD[name]())
            assert load_pretrained(other, directory / name / kind) == ([], [])
            found, expected = (full_model_state(one, ranks="all") for one in (other, model))
            assert all(torch.equal(found[key], expected[key]) for key in expected if "lora_" in key)


@pytest.mark.promise(95)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
def test_an_adapter_from_every_mesh_loads_in_plain_peft(tmp_path: Path, ranks: int, names: list[str]) -> None:
    from peft import PeftModel

    run(adapters, ranks, tmp_path, names, timeout=180)
    for kind in LORA:
        expected = seeded(kind)
        for name in names:
            torch.manual_seed(3)
            base = {"llama": llama, "gpt2": gpt2}[kind]()
            loaded = PeftModel.from_pretrained(base, tmp_path / name / kind)
            assert torch.equal(logits(loaded), logits(expected)), name


def summoned(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        model, reference = seeded("llama"), seeded("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallelize_model(model, BY_WORLD[name](), optimizer)
        held = {key: id(value) for key, value in model.named_parameters()}
        with summon_full_params(model):
            for (key, value), (_, other) in zip(
                model.named_parameters(), reference.named_parameters(), strict=True
            ):
                assert torch.equal(value, other), key
                value.data.mul_(0.5)
        for other in reference.parameters():
            other.data.mul_(0.5)
        for _ in range(2):  # the changes survive forwards
            torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)
        assert held == {key: id(value) for key, value in model.named_parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(held.values())


@pytest.mark.promise(90)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
def test_on_every_mesh(ranks: int, names: list[str]) -> None:
    run(summoned, ranks, names, timeout=180)


def generated(names: list[str]) -> list[Tensor]:
    warnings.simplefilter("ignore")
    found = []
    for name in names:
        torch.manual_seed(3)
        model = HuggingFaceModel(llama().eval())
        parallelize_model(model, BY_WORLD[name]())
        found.append(model.generate(ids(), max_new_tokens=6, do_sample=False))
    return found


@pytest.mark.promise(97)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
def test_the_unsharded_models_tokens_on_every_mesh(ranks: int, names: list[str]) -> None:
    torch.manual_seed(3)
    expected = llama().eval().generate(ids(), max_new_tokens=6, do_sample=False)
    for found in run(generated, ranks, names, timeout=180):
        assert all(torch.equal(tokens, expected) for tokens in found)
