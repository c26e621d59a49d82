"""Converts the keys in single-file checkpoints of other libraries to ours.

Lightning Fabric (`Fabric.save`) writes the user's own mapping, as we do. PyTorch Lightning
(`Trainer.save_checkpoint`) writes `state_dict`, the lists `optimizer_states` and `lr_schedulers`, `epoch`,
`global_step` and `pytorch-lightning_version`. Composer (`Trainer.save_checkpoint`, not sharded) writes `rng`
and `state`, which has the model's `state_dict()` under `model`, and `optimizers` and `schedulers` by class
name. Optimizer states number the parameters, except under FSDP, where Composer and Fabric use names.
"""

import pickle
import re
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import PosixPath
from typing import Any, Self, TypeGuard

from torch import Tensor

_OPTIMIZER, _SCHEDULER = "optimizer", "lr_scheduler"


class _AttributeDict(dict[str, Any]):
    """A substitute for Lightning's class of that name, which holds hyperparameters."""


_LIGHTNING = (
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)


def allowed() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Types in these files that are not in torch's own list and are safe to unpickle."""
    collections = [Counter, OrderedDict, defaultdict, deque, set, bytes]
    others = [Namespace, PosixPath, datetime, timedelta, timezone]
    return [*collections, *others, *((_AttributeDict, name) for name in _LIGHTNING), *_numpy()]


def normalized(contents: Any) -> Any:
    """The contents of a file with our keys "model", "optimizer" and "lr_scheduler"; other keys stay.

    Several optimizers or schedulers are numbered: "optimizer_0", "optimizer_1".
    """
    if not isinstance(contents, Mapping):
        return contents
    if "pytorch-lightning_version" in contents and isinstance(contents.get("state_dict"), Mapping):
        return {
            "model": contents["state_dict"],
            **_numbered(_OPTIMIZER, contents.get("optimizer_states", ())),
            **_numbered(_SCHEDULER, contents.get("lr_schedulers", ())),
            **_others(contents, "state_dict", "optimizer_states", "lr_schedulers"),
        }
    state = contents.get("state")
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping):
        return {
            "model": state["model"],
            **_numbered(_OPTIMIZER, list(state.get("optimizers", {}).values())),
            **_numbered(_SCHEDULER, list(state.get("schedulers", {}).values())),
            **_others(state, "model", "optimizers", "schedulers"),
            **_others(contents, "state"),
        }
    return contents


def model_in(contents: Any) -> Mapping[str, Tensor] | None:
    """The only model state in the contents of a file: the value of one key, or the contents.

    Beside a model by its key there may be other tensors; in a bare state, only extra state is a mapping.
    """
    if not isinstance(contents, Mapping):
        return None
    models = {
        key: value
        for key, value in contents.items()
        if _is_model(value) and not str(key).endswith("_extra_state")
    }
    if not models and _is_model(contents):
        return contents
    return models.get("model") if len(models) != 1 else next(iter(models.values()))


def _is_model(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether a value has tensors by name, and perhaps extra state."""
    return isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in value.values())


def _numbered(key: str, values: Sequence[Any]) -> dict[str, Any]:
    if len(values) == 1:
        return {key: values[0]}
    return {f"{key}_{number}": value for number, value in enumerate(values)}


def _others(contents: Mapping[str, Any], *without: str) -> dict[str, Any]:
    return {key: value for key, value in contents.items() if key not in without}


@cache
def _numpy() -> list[tuple[Callable[..., Any], str]]:
    """What stands in for numpy's own functions and types, by their names before and after numpy 2.

    numpy trusts what a pickle says about a dtype's size and flags, and then reads or frees memory that is not
    the array's. Here a dtype is only the name of a kind of number, and an order of bytes.
    """
    import numpy as np

    class DType:
        def __init__(self, kind: str, *_: Any) -> None:
            if not re.fullmatch("b1|[iu][1248]|f[248]", kind):
                raise pickle.UnpicklingError(f"arrays of {kind!r} are not supported")
            self.found = np.dtype(kind)

        def __setstate__(self, state: Any) -> None:
            self.found = self.found.newbyteorder("=" if state[1] == "|" else state[1])

    class Array(np.ndarray[Any, Any]):
        def __new__(cls, *_: Any) -> Self:
            return super().__new__(cls, (0,), np.int8)

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, data = state
            super().__setstate__((1, shape, dtype.found, fortran, bytes(memoryview(data))))

        def __reduce__(self) -> Any:
            return np.array(self).__reduce__()

    def scalar(dtype: DType, data: bytes) -> Any:
        return np.frombuffer(data, dtype.found, 1)[0]

    found: list[tuple[Callable[..., Any], str]] = [(Array, "numpy.ndarray"), (DType, "numpy.dtype")]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found += (Array, f"{core}._reconstruct"), (scalar, f"{core}.scalar")
    return found
