"""Parameters of the layers: made empty, filled once by a loader."""

from __future__ import annotations

import torch
from torch import nn

ShardId = str | int | None
"""Which part of a packed parameter: "q", "k", "v", 0, 1; None where nothing is packed."""


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter without gradient; somebody must fill it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def parameter_of(layer: nn.Module, name: str) -> nn.Parameter:
    """The parameter called `name`; raises ValueError when the layer was built without it."""
    own = dict(layer.named_parameters(recurse=False))
    if name not in own:
        raise ValueError(
            f"{type(layer).__name__} has no parameter {name!r} (it has: {', '.join(own)}); "
            "config.json and the weights do not belong together."
        )
    return own[name]
