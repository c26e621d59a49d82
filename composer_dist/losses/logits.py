"""Logits that a head computes only if somebody asks for them, for models that compute their loss themselves.

Inside of `put_off`, the head of a transformers model returns `Logits`, which have no memory. They note the
operations on single elements that some architectures put between head and loss (Gemma's soft-capping, the
scales of Cohere and Granite), and their cross-entropy is computed in chunks. Whatever else a model does with
them gets the values, so no model computes another function, and no architecture has to be known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from composer_dist import _torch
from composer_dist.distributed.forwards import Forward, instead
from composer_dist.distributed.tensor_parallel.loss import parallel_cross_entropy
from composer_dist.errors import ParallelismRuntimeError
from composer_dist.losses.chunked import is_one_piece, mean, rows_at_a_time, summed
from composer_dist.structure.names import ancestors

Operation = Callable[[Tensor], Tensor]
Job = Callable[[Forward, Tensor], Tensor]
"""Takes the head's forward and its input."""

_METHODS = {"size", "dim", "numel", "is_floating_point", "is_complex", "is_contiguous", "__hash__", "__len__"}
_VIEWS_OF_VALUES = {"T", "mT", "H", "mH", "data", "real", "imag"}
_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.half, "bfloat16": torch.bfloat16}
_ELEMENTWISE = {
    *("clone", "tanh", "add", "sub", "mul", "multiply", "div", "true_divide"),
    *("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"),
}
_OF_ROWS = {"view", "reshape", "flatten", "contiguous"}


@contextmanager
def put_off(model: Any, rows: int | None = None) -> Iterator[None]:
    """Inside, a transformers model computes its cross-entropy without all logits, if its head is linear.

    Its outputs have `Logits`; those that have not been computed inside cannot be computed later.

    Args:
        model: a transformers model, not the `PeftModel` around one.
        rows: positions at a time; see `chunked_cross_entropy`.
    """
    head = None if _torch.is_transforming() else _linear_head(model)
    if head is None:
        yield
        return
    waiting = _Head(head, rows)
    try:
        with instead(head, waiting):
            yield
    finally:
        waiting.close()


def _linear_head(model: Any) -> Any:
    """The head, if it maps each position separately and its weight is there until the end of the forward."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(_inner(head), nn.Linear) or isinstance(vars(head).get("forward"), _Head):
        return None
    if head not in _around:
        name = next(name for name, module in model.named_modules() if module is head)
        _around[head] = [above for above in ancestors(name) if above not in ("", name)]
    if any(isinstance(model.get_submodule(name), FSDPModule) for name in _around[head]):
        return None
    return None if isinstance(head, FSDPModule) and _torch.is_one_of_several(head) else head


def _inner(head: Any) -> Any:
    """The layer that peft may have wrapped."""
    return getattr(head, "base_layer", getattr(head, "original_module", head))


_around: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""The names of the modules between a model and its head."""


class _Head:
    """In place of a head's forward."""

    def __init__(self, module: Any, rows: int | None) -> None:
        self.module, self.rows = module, rows
        self._forward: Forward = module.forward
        self._job: Job | None = None
        self._closed = False
        self._groups: list[tuple[Any, Any]] = []

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._job is not None:
            job, self._job = self._job, None
            return job(self._forward, hidden)
        if args or kwargs:
            whole: Tensor = self._forward(hidden, *args, **kwargs)
            return whole
        if isinstance(self.module, FSDPModule) and not self._groups:
            groups = _torch.fsdp_param_groups(self.module)
            self._groups = [(group, group.post_forward_mesh_info) for group in groups]
            self.module.set_reshard_after_forward(False, recurse=False)
        low = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if low else hidden.dtype
        made: Logits = Logits(self, hidden, (*hidden.shape[:-1], self.weight.shape[0]), dtype)
        return made

    @property
    def weight(self) -> Tensor:
        """The matrix, whole or as a DTensor."""
        weight: Tensor = _inner(self.module).weight
        return weight

    def run(self, job: Job, hidden: Tensor) -> Tensor:
        """What `job` returns, while the head's parameters are gathered."""
        if self._closed:
            raise ParallelismRuntimeError(
                f"The loss was computed without logits, so the output of {type(self.module).__name__}, the "
                "model's head, has no values. Where something reads logits, compute them: "
                "HuggingFaceModel(chunked_loss=False), or chunked_loss=False for ComposerDistMixin."
            )
        if not isinstance(self.module, FSDPModule):
            return job(self._forward, hidden)
        self._release()
        self._job = job
        result: Tensor = _torch.call_with_own_hooks(self.module, hidden)  # type: ignore[arg-type]
        return result

    def _release(self) -> None:
        for group, mesh_info in self._groups:
            group.post_forward_mesh_info = mesh_info
        self._groups = []

    def close(self) -> None:
        """No values from here on; a unit that nobody has asked is resharded."""
        self._closed = True
        if self._groups:
            self._release()
            self.module.reshard()


class Logits(Tensor):
    """What a head will return for hidden states, without memory."""

    _head: _Head
    _hidden: Tensor
    _operations: tuple[Operation, ...]
    _known: Tensor | None
    _trains: bool

    @staticmethod
    def __new__(  # noqa: D102
        cls: Any,
        head: _Head,
        hidden: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        operations: tuple[Operation, ...] = (),
    ) -> Any:
        made = _torch.without_memory(cls, shape, dtype, hidden.device)
        made._head, made._hidden, made._operations, made._known = head, hidden, operations, None
        made._trains = torch.is_grad_enabled()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Logits({tuple(self.shape)}, {self.dtype}, not computed)"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        of = getattr(getattr(function, "__self__", None), "__name__", "")
        if name in _METHODS or (name == "__get__" and of not in _VIEWS_OF_VALUES) or name == "__set__":
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        first = args[0] if args else None
        later = first._later(function, name, args, kwargs) if isinstance(first, Logits) else None
        return _with_values(function, args, kwargs) if later is None else later

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _with_values(function, args, kwargs or {})

    def values(self) -> Tensor:
        """All logits; with gradients if the head was called with them, even if first read under no_grad."""
        if self._known is None:

            def job(forward: Forward, hidden: Tensor) -> Tensor:
                return self._finish(forward(hidden)).view(self.shape)

            with torch.set_grad_enabled(self._trains):
                self._known = self._head.run(job, self._hidden)
        return self._known

    def _finish(self, logits: Tensor) -> Tensor:
        for operation in self._operations:
            logits = operation(logits)
        return logits

    def _then(self, operation: Operation, dtype: torch.dtype) -> Any:
        return Logits(self._head, self._hidden, self.shape, dtype, (*self._operations, operation))

    def _later(self, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function of logits that can be computed later or in chunks, else None."""
        if self._known is not None:
            return None
        rest = args[1:]
        if function is functional.cross_entropy:
            return self._cross_entropy(*rest, **kwargs)
        if name in _OF_ROWS:
            return self._with_rows(function, rest, kwargs)
        if kwargs:
            return None
        if name == "__getitem__":
            return self._of_positions(rest[0] if isinstance(rest[0], tuple) else rest)
        if name == "to" and len(rest) == 1 and rest[0] == self.device:
            return self
        if name in _DTYPES or (name == "to" and len(rest) == 1 and isinstance(rest[0], torch.dtype)):
            dtype = _DTYPES[name] if name in _DTYPES else rest[0]
            return self._then(lambda logits: logits.to(dtype), dtype)
        if name in _ELEMENTWISE and all(map(self._is_same_for_rows, rest)):
            others = [one.reshape(one.shape[-1:]) if isinstance(one, Tensor) else one for one in rest]
            like = torch.empty((1, 1), dtype=self.dtype, device=self.device)
            dtype = torch.result_type(like, others[0]) if others else self.dtype
            return self._then(lambda logits: function(logits, *others), dtype)
        return None

    def _is_same_for_rows(self, other: Any) -> bool:
        if not isinstance(other, Tensor):
            return isinstance(other, (int, float))
        width = other.shape[-1:].numel()
        fits = other.numel() == width and width in (1, self.shape[-1])
        return type(other) is Tensor and not other.requires_grad and fits

    def _with_rows(self, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        empty = torch.empty(0, device="meta").as_strided(
            self.shape, [0] * self.ndim
        )  # no bytes, even in a plan
        shape = function(empty, *rest, **kwargs).shape
        if shape[-1:] != self.shape[-1:]:
            return None
        return Logits(self._head, self._hidden, shape, self.dtype, self._operations)

    def _of_positions(self, index: Sequence[Any]) -> Any:
        """Those at some positions, if `index` leaves the vocabulary as it is."""
        if self.shape[:-1] != self._hidden.shape[:-1]:
            return None
        if not all(isinstance(one, (slice, int)) or one is Ellipsis for one in index):
            return None
        if index[-1] != slice(None) and (... in index or len(index) == self.ndim):
            return None
        hidden = self._hidden[tuple(index)]
        return Logits(self._head, hidden, (*hidden.shape[:-1], self.shape[-1]), self.dtype, self._operations)

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        rare = weight is not None or size_average is not None or reduce is not None or reduction == "none"
        hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
        if rare or self.ndim != 2 or target.shape != (len(hidden),) or target.is_floating_point():
            return None

        def loss_of(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
            if isinstance(logits, DTensor) and not label_smoothing:
                total = parallel_cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
                return mean(total, labels != ignore_index) if reduction == "mean" else total
            whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
            return functional.cross_entropy(
                whole, labels, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
            )

        def job(forward: Forward, hidden: Tensor) -> Tensor:
            size = self._head.rows or rows_at_a_time(self._head.weight)
            if is_one_piece(hidden, size):
                found = loss_of(self._finish(forward(hidden.unsqueeze(0))).flatten(0, 1), target, reduction)
                return found.to(torch.promote_types(found.dtype, torch.float32))
            places = [
                (module._parameters, key)
                for module in self._head.module.modules()
                for key, one in module._parameters.items()
                if one is not None and one.requires_grad
            ]
            parameters = [held[key] for held, key in places]

            def loss(rows: Tensor, labels: Tensor, *copies: Tensor) -> Tensor:
                with _held(places, copies):
                    return loss_of(self._finish(forward(rows.unsqueeze(0))).flatten(0, 1), labels)

            total = summed(loss, hidden, target, parameters, size)
            return mean(total, target != ignore_index) if reduction == "mean" else total

        return self._head.run(job, hidden)


@contextmanager
def _held(places: Sequence[tuple[dict[str, Any], str]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, modules have other tensors as their parameters."""
    before = [held[key] for held, key in places]
    try:
        for (held, key), tensor in zip(places, tensors, strict=True):
            held[key] = tensor
        yield
    finally:
        for (held, key), tensor in zip(places, before, strict=True):
            held[key] = tensor


def _with_values(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = _torch.tree_map_only(Logits, Logits.values, (args, kwargs))
    return function(*args, **kwargs)
