"""`composer-dist keys` and `composer-dist schema`: what a run's configuration may say."""

from typing import Annotated

import typer

from composer_dist.wording import near_miss

EXAMPLES = """
Examples:

  composer-dist keys                    all keys of all sections

  composer-dist keys trainer            one section

  composer-dist keys optimizer.adamw
"""


def keys(
    section: Annotated[
        str | None, typer.Argument(help="A section, such as trainer or callbacks.ema.", show_default=False)
    ] = None,
) -> None:
    """List the keys of a configuration, with their types and defaults, and one line on each."""
    from composer_dist.distributed.plan.text import table
    from composer_dist.recipe.keys import sections

    known = sections()
    chosen = [name for name in known if section is None or _is_in(name, section)]
    if not chosen:
        names = dict.fromkeys(name.partition(" ")[0] for name in known if name)
        raise typer.BadParameter(
            f"there is no section {section!r}.{near_miss(str(section), names)} Sections: {', '.join(names)}",
            param_hint="SECTION",
        )
    headings = {"key": "left", "type": "left", "default": "left", "meaning": "left"}
    for name in chosen:
        rows = [[entry.key, entry.type, entry.default, entry.text] for entry in known[name]]
        typer.echo(table(name or "the top of the file", headings, rows))


def schema() -> None:
    """Print the JSON Schema of a configuration, for editors that check YAML while it is written."""
    from composer_dist.recipe.outline import SCHEMA

    typer.echo(SCHEMA.read_text(), nl=False)


def _is_in(name: str, section: str) -> bool:
    plain = name.partition(" ")[0]
    return plain == section or plain.startswith(f"{section}.")
