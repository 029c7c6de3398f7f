"""Spans of a rank's steps: on the host, and on the device between two CUDA events.

The device has a clock of its own; only differences between events are known. One event is placed
on the host's clock after a synchronisation at the start, and every later one by its distance to the
one before, so float32 milliseconds stay exact. The host never waits for an event.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from tp_runtime.transport.trace_area import SpanKind, TraceArea


class StepTrace:
    """`area` belongs to this rank; `device` is where its steps run."""

    def __init__(self, area: TraceArea, device: torch.device) -> None:
        self._area = area
        self._step = 0
        self._device = _DeviceSpans(area) if device.type == "cuda" else None

    def before_step(self, step: int) -> None:
        self._step = step
        if self._device is not None:
            self._device.begin(step)

    def after_step(self, received: int, applied: int) -> None:
        """The step is launched; its plan was received and applied at these times."""
        self._area.span(SpanKind.APPLY, self._step, received, applied)
        self._area.span(SpanKind.RUN, self._step, applied, time.monotonic_ns())
        if self._device is not None:
            self._device.end()

    def answered(self, step: int, started: int) -> None:
        self._area.span(SpanKind.ANSWER, step, started, time.monotonic_ns())

    def finish(self) -> None:
        """Every step is done; writes the spans that are still missing."""
        if self._device is not None:
            torch.cuda.synchronize()
            self._device.collect()


class _DeviceSpans:
    """Pairs of events around each step, read once the device has passed them."""

    def __init__(self, area: TraceArea) -> None:
        self._area = area
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last = _event()
        self._last.synchronize()
        self._last_at = time.monotonic_ns()
        self._begun: tuple[int, torch.cuda.Event] | None = None

    def begin(self, step: int) -> None:
        self._begun = step, _event()

    def end(self) -> None:
        if self._begun is not None:
            self._pending.append((*self._begun, _event()))
        self.collect()

    def collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            step, start, end = self._pending.popleft()
            started = self._last_at + int(self._last.elapsed_time(start) * 1e6)
            self._last, self._last_at = end, started + int(start.elapsed_time(end) * 1e6)
            self._area.span(SpanKind.DEVICE, step, started, self._last_at)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
