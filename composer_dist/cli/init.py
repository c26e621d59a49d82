"""`composer-dist init`: a first configuration, with comments."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

PRESETS = Path(__file__).parents[1] / "recipe" / "presets"


EXAMPLES = """
Presets:

  pretrain          a language model, from nothing
  finetune          all weights of a language model
  lora, dora        adapters above a language model
  qlora             an adapter above weights in 4 bits
  classification    what a piece of text is
  masked_lm         a model that fills gaps in a text
  vision            a PyTorch module and data of your own, here for digits

Examples:

  composer-dist init                     write pretrain.yaml
  composer-dist init lora mine.yaml      write the preset for LoRA to mine.yaml
"""


class Preset(StrEnum):
    """What there is to begin with; each is a file in recipe/presets."""

    PRETRAIN = "pretrain"
    FINETUNE = "finetune"
    LORA = "lora"
    DORA = "dora"
    QLORA = "qlora"
    CLASSIFICATION = "classification"
    MASKED_LM = "masked_lm"
    VISION = "vision"


def init(
    preset: Annotated[Preset, typer.Argument(help="What to begin with.")] = Preset.PRETRAIN,
    path: Annotated[
        Path | None,
        typer.Argument(help="Where to write it; by default the preset's name.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a first configuration, with comments; it runs as it is and downloads nothing."""
    target = path or Path(f"{preset}.yaml")
    if target.is_dir():
        target = target / f"{preset}.yaml"
    if target.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"{target} should end in .yaml.", param_hint="PATH")
    files = _files(preset, target)
    if there := [str(file) for file in files if file.exists() and not force]:
        raise typer.BadParameter(
            f"{', '.join(there)} is there already; --force replaces it.", param_hint="PATH"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text)
        typer.echo(f"Written: {file}")
    typer.echo(f"Next: composer-dist train {target}")


def _files(preset: Preset, target: Path) -> dict[Path, str]:
    """What to write where: the configuration, and beside it the code that it names, called like it."""
    sources = {target: PRESETS / f"{preset}.yaml"}
    if (code := PRESETS / f"{preset}.py").exists():
        sources[target.with_suffix(".py")] = code
    texts = {file: source.read_text() for file, source in sources.items()}
    if target.stem != preset:
        texts = {file: _renamed(text, preset, target.stem) for file, text in texts.items()}
    return texts


def _renamed(text: str, preset: str, name: str) -> str:
    """The text, where it speaks of its own files, by their new name."""
    for ending in (".yaml", ".py"):
        text = text.replace(f"{preset}{ending}", f"{name}{ending}")
    return text.replace(f"runs/{preset}", f"runs/{name}")
