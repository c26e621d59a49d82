"""Whatever stands in a file, it is converted, or an error says what is wrong with it."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from composer_dist.recipe.converting.convert import convert_values
from composer_dist.recipe.problems import ConfigurationError
from tests.recipe.converting.test_accelerate import FSDP
from tests.recipe.converting.test_composer import FOUNDRY
from tests.recipe.converting.test_finetuning_scheduler import CLI, PLAN, SCHEDULE

FILES: dict[str, Any] = {
    "foundry": yaml.safe_load(FOUNDRY),
    "schedule": yaml.safe_load(SCHEDULE),
    "cli": CLI,
    "plan": PLAN,
    "accelerate": FSDP,
    "transformers": {"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": True}, "bf16": True},
}
WRONG: list[Any] = [None, "x", 3, -1, 0, 2.5, True, [], ["a"], {}, {"a": 1}, "${a}", [None]]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from paths(one, (*path, key))


@pytest.mark.promise(140)
@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_is_converted_or_named(name: str) -> None:
    chance = random.Random(name)
    known = list(paths(FILES[name]))
    told = []
    for path in chance.choices(known, k=60):
        values = copy.deepcopy(FILES[name])
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = copy.deepcopy(chance.choice(WRONG))
        try:
            convert_values(values)
        except ConfigurationError as error:
            told.append(str(error))
    assert 0 < len(told) < 60
    assert all(line.startswith("configuration: ") for text in told for line in text.splitlines())
