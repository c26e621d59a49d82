"""Converts the keys in single-file checkpoints of other libraries to ours.

Lightning Fabric (`Fabric.save`) writes the user's own mapping, as we do. PyTorch Lightning
(`Trainer.save_checkpoint`) writes `state_dict`, the lists `optimizer_states` and `lr_schedulers`, `epoch`,
`global_step` and `pytorch-lightning_version`. Composer (`Trainer.save_checkpoint`, not sharded) writes `rng`
and `state`, which has the model's `state_dict()` under `model`, and `optimizers` and `schedulers` by class
name. Optimizer states number the parameters, except under FSDP, where Composer and Fabric use names.
"""

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import PosixPath
from typing import Any, TypeGuard

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
    collections = [Counter, OrderedDict, defaultdict, deque, set]
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
    """The only model state in the contents of a file: the contents, or the value of one key."""
    if not isinstance(contents, Mapping):
        return None
    for found in (contents, contents.get("model")):
        if _is_model(found):
            return found
    models = [value for value in contents.values() if _is_model(value)]
    return models[0] if len(models) == 1 else None


def _is_model(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether a value has tensors by name, and perhaps extra state."""
    return isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in value.values())


def _numbered(key: str, values: Sequence[Any]) -> dict[str, Any]:
    if len(values) == 1:
        return {key: values[0]}
    return {f"{key}_{number}": value for number, value in enumerate(values)}


def _others(contents: Mapping[str, Any], *without: str) -> dict[str, Any]:
    return {key: value for key, value in contents.items() if key not in without}


def _numpy() -> Iterator[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """The functions that pickled numpy arrays and numbers need, by their names before and after numpy 2."""
    import numpy as np

    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        for name, value in (("_reconstruct", np.array(0)), ("scalar", np.float64(0))):
            rebuild: Any = value.__reduce__()[0]
            yield rebuild, f"{core}.{name}"
    yield from (np.ndarray, np.dtype)
    kinds = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    yield from (type(np.dtype(kind)) for kind in kinds.split())
