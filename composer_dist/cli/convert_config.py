"""`composer-dist convert-config`: converts a configuration of another library."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from composer_dist.cli.init import write_whole
from composer_dist.cli.train import hush

EXAMPLES = """
Examples:

  composer-dist convert-config mpt.yaml run.yaml            LLM Foundry's or Composer's

  composer-dist convert-config ft_schedule.yaml             prints the result

  composer-dist convert-config default_config.yaml --only parallelism      accelerate's

  composer-dist convert-config fsdp.json parallelism.yaml --from transformers
"""


class Origin(StrEnum):
    """The libraries whose configurations can be converted."""

    COMPOSER = "composer"
    FINETUNING_SCHEDULER = "finetuning-scheduler"
    ACCELERATE = "accelerate"
    TRANSFORMERS = "transformers"


class RunSection(StrEnum):
    """What can be written without the rest."""

    PARALLELISM = "parallelism"
    PHASES = "phases"


def convert_config(
    source: Annotated[
        Path, typer.Argument(help="A YAML or JSON file of another library.", show_default=False)
    ],
    target: Annotated[
        Path | None,
        typer.Argument(help="The file to write; without it the result is printed.", show_default=False),
    ] = None,
    origin: Annotated[
        Origin | None, typer.Option("--from", help="The library; by default the one whose keys the file has.")
    ] = None,
    only: Annotated[
        RunSection | None,
        typer.Option(help="Write only this section, for ParallelArguments or FineTuningPhases."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert a configuration of Composer, the Fine-Tuning Scheduler, accelerate or transformers.

    Keys that have no counterpart are listed with their lines at the top of the result.
    """
    if target is not None and target.exists() and not overwrite:
        raise typer.BadParameter(f"{target} already exists; pass --overwrite", param_hint="TARGET")
    hush()
    from composer_dist.recipe.converting.convert import convert_file

    done = convert_file(source, None if origin is None else origin.value)
    text = done.text(str(source), None if only is None else only.value)
    if target is None:
        typer.echo(text, nl=False)
        return
    write_whole(target, text)
    for title, undecided in (("to decide", True), ("not converted", False)):
        for remark in done.remarks:
            if remark.undecided is undecided:
                typer.echo(f"{source}, {title}: {remark}.", err=True)
    typer.echo(f"Written to {target}.{_next(target, done.whole and only is None)}", err=True)


def _next(target: Path, whole: bool) -> str:
    if whole:
        return f" Check it: composer-dist train {shlex.quote(str(target))} --dry-run"
    return " It is a part of a run: 'composer-dist init' writes a whole one to copy it to."
