"""`composer-dist train`: a run from a configuration."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from composer_dist.run.read import Configuration

EXAMPLES = """
Examples:

  composer-dist init                          write pretrain.yaml
  composer-dist train pretrain.yaml           train, in one process
  composer-dist train pretrain.yaml -n 2      in two, on this machine
  composer-dist train pretrain.yaml optimizer.lr=1e-3 seed=3
  composer-dist train pretrain.yaml --dry-run -n 8
  torchrun --nproc-per-node 8 -m composer_dist train pretrain.yaml
  srun composer-dist train pretrain.yaml      each finds its rank

Exit status:

  0    trained
  1    the run failed
  2    the configuration or the call is wrong
  130  Ctrl-C
"""


def train(
    config: Annotated[Path, typer.Argument(help="The configuration, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the file's.", show_default=False),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("-n", "--processes", min=1, help="Start as many processes on this machine."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
) -> None:
    """Train what a configuration describes."""
    if dry_run:
        _print_plan(_read(config, overrides), processes)
    elif processes is not None and processes > 1:
        from composer_dist.run.local import launch_local

        _refuse_a_launcher_inside_another()
        command = ["-m", "composer_dist", "train", str(config), *(overrides or []), "--launched"]
        raise typer.Exit(launch_local(processes, command))
    else:
        _run(config, overrides, launched)


def _run(config: Path, overrides: list[str] | None, launched: bool) -> None:
    """One process of a run."""
    from composer_dist.distributed.surroundings import torchrun_variables
    from composer_dist.errors import ParallelismError
    from composer_dist.run.local import report_failure

    os.environ.update(torchrun_variables(os.environ))
    _hush()
    try:
        configuration = _read(config, overrides)
        from composer_dist.run.session import run

        run(configuration)
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Exception as error:
        ours = isinstance(error, ParallelismError)
        text = f"composer-dist train: {error}" if ours else traceback.format_exc().rstrip()
        if launched:
            report_failure(text)
        else:
            typer.echo(text, err=True)
        raise typer.Exit(1) from None


def _read(config: Path, overrides: list[str] | None) -> Configuration:
    """The configuration; all that is wrong with it ends the command, told by one rank."""
    from composer_dist.run.read import ConfigurationError, read_configuration

    try:
        return read_configuration(config, overrides or [])
    except ConfigurationError as error:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _print_plan(configuration: Configuration, processes: int | None) -> None:
    from composer_dist.run.dry import describe

    typer.echo(describe(configuration, processes or int(os.environ.get("WORLD_SIZE") or 1)))


def _refuse_a_launcher_inside_another() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        raise typer.BadParameter("this process has been started by a launcher already; leave out -n.")


def _hush() -> None:
    """What libraries say of machines that are not there, and bars for reading files, help nobody here."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
