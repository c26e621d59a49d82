"""`composer-dist convert`: converts a checkpoint from one format to another."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from composer_dist.cli.train import hush

EXAMPLES = """
Examples:

  composer-dist convert run/ep3 model --to huggingface --like path/to/base

  composer-dist convert run/ep3 model.pt

  composer-dist convert path/to/model start --to sharded --prefix model.
"""


class Form(StrEnum):
    """The formats of checkpoints."""

    SHARDED = "sharded"
    FILE = "file"
    HUGGINGFACE = "huggingface"


_NAMES = {
    Form.SHARDED: "a sharded checkpoint",
    Form.FILE: "one file",
    Form.HUGGINGFACE: "Hugging Face format",
}


def convert(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint: sharded, a file, or a Hugging Face directory.")
    ],
    target: Annotated[Path, typer.Argument(help="The file or directory to write.")],
    to: Annotated[
        Form | None, typer.Option(help="Format of TARGET; a name in .pt, .pth or .ckpt means file.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(help="A directory with the config.json (and tokenizer) of the Hugging Face model."),
    ] = None,
    key: Annotated[str, typer.Option(help="Key of the model in a checkpoint.")] = "model",
    prefix: Annotated[
        str,
        typer.Option(
            help="Prefix to put before parameter names of a Hugging Face directory; 'model.' for a "
            "HuggingFaceModel."
        ),
    ] = "",
    max_shard_size: Annotated[str, typer.Option(help="Of a file in a Hugging Face directory.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert between checkpoint directories, checkpoint files and Hugging Face models.

    It runs on one CPU and holds one tensor at a time.
    """
    if not source.exists():
        raise typer.BadParameter(f"{source} does not exist", param_hint="SOURCE")
    form = to or (Form.FILE if target.suffix in {".pt", ".pth", ".ckpt"} else None)
    if form is None:
        raise typer.BadParameter("say which format TARGET should have", param_hint="--to")
    if target.exists() and not overwrite and (target.is_file() or any(target.iterdir())):
        raise typer.BadParameter(f"{target} already exists; pass --overwrite", param_hint="TARGET")

    from composer_dist.checkpoint.convert import convert_checkpoint

    hush()
    convert_checkpoint(
        source, target, form.value, like=like, key=key, prefix=prefix, max_shard_size=max_shard_size
    )
    typer.echo(f"Converted to {_NAMES[form]}: {target}")
