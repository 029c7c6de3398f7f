"""Microseconds of work on a GPU, in a CUDA graph, so that launching does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[int], object]
"""One call of what is timed; the argument is its number, from 0."""


class Timer(Protocol):
    def record(self, work: Work, calls: int) -> Callable[[], float]:
        """Prepares so many calls. What is returned runs them and gives the microseconds of one; it
        may be asked again and again."""
        ...


class GraphTimer:
    """Records and replays on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def record(self, work: Work, calls: int) -> Callable[[], float]:
        """`work` is called once more, before, to load what it needs."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work(0)
            # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(calls):
                    work(number)
            finally:
                graph.capture_end()
        return lambda: self._replay_us(graph) / calls

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Of the second of two replays: while the first runs, the second is on its way already."""
        with torch.cuda.stream(self._stream):
            graph.replay()
            self._start.record()
            graph.replay()
            self._end.record()
        self._end.synchronize()
        return 1000 * self._start.elapsed_time(self._end)
