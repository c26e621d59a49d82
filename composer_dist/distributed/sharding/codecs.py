"""Checks whether tensors with codecs can be sharded as planned."""

from collections.abc import Collection, Iterator, Mapping

import torch

from composer_dist.errors import Faults
from composer_dist.structure.structure import Held, Structure
from composer_dist.tensors.inner import codec_of, empty_like, inner_tensors

_UNCUT = "cannot be used with tensor parallelism, which cuts plain tensors. Use tp=1."


def check_codecs(
    structure: Structure, resharded: Mapping[str, bool | int], sizes: Mapping[str, int], cut: Collection[str]
) -> None:
    """Refuse parameters whose class or codec does not support the plan.

    Args:
        resharded: sharded parameters, each with its unit's `reshard_after_forward`.
        sizes: the sizes of the mesh dimensions.
        cut: the parameters that tensor parallelism cuts.
    """
    with Faults() as faults:
        for name in dict.fromkeys((*cut, *resharded)):
            held = structure.tensors[name]
            if not held.info.inner:
                continue
            kind = f"{name}, a {type(held.get()).__name__},"
            if name in cut:
                faults.append(f"{kind} {_UNCUT}")
            elif fault := next(_faults(held, resharded[name], sizes), None):
                faults.append(f"{kind} {fault} Or leave its module replicated with Rule(..., shard=False).")


def _faults(held: Held, reshard: bool | int, sizes: Mapping[str, int]) -> Iterator[str]:
    tensor, info = held.get(), held.info
    codec = codec_of(tensor)
    assert codec is not None
    if not codec.rows:
        yield "cannot be cut: its codec has no rows. Register another (register_tensor_codec(replace=True))."
        return
    if unknown := sorted(codec.rows - {inner.name for inner in info.inner}):
        yield f"has no inner tensors {', '.join(unknown)}, which its codec lists in rows. Correct rows."
    if nested := [n for n, inner in inner_tensors(tensor).items() if type(inner) is not torch.Tensor]:
        yield f"contains other subclasses ({', '.join(nested)}). Make flatten return plain tensors."
    if info.requires_grad:
        yield "is trainable, but codecs support only frozen ones. Freeze it (requires_grad=False)."
    if not all(hasattr(tensor, f"fsdp_{when}_all_gather") for when in ("pre", "post")):
        yield (
            "cannot be gathered: its class lacks fsdp_pre_all_gather and fsdp_post_all_gather. Add them "
            "(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)."
        )
    if not isinstance(reshard, bool):
        yield (
            f"cannot be resharded to {reshard} ranks; FSDP2 supports that only for plain tensors. Set "
            "reshard_after_forward to True or False."
        )
    if sizes["tp"] > 1:
        yield _UNCUT
    shards = sizes["dp_shard"] * sizes["cp"]
    rows = {"it": info.shape[0]} | {inner.name: (*inner.shape, 1)[0] for inner in info.inner if inner.rows}
    if uneven := [f"{name} has {count}" for name, count in rows.items() if count % shards]:
        yield (
            f"of shape {info.shape}, cannot be cut among {shards} ranks in equal parts of rows: "
            f"{', '.join(uneven)}. Choose another dp_shard."
        )
    part = empty_like(tensor, "meta", shards)
    shape = (info.shape[0] // shards, *info.shape[1:])
    if type(part) is not type(tensor) or part.shape != shape:
        yield (
            f"becomes a {type(part).__name__} of shape {tuple(part.shape)} if its codec is asked for shape "
            f"{shape}. Make unflatten use the shape."
        )
