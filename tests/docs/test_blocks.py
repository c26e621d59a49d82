"""The code blocks of README.md and of every page of docs/ run, from top to bottom in one empty directory.

- A block with a title, ```` ```yaml title="run.yaml" ````, is written as that file.
- `bash` runs with `bash -e` and must end with status 0.
- `python` runs in this process; all blocks of a page share their names. What a page leaves to its
  reader (a model, a batch) is made in `<!-- setup: ... -->`, which is Python too and is not shown.
- `text` right after a block that has run: its lines are in the output, in this order; `...` is anything.
- `<!-- not run: reason -->` on the line before leaves a block out; `<!-- slow -->` makes a page slow.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.parent != ROOT / "docs/reference"  # signatures: test_reference.py
]
LANGUAGES = {"bash", "csv", "jinja", "json", "jsonl", "python", "text", "toml", "yaml"}
"""Languages of blocks without a title. All but bash and python are only shown."""
PARTS = re.compile(
    r"^<!-- setup:\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$'
    r"|^(?P<heading>#+ [^\n]*)$",
    re.DOTALL | re.MULTILINE,
)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


@dataclass
class Block:
    """A block of code: where it is, what it is, and why it is left out, if it is."""

    place: str
    line: int
    language: str
    title: str | None
    text: str
    reason: str | None = None
    heading: bool = False
    """A heading is between this block and the one before."""


def slow(page: str) -> bool:
    return "<!-- slow -->" in (ROOT / page).read_text()[:400]


def blocks(page: str, source: str) -> Iterator[Block]:
    """The blocks of a page, in order; a setup is a block of Python."""
    heading = False
    for found in PARTS.finditer(source):
        if found["heading"]:
            heading = True
            continue
        kind = "setup" if found["setup"] is not None else "text"
        line = source.count("\n", 0, found.start(kind))
        text = SNIPPET.sub(lambda name: (ROOT / name[1]).read_text(), found[kind])
        language = "python" if kind == "setup" else found["language"]
        yield Block(f"{page}:{line}", line, language, found["title"], text, found["reason"], heading)
        heading = False


def run_python(block: Block, names: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    exec(compile("\n" * block.line + block.text, block.place.split(":")[0], "exec"), names)
    return "\n".join(capfd.readouterr())


def run_bash(block: Block) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-e", "-c", block.text],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block.place}\n{block.text}\nstatus {done.returncode}\n{done.stdout}"
    return done.stdout


def compare(block: Block, output: str) -> None:
    """The lines of a `text` block are in the output of the block before, in their order."""
    rest = output
    for line in filter(None, (line.strip() for line in block.text.splitlines())):
        found = re.search(re.escape(line).replace(r"\.\.\.", ".*"), rest)
        assert found, f"{block.place}: {line!r} is not in the rest of the output:\n{rest}"
        rest = rest[found.end() :]


def run_page(page: str, source: str, capfd: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    output: str | None = None
    for block in blocks(page, source):
        if block.title:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            continue
        assert block.language in LANGUAGES, f"{block.place}: the block has no language, or an unknown one"
        if block.language == "text" and output is not None and not (block.reason or block.heading):
            compare(block, output)
        output = None
        if block.reason is None and block.language == "python":
            output = run_python(block, names, capfd)
        elif block.reason is None and block.language == "bash":
            output = run_bash(block)


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:Precision bf16-mixed", "ignore:The number of training batches"
)
@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * slow(p)) for p in PAGES])
def test_every_block_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # blocks import files of the page, as in a shell there
    run_page(page, (ROOT / page).read_text(), capfd)


MADE = """\
# A page

<!-- setup:
b = 2
-->

```toml title="folder/run.toml"
a = 1
```

```bash
cat folder/run.toml
! false
```

```text
a = 1
```

```python
print("a sum of", b + 1)
```

```text
a ... 3
```

<!-- not run: needs 8 GPUs -->
```bash
false
```
"""


def test_a_page_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("page.md", MADE, capfd)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("a = 1\n```\n\n```python", "a = 2\n```\n\n```python", "'a = 2' is not in"),
        ("a ... 3", "a ... 4", "is not in"),
        ("! false", "false", "status 1"),
        ("b + 1", "c + 1", "'c' is not defined"),
        ("```toml title", "```\nno language\n```\n\n```toml title", "no language"),
        ("<!-- not run: needs 8 GPUs -->\n", "", "status 1"),
    ],
)
def test_a_page_that_does_not(
    right: str,
    wrong: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert MADE.count(right) == 1
    with pytest.raises((AssertionError, NameError), match=message):
        run_page("page.md", MADE.replace(right, wrong), capfd)
