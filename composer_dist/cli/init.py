"""`composer-dist init`: a first configuration, with comments."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from composer_dist.wording import near_miss

PRESETS = Path(__file__).parents[1] / "recipe" / "presets"
EXAMPLES = """
Presets:

  pretrain          a language model from scratch
  finetune          all weights of a language model
  lora, dora        adapters on a language model
  qlora             an adapter on weights in 4 bits
  classification    text classification
  masked_lm         a masked language model
  vision            your own PyTorch module and data, here for digits

Examples:

  composer-dist init                     write pretrain.yaml
  composer-dist init lora mine.yaml      write the preset lora to mine.yaml
"""


class Preset(StrEnum):
    """The templates; each is a file in recipe/presets."""

    PRETRAIN = "pretrain"
    FINETUNE = "finetune"
    LORA = "lora"
    DORA = "dora"
    QLORA = "qlora"
    CLASSIFICATION = "classification"
    MASKED_LM = "masked_lm"
    VISION = "vision"


def init(
    preset: Annotated[
        str,
        typer.Argument(
            metavar="PRESET", help="Template to start from, see below.", autocompletion=lambda: list(Preset)
        ),
    ] = Preset.PRETRAIN.value,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH", help="File to write; by default named after the preset.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a first configuration with comments. It runs as is and downloads nothing."""
    if preset not in (known := [str(one) for one in Preset]):
        raise typer.BadParameter(
            f"there is no preset {preset!r}.{near_miss(preset, known)} Presets: {', '.join(known)}.",
            param_hint="PRESET",
        )
    target = path or Path(f"{preset}.yaml")
    if target.is_dir():
        target = target / f"{preset}.yaml"
    if target.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"{target} should end in .yaml.", param_hint="PATH")
    files = _files(preset, target)
    if there := [str(file) for file in files if file.exists() and not force]:
        raise typer.BadParameter(f"{', '.join(there)} already exists; pass --force.", param_hint="PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_whole(file, text)
        typer.echo(f"Wrote {file}")
    typer.echo(f"Next: composer-dist train {shlex.quote(str(target))}")


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step: an error, such as a full disk, leaves what was there."""
    if file.exists() and not file.is_file():  # a pipe, such as /dev/stdout
        file.write_text(text, "utf-8")
        return
    real = file.resolve()  # a link stays one
    aside = real.with_name(f".{real.name}.tmp")
    try:
        aside.write_text(text, "utf-8")
        aside.replace(real)
    except OSError as error:
        error.filename = str(file)  # a full disk's has none
        raise
    finally:
        aside.unlink(missing_ok=True)


def _files(preset: str, target: Path) -> dict[Path, str]:
    """The files to write: the configuration and the code that it names, under the same name."""
    sources = {target: PRESETS / f"{preset}.yaml"}
    if (code := PRESETS / f"{preset}.py").exists():
        sources[target.with_suffix(".py")] = code
    texts = {file: source.read_text("utf-8") for file, source in sources.items()}
    if target.stem != preset:
        texts = {file: _renamed(text, preset, target.stem) for file, text in texts.items()}
    return texts


def _renamed(text: str, preset: str, name: str) -> str:
    """The text with the new name of its own files."""
    for ending in (".yaml", ".py"):
        text = text.replace(f"{preset}{ending}", f"{name}{ending}")
    return text.replace(f"runs/{preset}", f"runs/{name}")
