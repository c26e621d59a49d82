"""Groups of options that the Trainer takes whole, so that its constructor stays readable."""

from __future__ import annotations

from dataclasses import dataclass

from composer_dist.errors import ParallelismValueError


@dataclass(frozen=True, kw_only=True)
class GradientClipping:
    """How the gradients of all ranks are bounded before each step; the two may be combined."""

    norm: float | None = None
    """Scale all gradients together, so that their global norm is at most this."""
    norm_type: float = 2.0
    """The p of that norm; `inf` is allowed."""
    value: float | None = None
    """Clamp every element to [-value, value], before the norm is taken."""

    def __post_init__(self) -> None:
        if self.norm is None and self.value is None:
            raise ParallelismValueError("GradientClipping needs a norm or a value.")
        for name in ("norm", "value", "norm_type"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ParallelismValueError(f"GradientClipping's {name} must be positive, not {number}.")

    @classmethod
    def of(cls, clipping: GradientClipping | float | None) -> GradientClipping | None:
        """`clipping` itself; a number is a norm, as in Composer."""
        return cls(norm=clipping) if isinstance(clipping, int | float) else clipping
