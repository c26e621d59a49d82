"""`composer-dist verify`: whether a run's prepared model is the one that the configuration describes."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from composer_dist.cli.announce import say
from composer_dist.cli.train import ConfigFile, Launched, Overrides, Processes, prepare, start, told

EXAMPLES = """
Examples:

  composer-dist verify pretrain.yaml -n 2     in two processes on this machine
  composer-dist verify pretrain.yaml parallelism=ddp --json
  torchrun --nproc-per-node 8 -m composer_dist verify pretrain.yaml

Exit status: 0 if the prepared model is the same, 1 if it is not, 2 if the call or the configuration is wrong.
"""


def verify(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    processes: Processes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    launched: Launched = None,
) -> None:
    """Prepare a run's model, and compare it with the unsharded one on a batch of the run's data."""
    debug, given = prepare(context, "verify", config, overrides, launched)
    if launched is None:
        say("Preparing the model and comparing it ...")
    if processes is not None and processes > 1:
        start(processes, "verify --json" if as_json else "verify", config, given, debug)
    with told(debug, launched, "verify"):
        _verify(config, given, as_json)


def _verify(config: Path, overrides: list[str], as_json: bool) -> None:
    """One process of the verification."""
    from composer_dist.distributed.ranks.launcher_variables import torchrun_variables

    os.environ.update(torchrun_variables(os.environ))
    from composer_dist.recipe.read import read_configuration

    configuration = read_configuration(config, overrides)
    from composer_dist.distributed import process_group
    from composer_dist.errors import ParallelismRuntimeError
    from composer_dist.recipe.session import verified

    found = verified(configuration)
    if process_group.world_and_rank()[1] == 0:
        typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
    process_group.barrier()  # the launcher ends all ranks when the first one fails
    process_group.destroy()
    if not found.ok:
        raise ParallelismRuntimeError(
            f"the prepared model is not the one that {config} describes, in {len(found.differences)} places"
        )
