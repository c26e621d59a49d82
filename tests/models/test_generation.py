"""`HuggingFaceModel.generate` on sharded models gives the unsharded model's tokens."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from composer_dist.config.fully_shard import FSDP2Config
from composer_dist.distributed import parallelize_composer_model, parallelize_model
from composer_dist.models import HuggingFaceModel
from tests.kit.huggingface import (
    adapter,
    llama,
    pretrained_gpt2,
    pretrained_llama,
    pretrained_t5,
    prompt,
    sharded,
    tokenizer,
)
from tests.kit.meshes import BY_WORLD, PLACES
from tests.kit.world import World, run

OPTIONS = {
    "greedy": {"max_new_tokens": 8, "do_sample": False},
    "beams": {"max_new_tokens": 6, "num_beams": 3, "do_sample": False},
}
BUILDS: dict[str, Callable[[], Any]] = {
    "llama": pretrained_llama,
    "gpt2": pretrained_gpt2,
    "t5": pretrained_t5,
    "lora": lambda: HuggingFaceModel(pretrained_llama(), peft_config=adapter("lora")).model,
    "prompt": lambda: HuggingFaceModel(pretrained_llama(), peft_config=adapter("prompt")).model,
}


def build(kind: str) -> HuggingFaceModel:
    torch.manual_seed(3)
    return HuggingFaceModel(BUILDS[kind]()).eval()


def generated(kind: str, place: str, root: bool | None, mode: str) -> list[Tensor]:
    model = build(kind)
    if place == "prepared":
        parallelize_composer_model(model, config=FSDP2Config(reshard_after_forward=root is not False))
    else:
        sharded(model if place == "wrapper" else model.model, root=root)
    rank = dist.get_rank()
    first = model.generate(prompt(rank), **OPTIONS[mode])
    assert "generate" not in vars(model.model)
    with torch.no_grad():
        model({"input_ids": prompt(0), "labels": prompt(0)})  # an ordinary forward goes on working
    again = model.generate(input_ids=prompt(rank), **OPTIONS[mode])
    return [first, again]


@pytest.mark.promise(97)
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # peft's prompts
@pytest.mark.parametrize(
    ("place", "root", "mode"),
    [
        ("prepared", True, "greedy"),
        ("prepared", False, "beams"),
        ("wrapper", None, "greedy"),
        ("model", None, "greedy"),
        ("model", True, "beams"),
    ],
)
@pytest.mark.parametrize("kind", BUILDS)
def test_the_unsharded_models_tokens(
    world2: World, kind: str, place: str, root: bool | None, mode: str
) -> None:
    for rank, results in enumerate(world2(generated, kind, place, root, mode)):
        expected = build(kind).generate(prompt(rank), **OPTIONS[mode])
        for tokens in results:
            assert torch.equal(tokens, expected), rank


def generated_on(names: list[str]) -> list[Tensor]:
    warnings.simplefilter("ignore")
    found = []
    for name in names:
        torch.manual_seed(3)
        model = HuggingFaceModel(llama().eval())
        parallelize_model(model, BY_WORLD[name]())
        found.append(model.generate(prompt(0), **OPTIONS["greedy"]))
    return found


@pytest.mark.promise(97)
@pytest.mark.parametrize(("ranks", "names"), PLACES)
def test_the_unsharded_models_tokens_on_every_mesh(ranks: int, names: list[str]) -> None:
    torch.manual_seed(3)
    expected = llama().eval().generate(prompt(0), **OPTIONS["greedy"])
    for found in run(generated_on, ranks, names, timeout=180):
        assert all(torch.equal(tokens, expected) for tokens in found)


def stops_early() -> tuple[Tensor, bool]:
    model = build("llama")
    sharded(model.model)
    tokens = model.generate(prompt(0), max_new_tokens=2 + 10 * dist.get_rank(), do_sample=False)
    sizes = [isinstance(module, FSDPModule) for module in model.model.modules()]
    return tokens, any(sizes)


@pytest.mark.promise(97)
def test_ranks_may_stop_at_other_lengths(world2: World) -> None:
    for rank, (tokens, still_sharded) in enumerate(world2(stops_early)):
        expected = build("llama").generate(prompt(0), max_new_tokens=2 + 10 * rank, do_sample=False)
        assert torch.equal(tokens, expected)
        assert still_sharded


def test_generate_pads_with_the_tokenizers_token() -> None:
    model = HuggingFaceModel(pretrained_llama(), tokenizer())
    model.model.generation_config.pad_token_id = None
    assert model.generate(prompt(0), max_new_tokens=2, do_sample=False).shape == (2, 6)
