"""Writes the reference (`docs/reference`) from the docstrings of the code, and the JSON Schema of runs.

`python docs/signatures.py` names the pages that are not up to date, with `--write` it writes them. A page has
`<!-- reference: package.module [Name ...] -->`; what follows, to `<!-- end of reference -->`, is generated:
the public classes and functions of the module, or those named; for `glossary` the module's docstring.
"""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_dist.recipe.keys import json_schema, sections
from composer_dist.recipe.outline import SCHEMA
from composer_dist.recipe.signature import documentation

_DOCS = Path(__file__).parent
PAGES = [_DOCS / "glossary.md", *sorted((_DOCS / "reference").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- reference: (\S+)(.*?) -->\n).*?(<!-- end of reference -->\n)", re.DOTALL)
_SECTIONS = ("Args", "Raises", "Returns", "Yields")


def page(text: str) -> str:
    """The page with its generated parts as the code is now."""
    return _BLOCK.sub(lambda found: found[1] + generated(found[2], found[3].split()) + found[4], text)


def generated(module: str, names: list[str]) -> str:
    """The text about a module; the keys of the YAML for the module `keys`."""
    if module == "keys":
        return "".join(_keys())
    loaded = importlib.import_module(module)
    if names == ["glossary"]:
        return f"\n{inspect.cleandoc(loaded.__doc__ or '')}\n\n"
    objects = vars(loaded)
    public = [
        one
        for name, one in objects.items()
        if getattr(one, "__module__", None) == module and not name.startswith("_")
        if (inspect.isclass(one) or inspect.isfunction(one)) and (not names or name in names)
    ]
    return "".join(
        _described(one, "##") for one in sorted(public, key=lambda one: inspect.getsourcelines(one)[1])
    )


def _described(one: Any, heading: str) -> str:
    parts = [f"\n{heading} `{one.__qualname__}`\n\n```python\n{_signature(one)}\n```\n"]
    if doc := inspect.cleandoc(one.__doc__ or ""):
        parts.append(f"\n{_markdown(doc)}\n")
    if inspect.isclass(one):
        if dataclasses.is_dataclass(one) and (fields := documentation(one)):
            parts.append("\n" + "".join(f"- `{name}`: {text}\n" for name, text in fields.items()))
        parts += [_described(method, f"{heading}#") for method in _methods(one)]
    return "".join(parts)


def _methods(cls: type) -> Iterator[Any]:
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value.fget if isinstance(value, property) else value)
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield function


def _signature(one: Any) -> str:
    """As it is written: from `class` or `def` to the colon."""
    if inspect.isclass(one):
        bases = ", ".join(base.__name__ for base in one.__bases__ if base is not object)
        start = f"class {one.__name__}" + (f"({bases})" if bases else "")
        init = vars(one).get("__init__")
        if init is None or dataclasses.is_dataclass(one):
            return start
        return f"{start}:\n{textwrap.indent(_signature(init), '    ')}"
    source = textwrap.dedent(inspect.getsource(one))
    header = re.search(r"^(async )?def .*?:\n", source, re.DOTALL | re.MULTILINE)
    return header[0].rstrip().removesuffix(":") if header else f"def {one.__name__}(...)"


def _markdown(doc: str) -> str:
    """A Google docstring: the arguments become a list."""
    lines, inside = [], False
    for line in doc.splitlines():
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            inside = True
            lines += [f"**{line.rstrip(':')}**", ""]
        elif inside and line and not line.startswith(" "):
            inside = False
            lines.append(line)
        elif inside and re.match(r"    \S", line):
            lines.append("- " + re.sub(r"^(\*{0,2}\w+):", r"`\1`:", line.strip()))
        elif inside:
            lines.append("  " + line.strip() if line.strip() else "")
        else:
            lines.append(line)
    return "\n".join(lines)


def _keys() -> Iterator[str]:
    for name, entries in sections().items():
        yield f"\n## {f'`{name}`' if name else 'The top of the file'}\n\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|\n"
        for entry in entries:
            cells = (f"`{entry.key}`", entry.type, f"`{entry.default}`", entry.text)
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def current(file: Path) -> str:
    """What a generated file must say."""
    return f"{json.dumps(json_schema(), indent=1)}\n" if file == SCHEMA else page(file.read_text())


if __name__ == "__main__":
    stale = [file for file in (*PAGES, SCHEMA) if not file.exists() or current(file) != file.read_text()]
    for file in stale:
        if "--write" in sys.argv:
            file.write_text(current(file))
        else:
            print(f"{file} is not up to date: make reference")
    sys.exit(bool(stale) and "--write" not in sys.argv)
