"""Precision names, and what FSDP2 gathers and reduces under each of them.

`precision` is the dtype of the computation, and `mixed_precision` says how much of the communication uses it.
Shards, and therefore the optimizer, always keep the dtype of the parameters.

=============  ==================  ==================  ==================
gathered in,   DEFAULT             PURE                FULL
reduced in
=============  ==================  ==================  ==================
None           as is, as is        ValueError          as is, as is
fp32           float32, float32    float32, float32    float32, float32
amp_fp16       float16, float32    float16, float16    float32, float32
amp_bf16       bfloat16, float32   bfloat16, bfloat16  float32, float32
amp_fp8        bfloat16, float32   bfloat16, bfloat16  float32, float32
=============  ==================  ==================  ==================

*Gathered in* is the dtype of the all-gather, of the forward's floating-point inputs, and of the
forward and backward computation; *reduced in* that of the gradients' reduce-scatter and all-reduce.
Under amp_fp8 the matrix products of the blocks' linear layers are computed in float8 (see
`composer_dist.distributed.compiling.float8`).
"""

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.users_code import warn

_DTYPES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float64: ("float64", "double", "fp64"),
    torch.float32: ("float32", "float", "fp32"),
    torch.float16: ("float16", "half", "fp16", "amp_fp16"),
    torch.bfloat16: ("bfloat16", "bfloat", "bf16", "amp_bf16"),
}
_DTYPE_KEYS = ("param_dtype", "reduce_dtype", "output_dtype")
_KEYS = (*_DTYPE_KEYS, "cast_forward_inputs", "buffer_dtype")

_FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0). NVIDIA's table of compute capabilities.


class Precision(StrEnum):
    """The dtype of the computation, by Composer's names."""

    FP32 = "fp32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP8 = "amp_fp8"

    @property
    def dtype(self) -> torch.dtype:
        """What parameters are gathered in; amp_fp8 uses fp8 within matrix products only."""
        match self:
            case Precision.FP32:
                return torch.float32
            case Precision.AMP_FP16:
                return torch.float16
            case _:
                return torch.bfloat16


def mixed_precision_policy(
    precision: str | Precision | None, mixed_precision: str | Mapping[str, Any] = "DEFAULT"
) -> MixedPrecisionPolicy:
    """The FSDP2 policy for a precision, by the table at the top of this module.

    Args:
        precision: a `Precision` or its name. None means the parameters' own dtype: nothing is cast.
        mixed_precision: "DEFAULT", "PURE" or "FULL" in any case; or a mapping that overrides
            DEFAULT key by key. `param_dtype`, `reduce_dtype` and `output_dtype` are a
            floating-point `torch.dtype`, its name ("bfloat16", "bf16", "amp_bf16") or None for no
            cast; without a `reduce_dtype`, FSDP2 reduces in `param_dtype`, and DDP in the parameters'
            dtype. `cast_forward_inputs` is a bool. `output_dtype` is for a root's outputs: an inner
            unit's feed modules that compute in `param_dtype`. `buffer_dtype` is accepted with a
            warning, because FSDP2 does not cast buffers.

    Raises:
        ParallelismValueError: an unknown precision, mode, key or dtype; PURE without a precision.
    """
    precision = as_precision(precision)
    if isinstance(mixed_precision, Mapping):
        return _from_mapping(precision, mixed_precision)
    if not isinstance(mixed_precision, str):
        raise ParallelismTypeError(
            f"mixed_precision must be a string or a mapping, not {type(mixed_precision).__name__}."
        )
    low = precision.dtype if precision else None
    match mixed_precision.upper():
        case "DEFAULT":
            return _default(precision)
        case "PURE" if low is None:
            raise ParallelismValueError(
                "mixed_precision='PURE' gathers and reduces in the precision's dtype, but precision "
                "is None; name a precision, or use 'DEFAULT'."
            )
        case "PURE":
            return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        case "FULL":
            full = torch.float32 if precision else None
            return MixedPrecisionPolicy(param_dtype=full, reduce_dtype=full)
    raise ParallelismValueError(
        f"Unknown mixed_precision {mixed_precision!r}. Valid: 'DEFAULT', 'PURE', 'FULL', or a mapping with "
        f"the keys {', '.join(_KEYS)}."
    )


def as_precision(precision: str | Precision | None) -> Precision | None:
    """The `Precision` of a name.

    Raises:
        ParallelismValueError: the name is unknown.
    """
    if precision is None or isinstance(precision, Precision):
        return precision
    try:
        return Precision(precision.lower())
    except (ValueError, AttributeError):
        names = ", ".join(repr(known.value) for known in Precision)
        raise ParallelismValueError(
            f"Unknown precision {precision!r}. Valid: {names}, or None for no casting."
        ) from None


def as_dtype(value: Any) -> torch.dtype:
    """A floating-point dtype from itself or its name.

    Raises:
        ParallelismValueError: anything else; the names are listed.
    """
    if isinstance(value, torch.dtype) and value in _DTYPES:
        return value
    if isinstance(value, str):
        name = value.lower().removeprefix("torch.")
        for dtype, names in _DTYPES.items():
            if name in names:
                return dtype
    known = ", ".join(name for names in _DTYPES.values() for name in names)
    raise ParallelismValueError(f"{value!r} is not a dtype to communicate in. Valid dtypes: {known}.")


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[object]:
    """Runs forward and loss under torch's autocast where the precision is a mixed one.

    Under FSDP2 too, as in Composer: parameters are gathered in the low precision there, and
    autocast keeps norms, softmax and the loss in float32.
    """
    if precision in (None, Precision.FP32):
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)


def _default(precision: Precision | None) -> MixedPrecisionPolicy:
    if precision is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)


def _from_mapping(precision: Precision | None, values: Mapping[str, Any]) -> MixedPrecisionPolicy:
    unknown = sorted(str(key) for key in values if key not in _KEYS)
    if unknown:
        raise ParallelismValueError(
            f"mixed_precision: unknown keys {', '.join(map(repr, unknown))}. Valid keys: {', '.join(_KEYS)}."
        )
    if values.get("buffer_dtype") is not None:
        as_dtype(values["buffer_dtype"])
        warn("mixed_precision's buffer_dtype has no effect: FSDP2 does not cast buffers.")
    default = _default(precision)
    dtypes: dict[str, torch.dtype | None] = {}
    for key in _DTYPE_KEYS:
        value = values.get(key, getattr(default, key))
        dtypes[key] = None if value is None else as_dtype(value)
    cast = values.get("cast_forward_inputs", True)
    if not isinstance(cast, bool):
        raise ParallelismValueError(f"mixed_precision's cast_forward_inputs is a bool, not {cast!r}.")
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast)


def require_fp8(device: torch.device) -> None:
    """Raises if amp_fp8 cannot run.

    Args:
        device: of the model.

    Raises:
        ParallelismValueError: lists everything that is missing.
    """
    missing = []
    if importlib.util.find_spec("torchao") is None:
        missing.append("torchao is not installed (pip install 'composer-dist[torchao]')")
    if device.type != "cuda":
        missing.append(f"the model is on {device.type!r}, not on a CUDA device")
    elif torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        missing.append(f"the device's compute capability is {major}.{minor}, below 8.9")
    if missing:
        raise ParallelismValueError(
            f"precision='amp_fp8' cannot run here: {' and '.join(missing)}. Use 'amp_bf16' instead."
        )
