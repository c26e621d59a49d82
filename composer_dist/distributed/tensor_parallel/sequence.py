"""Sequence parallelism: outside attention and feed-forward, each rank has its part of the positions.

Without it, every tensor-parallel rank repeats all work outside the cut matrices (norms, dropout, residual
sums). With it, each rank does this work for its own positions: the first block splits the sequence,
attention and feed-forward gather it and then reduce and scatter it again (which moves as many bytes as the
all-reduce that it replaces), and the last block gathers it.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from composer_dist.distributed.tensor_parallel.styles import STYLES, Style, Styled
from composer_dist.errors import Faults
from composer_dist.structure.names import ancestors
from composer_dist.structure.structure import Structure

_REGION = Style("gather_sequence", before="gather_sequence")


def with_sequence_parallel(structure: Structure, styled: Mapping[str, Styled]) -> dict[str, Styled]:
    """The styles, with sequence parallelism in the repeated blocks that hold cut matrices."""
    found = dict(styled)
    lists = [
        name
        for name, module in structure.modules.items()
        if isinstance(module, nn.ModuleList)
        and any(_below(one, name) and _cut(styled[one]) for one in styled)
    ]
    lists = [name for name in lists if not any(above in lists for above in ancestors(name) if above != name)]
    with Faults() as faults:
        for name in lists:
            blocks = [f"{name}.{key}" for key in structure.modules[name]._modules]
            for block in blocks:
                inside, wrong = _block(structure, block, styled)
                found.update(inside)
                faults += wrong
            whole = Style("sequence_block", before="split_sequence", after="gather_sequence")
            first, last = replace(whole, after=None), replace(whole, before=None)
            ends = {blocks[0]: whole} if len(blocks) == 1 else {blocks[0]: first, blocks[-1]: last}
            found.update({block: Styled(style, f"an end of {name}") for block, style in ends.items()})
        if not lists:
            faults.append(
                "sequence_parallel splits the sequence in repeated blocks, but no ModuleList has cut "
                f"matrices; give styles by name ({', '.join(key for key in STYLES if 'sequence' in key)}) "
                "instead."
            )
    return found


def _block(
    structure: Structure, block: str, styled: Mapping[str, Styled]
) -> tuple[dict[str, Styled], list[str]]:
    """The styles within one block (regions gather and scatter, norms get a part), and what is wrong."""
    found: dict[str, Styled] = {}
    faults: list[str] = []
    regions: dict[str, set[str]] = {}
    for name, one in styled.items():
        if _below(name, block) and _cut(one):
            assert isinstance(one.style, Style)
            regions.setdefault(name.rpartition(".")[0], set()).add(str(one.style.cut))
            inward = one.style.cut == "out"
            style = replace(one.style, before=None) if inward else one.style
            found[name] = Styled(style if inward else replace(style, after="scatter_sequence"), one.reason)
    for name, cuts in regions.items():
        if cuts != {"out", "in"} or name == block:
            faults.append(
                f"sequence_parallel needs projections into and out of {name} to be its children, and {name} "
                "to be a module of its own; leave sequence_parallel out."
            )
        found[name] = Styled(_REGION, "its projections need all positions")
    for name, module in structure.modules.items():
        holds = any(parameter is not None for parameter in module._parameters.values())
        around = [styled[above].style for above in ancestors(name) if above in styled]
        placed = not all(isinstance(style, Style) and style.idle for style in around)
        if block not in ancestors(name) or not holds or placed:
            continue
        if any(_below(name, region) for region in regions) or "Norm" not in type(module).__name__:
            faults.append(
                f"sequence_parallel does not know whether {name} ({type(module).__name__}) mixes positions; "
                "give it the style 'sequence' if it works on each position separately, or leave "
                "sequence_parallel out."
            )
        found[name] = Styled(STYLES["sequence"], "it works on each position separately")
    return found, faults


def _cut(one: Styled) -> bool:
    return isinstance(one.style, Style) and one.style.cut in {"out", "in"}


def _below(name: str, above: str) -> bool:
    return name != above and above in ancestors(name)
