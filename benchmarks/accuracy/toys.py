"""What ranks hold and send, for toy models of 30 architectures in every parallel mode."""

from collections.abc import Callable, Iterator

from tests.kit.world import WorkerError, run
from tests.zoo.planned import ARCHITECTURES, WAYS, held_by_plan_and_rank, sent_by_plan_and_rank

_HELD = """## What a rank holds

Bytes of parameters, gradients and AdamW's state: of the plan, and of the tensors of real prepared models
after a step, on every rank. The models are toys of two layers. "equal (1, 2, 4)" means to the byte on all
ranks of worlds of these sizes; notes explain why a mode refuses a model. LoRA and QLoRA (NF4) are with FSDP2.
The plan gets the batch, so that it leaves out parameters without gradients, such as mamba's LoRA on
matrices whose modules never run.
"""
_TRAFFIC = """## What a rank sends

Counts and bytes of the collectives of a step (the third), by kind and group: of the plan, and those that
torch's dispatcher saw on every rank of the same models.
"""
SENT = ("FSDP2", "HSDP", "TP", "FSDP2 x TP", "CP", "DDP")
"""Modes with collectives of their own."""


def held() -> list[str]:
    """The section on memory that ranks hold."""
    return [_HELD, *_table(held_by_plan_and_rank, list(WAYS), alone=True)]


def traffic() -> list[str]:
    """The section on collectives."""
    return [_TRAFFIC, *_table(sent_by_plan_and_rank, list(SENT), alone=False)]


def _table(compare: Callable[[str, str], str], ways: list[str], alone: bool) -> Iterator[str]:
    notes: dict[str, int] = {}
    yield f"| model | {' | '.join(ways)} |"
    yield "|" + "---|" * (len(ways) + 1)
    for name in ARCHITECTURES:
        cells = []
        for way in ways:
            worlds: dict[str, list[str]] = {}
            for ranks in WAYS[way].worlds:
                if ranks > 1 or alone:
                    worlds.setdefault(_seen(compare, ranks, name, way), []).append(str(ranks))
            parts = []
            for text, sizes in worlds.items():
                if text != "equal":
                    text = f"[{notes.setdefault(text, len(notes) + 1)}]"
                parts.append(f"{text} ({', '.join(sizes)})")
            cells.append("; ".join(parts))
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {text}" for text, number in notes.items())


def _seen(compare: Callable[[str, str], str], ranks: int, name: str, way: str) -> str:
    """Equal, or what the first rank of another opinion says."""
    try:
        found = run(compare, ranks, name, way, timeout=120)
    except WorkerError as error:
        return f"failed: {next(iter(error.errors.values())).strip().splitlines()[-1]}"
    return _short(next((one for one in found if one != "equal"), "equal"))


def _short(text: str) -> str:
    """The first reason of a refusal, without what all have in common."""
    for common in ("refused: ", "only scaled-dot-product attention may mix positions: "):
        text = text.partition(common)[2] or text
    text = text.replace("TPConfig(plan='auto') cannot place these modules:\n  ", "tp: no known place for ")
    text = text.partition("\n")[0].partition("; ")[0].partition(". Or ")[0]
    return text if len(text) < 160 else f"{text[:157]}..."
