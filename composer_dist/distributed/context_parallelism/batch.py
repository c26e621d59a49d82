"""Splits a batch such that each rank gets its part of the sequence.

A rank's part does not show the positions of its tokens (`position_ids`), the token after its last one
(`shift_labels`), or the number of labels that the loss averages over (`num_items_in_batch`). These are added
before the sequence is split, if the model's forward accepts them.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from composer_dist.distributed import prepared
from composer_dist.distributed.context_parallelism.attention import SequenceSplit
from composer_dist.distributed.prepared import named_buffers_canonical
from composer_dist.errors import ParallelismKeyError, ParallelismValueError
from composer_dist.structure.families import class_name, transformers_models
from composer_dist.structure.names import canonical_name
from composer_dist.tensors.nested import map_tensors, named_tensors
from composer_dist.wording import near_miss

IGNORED = -100
"""The label that losses skip."""
_LOSS_ARGUMENTS = {"shift_labels", "num_items_in_batch"}


class Splitter:
    """Splits the batches of one model; see `context_parallel` for the arguments and errors.

    Nested tensors are named by keys and indices, joined by dots.
    """

    def __init__(
        self,
        model: nn.Module,
        sequence_dims: Mapping[str, int | None] | None = None,
        buffers: Mapping[str, int] | None = None,
        balanced: bool | None = None,
        weighted: bool = False,
    ) -> None:
        self.model = model
        self._weighted = weighted
        self._tables = [(self._place_of(name), dim) for name, dim in (buffers or {}).items()]
        self._dims = dict(sequence_dims or {})
        self._transformer = next(iter(transformers_models(model)), None)
        flags = {flag for m in model.modules() if isinstance(flag := getattr(m, "is_causal", None), bool)}
        config = getattr(self._transformer, "config", None)
        self._causal = flags == {True} and getattr(config, "is_causal", True) is not False
        self.balanced = self._causal if balanced is None else balanced

    def layout(self, batch: Any, ranks: int, rank: int) -> SequenceSplit:
        """How to split a batch of this length."""
        length = self._length(batch)
        parts = ranks * (1 + self.balanced)
        if length % parts or length < 2 * ranks:  # a single query is never causal in transformers
            longer = max(-(-length // parts) * parts, 2 * ranks)
            by = f"2 x cp = {parts}, for equal work under a causal mask" if self.balanced else f"cp = {ranks}"
            even = self.balanced and not length % ranks and length >= 2 * ranks
            raise ParallelismValueError(
                f"A sequence of {length} positions cannot be divided by {by}; pad it on the right (a "
                f"collator's pad_to_multiple_of={parts}) to "
                f"{longer} (labels {IGNORED}){', or pass balanced=False' if even else ''}."
            )
        return SequenceSplit(length, ranks, rank, self.balanced)

    def split(self, batch: Any, layout: SequenceSplit) -> Any:
        """This rank's part of a batch, of the same type, with the positions and labels that it lacks."""
        items: float | None = None
        if isinstance(batch, Mapping):
            batch, items = self._complete(batch, layout)

        def cut(name: str, tensor: Tensor) -> Tensor:
            dim = self._dim(name, tensor, layout.length)
            return tensor if dim is None else layout.part_of(tensor, dim)

        part = map_tensors(cut, batch)
        if items is not None:
            part["num_items_in_batch"] = items
        return part

    def accepts(self, name: str) -> bool:
        """Whether the model's forward, or the loss of a transformers model, takes this argument."""
        forward = (self._transformer or self.model).forward
        known = inspect.signature(forward).parameters
        if name in known:
            return True
        variadic = any(one.kind is one.VAR_KEYWORD for one in known.values())
        return self._transformer is not None and variadic and name in _LOSS_ARGUMENTS

    def shorten(self, batch: Any, length: int, positions: int) -> Any:
        """The first row, and the first `positions` of `length`, of every tensor."""
        rows = next((t.shape[0] for _, t in named_tensors(batch) if t.ndim > 1), None)

        def cut(name: str, tensor: Tensor) -> Tensor:
            dim = self._dim(name, tensor, length)
            tensor = tensor if dim is None else tensor.narrow(dim, 0, positions)
            return tensor[:1] if tensor.ndim and dim != 0 and tensor.shape[0] == rows else tensor

        return map_tensors(cut, batch)

    @contextmanager
    def tables(self, layout: SequenceSplit | None) -> Iterator[None]:
        """Inside, the model's tables of positions are cut to this rank's part; None leaves them whole."""
        before = [(held, key, held[key]) for (held, key), _ in self._tables]
        records = [known for module in self.model.modules() if (known := prepared.of(module)) is not None]
        try:
            if layout is not None:
                for (held, key), dim in self._tables:
                    held[key] = layout.part_of(held[key], dim)
            for known in records:
                known.tables = [held[key] for held, key, _ in before]
            yield
        finally:
            for known in records:
                known.tables = []
            for held, key, table in before:
                held[key] = table

    def _place_of(self, name: str) -> tuple[dict[str, Any], str]:
        known = {canonical_name(owner): module for owner, module in self.model.named_modules()}
        owner, _, key = name.rpartition(".")
        if owner not in known or key not in known[owner]._buffers:
            names = {found for found, _ in named_buffers_canonical(self.model)}
            raise ParallelismKeyError(f"The model has no buffer {name!r}.{near_miss(name, names)}")
        return known[owner]._buffers, key

    def _complete(
        self, batch: Mapping[str, Any], layout: SequenceSplit
    ) -> tuple[dict[str, Any], float | None]:
        """The whole batch with missing inputs, and the loss's denominator if the model accepts it."""
        whole: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        main = self._main(batch)
        shape = (main.shape[0], layout.length)
        self._check_mask(whole, layout)
        if self.accepts("position_ids"):
            if (given := whole.get("position_ids")) is not None:
                if given.ndim < 2 or bool((given.diff(dim=-1) != 1).any()):
                    raise ParallelismValueError(
                        "position_ids (batch, positions) must increase by one: context parallelism cannot "
                        "split several sequences packed in one row. Put each in its own row, or use cp=1."
                    )
            else:
                whole["position_ids"] = torch.arange(layout.length, device=main.device).expand(shape)
        if self._transformer is not None and self.accepts("attention_mask"):
            # Without a mask, transformers interprets a jump in position_ids as the start of a new sequence.
            whole["attention_mask"] = torch.ones(shape, dtype=torch.long, device=main.device)
        labels = whole.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
            return whole, None
        if self.shifts and whole.get("shift_labels") is None:
            whole["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        counted = whole.get("shift_labels", labels) != IGNORED
        if (given := whole.get("num_items_in_batch")) is not None:
            return whole, float(given) / layout.ranks
        if self.accepts("num_items_in_batch"):
            return whole, max(int(counted.sum()), 1) / layout.ranks
        if not self._weighted:
            self._check_counts(counted, layout)
        return whole, None

    @property
    def shifts(self) -> bool:
        """Whether the model's own loss compares each position with the next label."""
        loss = getattr(self._transformer, "loss_function", None)
        known = inspect.signature(loss).parameters if callable(loss) else ()
        return "shift_labels" in known and self.accepts("shift_labels")

    def _check_mask(self, batch: MutableMapping[str, Any], layout: SequenceSplit) -> None:
        """Refuse a padding mask that context parallelism would ignore."""
        mask = batch.get("attention_mask")
        if not isinstance(mask, Tensor):
            return
        if mask.ndim != 2 or mask.shape[1] != layout.length:
            raise ParallelismValueError(
                f"attention_mask {tuple(mask.shape)} cannot be split over the sequence (cp={layout.ranks}); "
                f"it must be (batch, {layout.length}), with padding on the right only."
            )
        kept = mask != 0
        if bool(kept.all()):
            return
        if not self._causal:
            raise ParallelismValueError(
                f"attention_mask has padding, which bidirectional attention would attend to "
                f"(cp={layout.ranks}); use sequences of equal length."
            )
        if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
            raise ParallelismValueError(
                f"attention_mask has padding on the left or in between, to which later positions would "
                f"attend (cp={layout.ranks}); pad on the right (tokenizer.padding_side='right')."
            )
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and bool((~kept & (labels != IGNORED)).any()):
            raise ParallelismValueError(
                f"There are labels at padded positions; set them to {IGNORED}: with cp={layout.ranks} the "
                "padding mask is ignored, which changes the outputs at padded positions."
            )

    def _check_counts(self, counted: Tensor, layout: SequenceSplit) -> None:
        ranks = range(layout.ranks)
        counts = [int(counted[:, layout.positions(counted.device, r)].sum()) for r in ranks]
        if len(set(counts)) > 1:
            raise ParallelismValueError(
                f"The ranks' parts have {', '.join(map(str, counts))} labels, so the mean of their losses is "
                f"not the mean over all labels, and {class_name(self.model)}.forward does not accept "
                "num_items_in_batch. Add that argument and divide the summed loss by it; or pass "
                "weighted=True and multiply each part's mean loss by cp * its labels / the whole's labels."
            )

    def _main(self, batch: Any) -> Tensor:
        """The tensor that has the sequence's length."""
        found = dict(named_tensors(batch))
        for name, tensor in found.items():
            if name in ("input_ids", "inputs_embeds"):
                return tensor
        for tensor in found.values():
            if tensor.ndim > 1:
                return tensor
        raise ParallelismValueError(
            f"A batch of type {type(batch).__name__} has no tensor (batch, sequence, ...) to split."
        )

    def _length(self, batch: Any) -> int:
        main = self._main(batch)
        dim = next(self._dims.get(name, 1) for name, tensor in named_tensors(batch) if tensor is main)
        return main.shape[1 if dim is None else dim]

    def _dim(self, name: str, tensor: Tensor, length: int) -> int | None:
        default = 1 if tensor.ndim > 1 else None
        dim = self._dims.get(name, default)
        if dim is not None and (tensor.ndim <= dim or tensor.shape[dim] != length):
            raise ParallelismValueError(
                f"{name or 'The batch'} {tuple(tensor.shape)} does not have {length} positions in dimension "
                f"{dim}; pass sequence_dims={{{name!r}: dimension}}, with None if it has no sequence."
            )
        return dim
