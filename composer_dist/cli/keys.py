"""`composer-dist keys` and `composer-dist schema`: what a run's configuration may say."""

import shutil
import textwrap
from typing import Annotated

import typer

from composer_dist.wording import near_miss

EXAMPLES = """
Examples:

  composer-dist keys                    all keys of all sections

  composer-dist keys trainer            one section

  composer-dist keys optimizer.adamw

  composer-dist keys trainer.precision  one key
"""


def keys(
    section: Annotated[
        str | None,
        typer.Argument(
            help="A section or a key, such as trainer, callbacks.ema or data.context.", show_default=False
        ),
    ] = None,
) -> None:
    """List the keys of a configuration, with their types, defaults and a line about each."""
    from composer_dist.recipe.keys import sections

    known = sections()
    chosen = {name: rows for name, rows in known.items() if section is None or _is_in(name, section)}
    if not chosen:
        above, _, key = str(section).rpartition(".")
        keys = {name: [row for row in rows if row.key == key] for name, rows in known.items()}
        chosen = {name: rows for name, rows in keys.items() if rows and _is_in(name, above)}
    if not chosen:
        names = dict.fromkeys(name.partition(" ")[0] for name in known if name)
        every = [f"{name.partition(' ')[0]}.{row.key}" for name, rows in known.items() for row in rows]
        every = [one.removeprefix(".") for one in every]  # the top of the file has no name
        near = near_miss(str(section), [*names, *every])
        raise typer.BadParameter(
            f"there is no section or key {section!r}.{near} Sections: {', '.join(names)}",
            param_hint="SECTION",
        )
    columns = min(shutil.get_terminal_size().columns, 100)
    for name, rows in chosen.items():
        typer.echo(f"\n{name or 'The top of the file'}:")
        for entry in rows:
            default = entry.default if entry.default == "required" else f"default {entry.default}"
            typer.echo(_wrapped(f"{entry.key} ({entry.type}, {default})", "  ", columns))
            typer.echo(_wrapped(entry.text, "      ", columns))


def schema() -> None:
    """Print the JSON Schema of a configuration, for editors that check YAML while it is written."""
    from composer_dist.recipe.outline import SCHEMA

    typer.echo(SCHEMA.read_text(), nl=False)


def _wrapped(text: str, space: str, columns: int) -> str:
    """Lines of whole words."""
    return textwrap.fill(text, columns, initial_indent=space, subsequent_indent=space, break_long_words=False)


def _is_in(name: str, section: str) -> bool:
    plain = name.partition(" ")[0]
    return plain == section or plain.startswith(f"{section}.")
