"""The entry point of `composer-dist` and of `python -m composer_dist`."""

from composer_dist.cli.interrupt import CtrlC


def main() -> None:
    """Run the command that was asked for; Ctrl-C while typer is imported ends it without a traceback."""
    with CtrlC(quiet=True, at_once=True):
        from composer_dist.cli.commands import app
    app(prog_name="composer-dist")
