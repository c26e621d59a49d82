"""`composer-dist convert`: a checkpoint from one form into another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  composer-dist convert run/ep3 model --to huggingface --like path/to/base

  composer-dist convert run/ep3 model.pt

  composer-dist convert path/to/model start --to sharded --prefix model.
"""


class Form(StrEnum):
    """The forms that a checkpoint can be written in."""

    SHARDED = "sharded"
    FILE = "file"
    HUGGINGFACE = "huggingface"


def convert(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint: sharded, a file, or a Hugging Face directory.")
    ],
    target: Annotated[Path, typer.Argument(help="What to write.")],
    to: Annotated[
        Form | None, typer.Option(help="The form of TARGET; a name in .pt, .pth or .ckpt means file.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(help="A directory with the config.json (and tokenizer) of the Hugging Face model."),
    ] = None,
    key: Annotated[str, typer.Option(help="Under which a checkpoint has the model.")] = "model",
    prefix: Annotated[
        str,
        typer.Option(
            help="What stands before a model's names in a checkpoint made of a Hugging Face directory; "
            "'model.' for a HuggingFaceModel's."
        ),
    ] = "",
    max_shard_size: Annotated[str, typer.Option(help="Of one file of a Hugging Face directory.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at TARGET.")] = False,
) -> None:
    """Convert a checkpoint, on one CPU, a tensor at a time.

    Between the directories and files of save_checkpoint, and Hugging Face models.
    """
    form = to or (Form.FILE if target.suffix in {".pt", ".pth", ".ckpt"} else None)
    if form is None:
        raise typer.BadParameter("say what TARGET should be", param_hint="--to")
    if not source.exists():
        raise typer.BadParameter(f"there is no {source}", param_hint="SOURCE")
    if target.exists() and not overwrite and (target.is_file() or any(target.iterdir())):
        raise typer.BadParameter(f"{target} is there already; pass --overwrite", param_hint="TARGET")

    from composer_dist.checkpoint.convert import convert_checkpoint

    convert_checkpoint(
        source, target, form.value, like=like, key=key, prefix=prefix, max_shard_size=max_shard_size
    )
    typer.echo(f"{target}: {form.value}")
