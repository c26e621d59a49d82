"""Every configuration in docs/finetuning.md is valid. Its Python is run by test_blocks.py."""

import re
from pathlib import Path

from composer_dist.recipe.read import read_configuration

PAGE = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_every_configuration_is_valid(tmp_path: Path) -> None:
    found = blocks("yaml")
    assert found
    for number, text in enumerate(found):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        read_configuration(file)
