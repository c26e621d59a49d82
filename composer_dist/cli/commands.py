"""The command line, `composer-dist`; each command has its own file.

Exit statuses: 0 done, 1 failed, 2 the call or a file that it names is wrong, 130 Ctrl-C; the reason is the
last thing on standard error. Commands import heavy packages when they need them, so that `--help` is quick.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from composer_dist import __version__
from composer_dist.cli import convert, convert_config, doctor, failures, init, keys, plan, train, verify
from composer_dist.cli.interrupt import ended_at_once


class Commands(TyperGroup):
    """Commands that fail with one clear statement instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # of `| head`, which typer ends without a message
            raise
        except Exception as error:
            if ctx.params.get("debug") or _is_typers_own(error):
                raise
            command = f"composer-dist {ctx.invoked_subcommand}"
            typer.echo(failures.described(error, command, debug=False), err=True)
            raise typer.Exit(failures.status_of(error)) from error


def _is_typers_own(error: Exception) -> bool:
    """Exits and wrong usage, which typer reports itself."""
    return isinstance(error, typer.Abort) or hasattr(error, "exit_code")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train models on many devices and convert their checkpoints."""


app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=verify.EXAMPLES)(verify.verify)
app.command(epilog=init.EXAMPLES)(init.init)
app.command(epilog=plan.EXAMPLES)(ended_at_once(plan.plan))
app.command(epilog=keys.EXAMPLES)(ended_at_once(keys.keys))
app.command()(keys.schema)
app.command(epilog=convert.EXAMPLES)(convert.convert)
app.command(epilog=convert_config.EXAMPLES)(ended_at_once(convert_config.convert_config))
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
