"""The styles: what tensor parallelism does to one module, as data.

A style says how the module's matrix is cut among the tensor-parallel ranks, which collectives its input and
output go through, and whether the gradients of parameters that stay whole are summed.

====================  ==============================  =========================  =======================
style                 matrix                          input                      output
====================  ==============================  =========================  =======================
"colwise"             output features cut             whole                      features cut
"colwise:3"           each of 3 matrices in one cut   whole                      features cut
"colwise_gather"      output features cut             whole                      whole
"rowwise"             input features cut              features cut               whole
"rowwise_split"       input features cut              whole                      whole
"vocab"               an embedding's rows cut         whole                      whole
"replicate"           whole                           as it is                   as it is
"sum_gradients"       whole, gradients summed         as it is                   as it is
"sequence"            whole, gradients summed         sequence cut               sequence cut
"sequence_begin"      whole                           whole                      sequence cut
"sequence_end"        whole, gradients summed         sequence cut               whole
"colwise_sequence"    output features cut             sequence cut               features cut
"rowwise_sequence"    input features cut              features cut               sequence cut
====================  ==============================  =========================  =======================

The names are Megatron's (Shoeybi et al., 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et
al., 2022, arXiv:2205.05198), torch's and transformers'.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.distributed.tensor.parallel import ParallelStyle

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.wording import near_miss

Before = Literal["copy", "split", "split_sequence", "gather_sequence"]
After = Literal["sum", "gather", "scatter_sequence", "gather_sequence", "logits"]


@dataclass(frozen=True)
class Style:
    """A style; see the table above."""

    name: str
    cut: Literal["out", "in", "rows"] | None = None
    """Which features of the module's matrix are cut; "rows" are an embedding's."""
    groups: int = 1
    """The number of equal matrices in the output features, each of which is cut separately."""
    before: Before | None = None
    """The input: "copy" sums its gradient, "split" takes this rank's features, "split_sequence" this
    rank's positions, "gather_sequence" all positions."""
    after: After | None = None
    """The output: "sum" over the ranks, "gather" all features, "scatter_sequence" sums and keeps this
    rank's positions, "gather_sequence" all positions, "logits" stay cut, as a DTensor."""
    sum_gradients: bool = False
    """Whether the ranks' gradients of whole parameters are summed, because each does part of the work."""
    share: bool = False
    """Whether inner modules that "copy" the same tensor do so once, so that its gradient is summed once."""

    @property
    def idle(self) -> bool:
        """Whether it does nothing."""
        return not (self.cut or self.before or self.after or self.sum_gradients or self.share)

    def __str__(self) -> str:
        return f"{self.name}:{self.groups}" if self.groups > 1 else self.name


AnyStyle = Style | ParallelStyle
STYLES: Mapping[str, Style] = {
    style.name: style
    for style in (
        Style("colwise", "out", before="copy"),
        Style("colwise_gather", "out", before="copy", after="gather"),
        Style("rowwise", "in", after="sum"),
        Style("rowwise_split", "in", before="split", after="sum"),
        Style("vocab", "rows", after="sum"),
        Style("replicate"),
        Style("sum_gradients", sum_gradients=True),
        Style("sequence", sum_gradients=True),
        Style("sequence_begin", before="split_sequence"),
        Style("sequence_end", after="gather_sequence", sum_gradients=True),
        Style("colwise_sequence", "out", before="gather_sequence"),
        Style("rowwise_sequence", "in", after="scatter_sequence"),
    )
}
TRANSFORMERS: Mapping[str, Style] = {
    "colwise": STYLES["colwise"],
    "colwise_gather_output": STYLES["colwise_gather"],
    "colwise_rep": STYLES["colwise_gather"],
    "packed_colwise": replace(STYLES["colwise"], groups=2),
    "rowwise": STYLES["rowwise"],
    "rowwise_split_input": STYLES["rowwise_split"],
    "rowwise_rep": STYLES["rowwise_split"],
    "embedding_rowwise": STYLES["vocab"],
    "embedding_colwise": STYLES["colwise_gather"],
    "replicated_with_grad_allreduce": STYLES["sum_gradients"],
    "sequence_parallel": STYLES["sequence"],
    "replicate": STYLES["replicate"],
}
"""The styles of transformers 5.23 (distributed/tensor_parallel.py) that a single module can have."""


def as_style(value: Any, where: str) -> AnyStyle:
    """The style of this name, or one of torch's style objects unchanged."""
    if isinstance(value, (Style, ParallelStyle)):
        return value
    if not isinstance(value, str):
        raise ParallelismTypeError(
            f"The tensor-parallel style of {where} is of type {type(value).__name__}; use one of "
            f"{', '.join(STYLES)}, or a style object of torch.distributed.tensor.parallel."
        )
    name, _, groups = value.partition(":")
    style = STYLES.get(name)
    if style is None or (groups and (style.cut != "out" or not groups.isdecimal() or int(groups) < 1)):
        raise ParallelismValueError(
            f"There is no tensor-parallel style {value!r} (for {where}). Valid styles: {', '.join(STYLES)}, "
            f"and 'colwise:3' for three matrices in one.{near_miss(name, set(STYLES))}"
        )
    return replace(style, groups=int(groups)) if groups else style


@dataclass(frozen=True)
class Styled:
    """The style of one module, and why."""

    style: AnyStyle
    reason: str

    @property
    def label(self) -> str:
        """The style's name."""
        return str(self.style) if isinstance(self.style, Style) else type(self.style).__name__
