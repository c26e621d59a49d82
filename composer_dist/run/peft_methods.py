"""Peft's methods by name."""

from __future__ import annotations

from typing import Any

from composer_dist.distributed.from_dict import near_miss
from composer_dist.errors import ParallelismValueError


def peft_class(method: str) -> Any:
    """The configuration class of a method such as "lora".

    Raises:
        ParallelismValueError: peft has no such method.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value.lower(): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if method not in known:
        text = f"peft has no method {method!r}.{near_miss(method, known)}"
        raise ParallelismValueError(f"{text} It has {', '.join(sorted(known))}.")
    return known[method]
