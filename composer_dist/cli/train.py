"""`composer-dist train`: trains what a configuration describes."""

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from composer_dist.cli import failures
from composer_dist.cli.announce import announcement, say
from composer_dist.cli.interrupt import EXIT_STATUS, CtrlC
from composer_dist.config.launched import is_rank_zero, launched_ranks
from composer_dist.errors import ParallelismError
from composer_dist.users_code import users_frames

EXAMPLES = """
Examples:

  composer-dist init                          write pretrain.yaml
  composer-dist train pretrain.yaml           train, in one process
  composer-dist train pretrain.yaml -n 2      in two processes on this machine
  composer-dist train pretrain.yaml optimizer.lr=1e-3 seed=3
  composer-dist train pretrain.yaml --dry-run -n 8
  torchrun --nproc-per-node 8 -m composer_dist train pretrain.yaml
  srun composer-dist train pretrain.yaml      each process finds its rank

Exit status:

  0    trained
  1    the run failed; with -n, 128 + n if signal n killed a process
  2    the call or the configuration is wrong, or names what cannot be used
  75   the run made no progress (trainer.hang_timeout)
  130  Ctrl-C; a second one exits immediately
  143  SIGTERM, as before a preemption; with checkpoints the run is saved first
"""


ConfigFile = Annotated[Path, typer.Argument(help="The configuration, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that override the file's.", show_default=False),
]
Processes = Annotated[
    int | None, typer.Option("-n", "--processes", min=1, help="Number of processes to start on this machine.")
]
Launched = Annotated[int | None, typer.Option("--launched", hidden=True)]


def train(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    processes: Processes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done and exit.")] = False,
    launched: Launched = None,
) -> None:
    """Train a model as a configuration describes."""
    debug, given = prepare(context, "train", config, overrides, launched)
    if dry_run:
        say("Planning ...")
        with told(debug, command="train --dry-run"):
            plan = _plan(config, given, processes)
        typer.echo(plan)
    elif processes is not None and processes > 1:
        start(processes, "train", config, given, debug, lambda: _announce(config, given, processes))
    else:
        with told(debug, launched) as ctrl_c:
            _run(config, given, launched is not None, ctrl_c)


def prepare(
    context: typer.Context, command: str, config: Path, overrides: list[str] | None, launched: int | None
) -> tuple[bool, list[str]]:
    """Whether `--debug` was given, and the overrides; ends the command if they are wrong at first sight."""
    hush()
    debug, given = bool(context.find_root().params.get("debug")), overrides or []
    if launched is None:
        with told(debug, command=command):
            refuse_at_once(config, given, writes=command != "verify")
    return debug, given


def start(
    processes: int,
    command: str,
    config: Path,
    given: list[str],
    debug: bool,
    announce: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run the command in processes of this machine, and end with their exit status."""
    from composer_dist.cli.launch import launch_local

    refuse_a_launcher_inside_another()
    with CtrlC(command=command.split()[0]):  # until the processes start
        announce()
        arguments = ["-m", "composer_dist", *(["--debug"] if debug else []), *command.split(), str(config)]
        arguments += [*given, "--launched", str(os.getpid())]
        raise typer.Exit(launch_local(processes, arguments, command.split()[0]))


def _run(config: Path, overrides: list[str], announced: bool, ctrl_c: CtrlC) -> None:
    """One process of a run."""
    from composer_dist.distributed.ranks.launcher_variables import torchrun_variables

    os.environ.update(torchrun_variables(os.environ))
    if not announced and is_rank_zero():
        _announce(config, overrides, None)
    gc.disable()  # it would scan everything that is imported again and again
    try:
        from composer_dist.recipe.read import read_configuration

        configuration = read_configuration(config, overrides)
        from composer_dist.recipe.session import run
    finally:
        gc.enable()

    ctrl_c.at_once = False
    run(configuration)


def refuse_at_once(config: Path, overrides: list[str], writes: bool = True) -> None:
    """Report what is wrong before torch is imported, which takes seconds; then the rest, and exit."""
    from composer_dist.recipe.first_look.look import faults_at_once
    from composer_dist.recipe.problems import ConfigurationError

    # Several hosts may have different files; their ranks tell each other when they read the data.
    if not (told := faults_at_once(config, overrides, not _in_a_launcher(), writes)):
        return
    if is_rank_zero():
        typer.echo("\n".join(told), err=True)
        say("Looking for more ...")
        try:
            from composer_dist.recipe.read import read_configuration

            read_configuration(config, overrides)
        except ConfigurationError as error:
            rest = [line for line in str(error).splitlines() if line not in told]
            typer.echo("\n".join(rest), nl=bool(rest), err=True)
        except Exception:  # of the user's code, which was imported to look at it; the faults above come first
            pass
    raise typer.Exit(failures.WRONG_CALL)


def _announce(config: Path, overrides: list[str], processes: int | None) -> None:
    """Print at once what will be done, because the next steps print nothing for seconds."""
    if text := announcement(config, overrides, processes):
        typer.echo(text, err=True)


def _plan(config: Path, overrides: list[str], processes: int | None) -> str:
    from composer_dist.recipe.dry_run import describe
    from composer_dist.recipe.problems import blamed_on
    from composer_dist.recipe.read import read_configuration

    world = processes or launched_ranks()
    configuration = read_configuration(config, overrides)
    with blamed_on(configuration.document):
        return describe(configuration, world)


@contextmanager
def told(debug: bool, launcher: int | None = None, command: str = "train") -> Iterator[CtrlC]:
    """Errors end the command with their text, and with the traceback where they come from the user's code.

    Args:
        debug: print the whole traceback of any error.
        launcher: the id of the process whose `launch_local` started this one; it reports the error instead.
        command: what is running, for the text.
    """
    from composer_dist.cli.launch import end_with, report_failure

    if launcher is not None:
        end_with(launcher)
    shown, warnings.formatwarning = warnings.formatwarning, _as_a_line
    quiet = launcher is not None or not is_rank_zero()
    ctrl_c = CtrlC(quiet, command=command)
    try:
        with ctrl_c:
            yield ctrl_c
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_STATUS) from None
    except Exception as error:
        if ctrl_c.received:
            raise typer.Exit(EXIT_STATUS) from None
        status, text = _outcome(error, debug, command)
        if launcher is not None:
            report_failure(text, own=bool(users_frames(error)), status=status)
        elif status == failures.FAILED or is_rank_zero():  # else all ranks find the same
            typer.echo(text, err=True)
        raise typer.Exit(status) from None
    finally:
        warnings.formatwarning = shown


def _as_a_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning without its line of code, which is never the user's here."""
    return f"{category.__name__}: {message}\n"


def _outcome(error: Exception, debug: bool, command: str) -> tuple[int, str]:
    """The exit status and the text; our own errors name the rank themselves."""
    from composer_dist.recipe.problems import ConfigurationError

    wrong = isinstance(error, ConfigurationError)
    if wrong and not debug:
        return failures.WRONG_CALL, str(error)
    rank = None if isinstance(error, ParallelismError) else os.environ.get("RANK")
    where = f"composer-dist {command}" + ("" if rank is None else f", rank {rank}")
    status = failures.WRONG_CALL if wrong else failures.FAILED
    return status, failures.described(error, where, debug)


def _in_a_launcher() -> bool:
    """Whether a launcher has started this process."""
    from composer_dist.distributed.ranks.launcher_variables import torchrun_variables

    return not {"TORCHELASTIC_RUN_ID", "RANK"}.isdisjoint(os.environ) or bool(torchrun_variables(os.environ))


def refuse_a_launcher_inside_another() -> None:
    """Refuse to start processes in one that a launcher has started."""
    if _in_a_launcher():
        raise typer.BadParameter("this process was already started by a launcher; leave out -n.")


def hush() -> None:
    """Hides progress bars for reading files and warnings of libraries about other machines."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
