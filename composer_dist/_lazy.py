"""Public names that are imported when they are first used, so that `import composer_dist` is cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` (PEP 562) and `__all__` for a package.

    Args:
        package: the package's `__name__`.
        homes: public name to the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted(homes)

    return get, names, names()
