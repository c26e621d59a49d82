"""Who holds which tensor: ties, duplicate modules, and every place a tensor is registered.

Vocabulary: a *place* is a module and the key under which it holds a tensor. A *tensor* of the model
is one object with all of its places: a parameter with several places is a *tie*, a module with several
names a *duplicate*. Besides parameters and buffers a module may keep a tensor as a plain attribute
(rotary tables often do); it moves with the model all the same, so it is listed too.

Nothing here needs a process group, and a model on the meta device is as good as a real one.
"""

from __future__ import annotations

from collections.abc import Iterator


def ancestors(name: str) -> Iterator[str]:
    """`name` and every module above it, innermost first, the root ("") last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


_WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def canonical_name(name: str) -> str:
    """`name` without the segments that checkpoint wrappers and `torch.compile` insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)
