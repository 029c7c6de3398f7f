"""Copies of weights from pageable memory to a GPU, by way of two pinned buffers.

A plain copy leaves that to the driver, on one core: 1.6 to 9 GB/s from the page cache. Here the
compute threads fill one buffer, strided or converted as it may be, while the other is on its way:
23 to 37 GB/s with 8 threads (one H200).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BUFFER_BYTES = 32 << 20


class Staging:
    """For one device; used by one thread. On a CPU the same without a device, for tests."""

    def __init__(self, device: torch.device, num_bytes: int = BUFFER_BYTES) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)
        ]
        self._done = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._turn = 0

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """As `destination.copy_(source)`, contiguous and of the same shape, on the current stream.

        `source` may be let go of at once."""
        if not destination.numel():
            return
        room = self._buffers[0].numel() // destination.element_size()
        if destination.dim() and destination[0].numel() <= room:
            rows = room // destination[0].numel()
            parts = zip(destination.split(rows), source.split(rows), strict=True)
        else:
            parts = zip([destination], [source], strict=True)
        for to, part in parts:
            self._copy_part(to, part, fits=to.numel() <= room)

    def _copy_part(self, destination: Tensor, source: Tensor, fits: bool) -> None:
        if not fits:
            destination.copy_(source)
            return
        turn = self._turn
        self._turn = 1 - turn
        done = self._done[turn]
        if done is not None:
            done.synchronize()
        used = self._buffers[turn][: destination.numel() * destination.element_size()]
        staged = used.view(destination.dtype).view(destination.shape)
        staged.copy_(source)
        destination.copy_(staged, non_blocking=True)
        if done is not None:
            done.record()


@functools.cache
def _staging(device: torch.device) -> Staging:
    return Staging(device)


def release_staging() -> None:
    """Lets go of the buffers; the next copy makes new ones."""
    _staging.cache_clear()


def copy_in(destination: Tensor, source: Tensor) -> None:
    """`destination.copy_(source)` the quickest way there is."""
    pageable = destination.is_cuda and source.device.type == "cpu" and not source.is_pinned()
    if pageable and destination.is_contiguous():
        _staging(destination.device).copy(destination, source)
    else:
        destination.copy_(source)
