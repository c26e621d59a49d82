"""The names of modules and tensors, without wrapper segments."""

from collections.abc import Iterator


def ancestors(name: str) -> Iterator[str]:
    """`name` and every module that contains it, innermost first, the root ("") last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def child_name(parent: str, key: str) -> str:
    """The name of the child or tensor `key` of the module called `parent`."""
    return f"{parent}.{key}" if parent else key


_WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
EXTRA_STATE = "_extra_state"
"""The key of what a module's `get_extra_state` returns, in `state_dict()`."""


def is_extra_state(name: str) -> bool:
    """Whether this is the name of a module's extra state, or of a part of it."""
    return EXTRA_STATE in name.split(".")


def canonical_name(name: str) -> str:
    """`name` without the segments that checkpoint wrappers and `torch.compile` insert."""
    if not any(segment in name for segment in _WRAPPER_SEGMENTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)
