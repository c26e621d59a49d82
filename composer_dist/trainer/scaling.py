"""Loss scaling for float16, agreed on by all ranks.

Gradients of a loss times a large factor do not vanish in float16; if they overflow, the step is skipped on
every rank and the factor gets smaller (Micikevicius et al., 2018, arXiv:1710.03740). torch's
GradScaler looks at one device's tensors; here each rank looks at its shards and plain gradients, whatever
their meshes, and one reduction tells all ranks whether any has found an infinity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer_dist import _torch
from composer_dist.distributed.ranks import process_group
from composer_dist.distributed.training.clipping import local_gradient
from composer_dist.errors import ParallelismTypeError, ParallelismValueError
from composer_dist.precision import Precision


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the factor changes; defaults and names are torch.amp.GradScaler's."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    """What it is multiplied by after `growth_interval` steps without an infinity."""
    backoff_factor: float = 0.5
    """What it is multiplied by after a step with one."""
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not (self.init_scale > 0 and self.growth_factor > 1 and 0 < self.backoff_factor < 1):
            raise ParallelismValueError(
                "LossScaling needs init_scale > 0, growth_factor > 1 and 0 < backoff_factor < 1, not "
                f"{self.init_scale}, {self.growth_factor} and {self.backoff_factor}."
            )
        if self.growth_interval < 1:
            raise ParallelismValueError(f"growth_interval must be positive, not {self.growth_interval}.")


class LossScaler:
    """The factor, and what it has seen."""

    @classmethod
    def of(cls, options: LossScaling | None, precision: Precision | None) -> LossScaler | None:
        """The scaler that a precision needs, if it does."""
        if options is not None and precision is not Precision.AMP_FP16:
            raise ParallelismValueError("loss_scaling has an effect with precision='amp_fp16' only.")
        if not isinstance(options, LossScaling | None):
            raise ParallelismTypeError(f"loss_scaling takes a LossScaling, not {type(options).__name__}.")
        return cls(options) if precision is Precision.AMP_FP16 else None

    def __init__(self, options: LossScaling | None = None) -> None:
        self.options = options or LossScaling()
        self.scale = self.options.init_scale
        self._good_steps = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Divides the gradients by the factor. Returns whether all of them, on all ranks, are finite.

        Every rank must call it, with the parameters that it will step.
        """
        by_place: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in dict.fromkeys(parameters):  # several optimizers may hold one
            if (gradient := local_gradient(parameter)) is not None:
                by_place[gradient.device, gradient.dtype].append(gradient)
        found = torch.zeros(1, device=process_group.device_of_group())
        for (device, _), gradients in by_place.items():
            here = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1 / self.scale, device=device)
            _torch.amp_foreach_non_finite_check_and_unscale_(gradients, here, inverse)
            found += here.to(found.device)
        return not bool(process_group.all_reduce(found, "max"))

    def update(self, finite: bool) -> None:
        """Changes the factor after a step, or after a skipped one."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale *= self.options.backoff_factor
        elif self._good_steps == self.options.growth_interval:
            self.scale *= self.options.growth_factor
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The factor, and the steps since it last moved."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
