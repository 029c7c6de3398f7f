"""Small host arrays to the device and back, without a synchronisation on the way there.

On CUDA the staging memory is pinned and comes from PyTorch's caching host allocator, which reuses
a buffer only after the copy that reads it has finished, so run-ahead cannot overwrite one in use.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype on `device`; the copy is asynchronous on CUDA."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


class PendingCopy:
    """A device tensor on its way to the host. `ready()` never blocks, `wait()` does."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()  # the next step may write to it before it is read
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
