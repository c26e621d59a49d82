"""Samples of a model in training, on any mesh."""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.models import HuggingFaceModel
from composer_dist.trainer import Generate
from tests.kit.compare import close, fails_alike, weights
from tests.kit.huggingface import pretrained_gpt2, tokenizer
from tests.kit.huggingface import pretrained_llama as plain_llama
from tests.kit.training import fitted, fitted_on_parts, language_model, quiet
from tests.kit.world import World

PROMPTS = ["a b c", "d", "e f g h i"]


def model(make: Any = plain_llama) -> HuggingFaceModel:
    torch.manual_seed(0)
    return HuggingFaceModel(make(), tokenizer())


def data(samples: int = 4) -> list[dict[str, Tensor]]:
    ids = torch.randint(4, 30, (samples, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}] * 4


def trained(config: Any = None, make: Any = plain_llama, **options: Any) -> tuple[Any, Any]:
    """Batch and rows of each table, and the final weights; every rank has all data."""
    language = model(make)
    callbacks = [Generate(PROMPTS, "2ba", max_new_tokens=4, **options)] if options.pop("on", True) else []
    options = {"callbacks": callbacks, "check_sampler": False, "seed": 3}
    _, log = fitted_on_parts([], config, language, train_dataloader=data(), **options)
    assert language.training
    return [(time.batch, rows) for time, rows in log.tables.get("generations", [])], weights(language)


def divisible() -> Any:
    """With heads for two ranks."""
    return language_model().model


def by_hand(language: HuggingFaceModel) -> list[str]:
    """Each prompt alone, without padding."""
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer()(prompt, return_tensors="pt")["input_ids"]
        tokens = language.eval().generate(ids, max_new_tokens=4, do_sample=False)
        texts += tokenizer().batch_decode(tokens[:, ids.shape[1] :], skip_special_tokens=True)
    return texts


def test_prompts_are_continued_at_intervals_in_batches_of_any_size() -> None:
    tables, _ = trained()
    assert [batch for batch, _ in tables] == [2, 4]
    assert [row["prompt"] for row in tables[0][1]] == PROMPTS
    assert trained(batch_size=1)[0] == trained(batch_size=2)[0] == tables


@pytest.mark.parametrize("padding", [True, False])
def test_the_texts_are_those_of_the_model_as_it_is_then(padding: bool) -> None:
    """A tokenizer without padding takes one prompt at a time."""
    language = model()
    assert language.tokenizer is not None
    if not padding:
        language.tokenizer.pad_token = None
    _, log = fitted(language, train_dataloader=data(), callbacks=Generate(PROMPTS, max_new_tokens=4))
    (_, rows), *_ = log.tables["generations"]
    assert [row["generation"] for row in rows] == by_hand(language)


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    """GPT-2 has dropout, and sampling draws random numbers."""
    _, without = trained(make=pretrained_gpt2, on=False)
    _, sampled = trained(make=pretrained_gpt2, do_sample=True)
    close(sampled, without)


TENSOR_PARALLEL: list[Any] = [
    {"mesh": {"dp_shard": 1, "tp": 2}, "tp": {"loss_parallel": loss_parallel}}
    for loss_parallel in (False, True)
]


@pytest.mark.parametrize("config", ["fsdp", "ddp", *TENSOR_PARALLEL])
def test_all_ranks_take_part_on_every_mesh(world2: World, config: Any) -> None:
    expected, _ = trained(make=divisible)
    for found, _ in world2(trained, config, divisible):
        assert found == expected


def refused() -> None:
    reason = "ComposerClassifier has no generate and no tokenizer."
    with fails_alike(ParallelismTypeError, "a HuggingFaceModel with a tokenizer; this", reason):
        quiet(callbacks=Generate("a"), parallelism_config="fsdp")


def test_a_model_that_cannot_is_refused_on_every_rank(world2: World) -> None:
    world2(refused)


def test_a_misspelled_option_is_told_the_closest() -> None:
    generate = Generate("a b c", max_new_tokns=4)
    with pytest.raises(ParallelismValueError, match=r"has no max_new_tokns\. Did you mean 'max_new_tokens'"):
        fitted(model(pretrained_gpt2), train_dataloader=data(), callbacks=generate)


def test_there_must_be_prompts() -> None:
    for prompts, size in (([], None), (["a"], 0)):
        with pytest.raises(ParallelismValueError, match="at least one prompt"):
            Generate(prompts, batch_size=size)


@pytest.mark.parametrize("options", [{"max_new_tokens": 62}, {"max_length": 65}])
def test_texts_end_within_the_table_of_positions(options: dict[str, int]) -> None:
    """GPT-2's has 64 here; three tokens are the prompt's, and the last one needs no position."""
    language = model(pretrained_gpt2)
    _, log = fitted(language, train_dataloader=data(), callbacks=Generate("a b c", min_length=65, **options))
    assert "generations" in log.tables
    ((name, most),) = options.items()
    with pytest.raises(ParallelismValueError, match="may have 66 tokens, but wpe has only 64 positions"):
        quiet(language, callbacks=Generate("a b c", **{name: most + 1}))
    language = model()
    quiet(language, callbacks=Generate("a b c", max_new_tokens=10**6))  # rotary positions have no end
