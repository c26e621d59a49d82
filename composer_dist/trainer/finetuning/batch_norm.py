"""What batch normalization does while it is frozen."""

from __future__ import annotations

from torch import nn

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fix_frozen(model: nn.Module) -> list[nn.Module]:
    """Puts batch norms whose parameters are all frozen into evaluation mode, and returns them.

    They normalize by their running statistics then, and leave these alone.
    """
    frozen: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, _KINDS) and _is_frozen(module)
    ]
    for module in frozen:
        module.eval()
    return frozen


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
