"""A piece of device work recorded once and replayed: a CUDA graph, or, on a CPU, the call itself.

The CPU form makes everything around a graph (static buffers, padding rows) testable without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorded:
    """`work` reads and writes fixed tensors only; `replay` does again what it did."""

    def __init__(self, work: Callable[[], None], device: torch.device, pool: Any) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._work: Callable[[], None] | None = work
        if device.type != "cuda":
            return
        self._warm_up(work, device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            work()
        self._work = None

    @staticmethod
    def _warm_up(work: Callable[[], None], device: torch.device) -> None:
        """Kernels are compiled and libraries initialised outside the capture."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._work is not None:
            self._work()

    def release(self) -> None:
        """Frees the graph; must happen before the process group it holds is destroyed."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._work = None, None
