"""Keys of transformers' configurations: what its source says is what its classes have."""

import pytest
from transformers import CONFIG_MAPPING

from composer_dist.recipe.first_look.configurations import imported_keys, written_keys, written_types

TYPES = list(CONFIG_MAPPING.keys())


def test_the_source_has_all_types() -> None:
    assert set(written_types()) == set(TYPES)


def same_keys(types: list[str]) -> list[str]:
    """Those whose keys the source does not show."""
    unknown = []
    for kind in types:
        if (written := written_keys(kind)) is None:
            unknown.append(kind)
        else:
            real = imported_keys(kind)
            assert (written.kind, set(written.fields)) == (real.kind, set(real.fields)), kind
    return unknown


def test_keys_of_usual_models_are_those_of_their_classes() -> None:
    assert not same_keys(["llama", "gpt2", "bert", "qwen3", "t5", "mixtral", "gpt_oss", "xlm-roberta"])


@pytest.mark.zoo
def test_keys_of_all_models_are_those_of_their_classes() -> None:
    assert len(same_keys(TYPES)) < len(TYPES) / 20
