"""Prints docs/accuracy.md: python -m benchmarks.accuracy > docs/accuracy.md (make accuracy).

The ranks of all sections are the workers of the tests, started once.
"""

import argparse
import contextlib
import io
import sys
import time

import torch

from benchmarks.accuracy import gpus, peaks, published, toys

SECTIONS = {
    "held": toys.held,
    "peaks": peaks.peaks,
    "traffic": toys.traffic,
    "published": published.published,
    "gpus": gpus.gpus,
}
_HEAD = f"""# Accuracy of estimates

Made by `make accuracy` (torch {torch.__version__.split("+")[0]}, CPU, gloo), which takes about 15 minutes.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; by default all but gpus")
    chosen = parser.parse_args().sections
    if not chosen:
        print(_HEAD)
    for name in chosen or [name for name in SECTIONS if name != "gpus"]:
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):  # what the ranks print
            lines = SECTIONS[name]()
        print("\n".join(lines), end="\n\n" if name != "published" else "\n")
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
