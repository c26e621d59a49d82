"""Patterns for rules that work with many models, in YAML too: `Rule(presets.layers(), shard=True)`."""

import re


def layers(*containers: str) -> str:
    """The numbered layers of a model, wherever they are: "layers.0", "decoder.layers.11".

    Args:
        containers: the names of the lists that hold them, such as "h" or "blocks"; by default "layers".
    """
    names = "|".join(map(re.escape, containers or ("layers",)))
    return rf"re:(.*\.)?({names})\.\d+"


def lora() -> str:
    """The modules that LoRA adds to a layer (`lora_A`, `lora_B`, ...), to leave whole with `shard=False`."""
    return r"re:.*\.lora_\w+(\..*)?"
