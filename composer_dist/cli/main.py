"""The entry point of `composer-dist` and of `python -m composer_dist`.

Ctrl-C while it and the commands are imported ends the process without a traceback.
"""

import os
import signal
import sys

_before = signal.getsignal(signal.SIGINT)
if _before is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))


def main() -> None:
    """Run the command that was asked for."""
    from typer.main import get_command

    from composer_dist.cli.commands import app

    sys.path.append("")  # the working directory, as with `python -m`; last, so that it hides no package
    command = get_command(app)
    signal.signal(signal.SIGINT, _before)
    command(prog_name="composer-dist")
