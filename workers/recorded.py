"""A piece of device work recorded once and replayed: a CUDA graph, or, on a CPU, the call itself.

The CPU form makes everything around a graph (static buffers, padding rows) testable without a GPU;
it does the work once, too, when it is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


class Recorded:
    """`work` reads and writes fixed tensors only; `replay` does again what it did."""

    def __init__(self, work: Callable[[], None], device: torch.device, pool: Any) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._work: Callable[[], None] | None = work
        if device.type != "cuda":
            work()
            return
        own, side = torch.cuda.current_stream(device), _stream(device)
        try:
            self._warm_up(work, own, side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                self._graph, pool=pool, stream=side, capture_error_mode="thread_local"
            ):
                work()
        finally:
            torch.cuda.set_stream(own)  # a recording that fails leaves another one behind
        self._work = None

    @staticmethod
    def _warm_up(work: Callable[[], None], own: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        """Kernels are compiled and libraries initialised outside the capture."""
        side.wait_stream(own)
        with torch.cuda.stream(side):
            work()
        own.wait_stream(side)

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
