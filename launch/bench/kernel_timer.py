"""Time of one call of an operator: on a GPU inside a CUDA graph, so that launching does not count.

Every call gets other data, in turn, so that what a step reads once from memory is not read from a
cache here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_PER_GRAPH = 20
"""Calls recorded into one graph."""
_REPLAYS = 10
_CPU_CALLS = 10
_BEYOND_CACHES = 256 << 20


def copies_for(num_bytes: int, device: torch.device) -> int:
    """How many sets of data an operator that touches `num_bytes` needs."""
    if device.type != "cuda":
        return 1
    return max(1, min(_PER_GRAPH, _BEYOND_CACHES // max(1, num_bytes)))


def median_us(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Microseconds of a call; `calls` do the same on different data."""
    for call in calls:
        call()  # compiles, loads, allocates
    if device.type == "cuda":
        return _graph_us(calls)
    times = []
    for number in range(_CPU_CALLS):
        started = time.perf_counter()
        calls[number % len(calls)]()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def _graph_us(calls: list[Callable[[], object]]) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(_PER_GRAPH):
            calls[number % len(calls)]()
    times = []
    for replay in range(_REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(1000 * start.elapsed_time(end) / _PER_GRAPH)
    graph.reset()
    return statistics.median(times)
