"""Matches for rules that fit many models: `Rule(presets.layers(), shard=True)`.

They are patterns, so that they can stand in YAML as well.
"""

from __future__ import annotations

import re


def layers(*containers: str) -> str:
    """The numbered layers of a model, wherever they are: "layers.0", "decoder.layers.11".

    Args:
        containers: the names of the lists that hold them, such as "h" or "blocks"; "layers" without any.
    """
    names = "|".join(map(re.escape, containers or ("layers",)))
    return rf"re:(.*\.)?({names})\.\d+"


def lora() -> str:
    """What LoRA adds to a layer (`lora_A`, `lora_B`, ...), to leave it whole with `shard=False`."""
    return r"re:.*\.lora_\w+(\..*)?"
