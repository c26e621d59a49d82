"""`HuggingFaceModel.generate` on sharded models gives the unsharded model's tokens."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.config.parallelism import ParallelismConfig
from composer_dist.distributed import parallelize_composer_model, parallelize_model
from composer_dist.errors import ParallelismValueError
from composer_dist.models import HuggingFaceModel
from tests.kit import huggingface as hf
from tests.kit.compare import fails_alike
from tests.kit.grids import slow
from tests.kit.meshes import BY_WORLD, PLACES
from tests.kit.world import on_ranks

OPTIONS = {
    "greedy": {"max_new_tokens": 8, "do_sample": False},
    "beams": {"max_new_tokens": 6, "num_beams": 3, "do_sample": False},
}
BUILDS: dict[str, Callable[[], Any]] = {
    "llama": hf.pretrained_llama,
    "gpt2": hf.pretrained_gpt2,
    "t5": hf.pretrained_t5,
    "lora": lambda: HuggingFaceModel(hf.pretrained_llama(), peft_config=hf.adapter("lora")).model,
    "prompt": lambda: HuggingFaceModel(hf.pretrained_llama(), peft_config=hf.adapter("prompt")).model,
}

PLANS = [
    ("prepared", True, "greedy"),
    ("prepared", False, "beams"),
    ("wrapper", None, "greedy"),
    ("model", None, "greedy"),
    ("model", True, "beams"),
]


def build(kind: str) -> HuggingFaceModel:
    torch.manual_seed(3)
    return HuggingFaceModel(BUILDS[kind]()).eval()


@pytest.mark.promise(97)
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # peft's prompts
@pytest.mark.parametrize(
    ("kind", "place", "root", "mode"),
    [
        one if number % len(PLANS) == number // len(PLANS) % len(PLANS) or one[0] == "llama" else slow(*one)
        for number, one in enumerate((kind, *plan) for kind in BUILDS for plan in PLANS)
    ],
)
@on_ranks(2)
def test_the_unsharded_models_tokens(kind: str, place: str, root: bool | None, mode: str) -> None:
    model, given = build(kind), hf.prompt(dist.get_rank())
    expected = model.generate(given, **OPTIONS[mode])
    if place == "prepared":
        parallelize_composer_model(model, config=FSDP2Config(reshard_after_forward=root is not False))
    else:
        hf.sharded(model if place == "wrapper" else model.model, root=root)
    before = vars(model.model).get("generate")
    assert torch.equal(model.generate(given, **OPTIONS[mode]), expected)
    assert vars(model.model).get("generate") is before
    with torch.no_grad():
        model({"input_ids": hf.prompt(0), "labels": hf.prompt(0)})  # an ordinary forward goes on working
    assert torch.equal(model.generate(input_ids=given, **OPTIONS[mode]), expected)


@pytest.mark.promise(97)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
@on_ranks("ranks", timeout=180)
def test_the_unsharded_models_tokens_on_every_mesh(ranks: int, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name, make in [*((name, hf.llama) for name in names), *([("tp", hf.gpt2)] if "tp" in names else [])]:
        torch.manual_seed(3)
        model = HuggingFaceModel(make().eval())
        expected = model.generate(hf.prompt(0), **OPTIONS["greedy"])
        parallelize_model(model, BY_WORLD[name]())
        assert torch.equal(model.generate(hf.prompt(0), **OPTIONS["greedy"]), expected)


@pytest.mark.promise(97)
@on_ranks(2)
def test_ranks_may_stop_at_other_lengths() -> None:
    model, options = build("llama"), {"max_new_tokens": 2 + 10 * dist.get_rank(), "do_sample": False}
    expected = model.generate(hf.prompt(0), **options)
    hf.sharded(model.model)
    assert torch.equal(model.generate(hf.prompt(0), **options), expected)
    assert any(isinstance(module, FSDPModule) for module in model.model.modules())


@pytest.mark.promise(97)
@on_ranks(2)
@pytest.mark.parametrize("plain", [False, True])
def test_static_caches_need_the_same_number_of_steps(plain: bool) -> None:
    """Otherwise a rank that has finished ends in an IndexError, and the others wait for it."""
    wrapped, rank = build("llama"), dist.get_rank()
    model: Any = wrapped.model if plain else wrapped
    options = {"cache_implementation": "static", "do_sample": False}
    prompt = hf.prompt(0)[:, : 3 + rank]
    expected = model.generate(prompt, max_new_tokens=4, **options)
    if plain:
        parallelize_model(model, ParallelismConfig(forward_methods=["generate"]))
    else:
        hf.sharded(model.model)
    for differ in ({"max_length": 12}, {"max_new_tokens": 2 + rank}):
        with fails_alike(ParallelismValueError, "Pass the same max_new_tokens on all ranks"):
            model.generate(prompt, **differ, **options)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, **options), expected)


def test_generate_pads_with_the_tokenizers_token() -> None:
    model = HuggingFaceModel(hf.pretrained_llama(), hf.tokenizer())
    model.model.generation_config.pad_token_id = None
    assert model.generate(hf.prompt(0), max_new_tokens=2, do_sample=False).shape == (2, 6)
