"""`--trace FILE`: one timeline of the coordinator and all ranks, for ui.perfetto.dev.

The format is Chrome's trace events (JSON): every process of the server is a process of the trace,
every span has its step in `args`. The file is written once, when the server ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tp_runtime.coordinator.host_spans import ArrivedSpans
from tp_runtime.transport.trace_area import Span, SpanKind, TraceArea, traced_bytes

_MAIN_LANE = 1
_DEVICE_LANE = 2
_WAIT_LANE = 10
"""Steps under way overlap; each place of the window is a line of its own."""


class _Rank(NamedTuple):
    generation: int
    rank: int
    pid: int
    area: TraceArea | None
    """None: on another host."""


class TraceFile:
    """`window`: most steps under way."""

    def __init__(self, path: str, window: int) -> None:
        self._path = Path(path)
        self._window = window
        self._ranks: list[_Rank] = []
        self.coordinator = TraceArea.private()

    def add_rank(self, generation: int, rank: int, pid: int, heartbeat_fd: int) -> None:
        """The memory stays mapped here, so spans outlive their worker. Ranks of other hosts have no
        place in it; their relays send what they did."""
        here = os.fstat(heartbeat_fd).st_size >= traced_bytes(rank + 1)
        area = TraceArea.of_rank(heartbeat_fd, rank) if here else None
        self._ranks.append(_Rank(generation, rank, pid, area))

    def write(self, arrived: ArrivedSpans | None = None) -> None:
        """`arrived`: what other hosts have sent. Raises OSError."""
        events = list(self._process(os.getpid(), "coordinator", 0, self.coordinator.spans()))
        for number, (generation, rank, pid, area) in enumerate(self._ranks, 1):
            name = f"rank {rank}" + (f", generation {generation}" if generation > 1 else "")
            if area is not None:
                events += self._process(pid, name, rank + 1, area.spans())
            elif arrived is not None:
                # Other hosts count processes for themselves: their numbers may be taken here.
                events += self._process(-number, name, rank + 1, arrived.spans(generation, rank))
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(events))
            file.write("\n]}\n")
        os.replace(temporary, self._path)

    def _process(self, pid: int, name: str, order: int, spans: Iterable[Span]) -> Iterator[str]:
        yield _meta(pid, 0, "process_name", {"name": name})
        yield _meta(pid, 0, "process_sort_index", {"sort_index": order})
        lanes: dict[int, str] = {}
        for span in sorted(spans, key=lambda span: span.start):
            lane, lane_name = self._lane(span)
            lanes[lane] = lane_name
            # Formatted by hand: ten times faster than the json module, and the server is ending.
            yield (
                f'{{"name": "{span.kind.name.lower()}", "cat": "step", "ph": "X", '
                f'"ts": {span.start / 1000}, "dur": {(span.end - span.start) / 1000}, '
                f'"pid": {pid}, "tid": {lane}, "args": {{"step": {span.step}}}}}'
            )
        for lane, lane_name in lanes.items():
            yield _meta(pid, lane, "thread_name", {"name": lane_name})

    def _lane(self, span: Span) -> tuple[int, str]:
        if span.kind is SpanKind.WAIT:
            place = span.step % self._window
            return _WAIT_LANE + place, f"under way {place}"
        if span.kind is SpanKind.DEVICE:
            return _DEVICE_LANE, "device"
        return _MAIN_LANE, "host"


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args})
