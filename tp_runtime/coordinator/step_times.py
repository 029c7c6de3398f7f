"""When each step was planned, published and answered, to whoever wants to know: the histograms, the
list of slow steps, the trace. All times are nanoseconds of CLOCK_MONOTONIC."""

from __future__ import annotations

import time
from collections import deque

from tp_runtime.coordinator.activity import ActivityLog
from tp_runtime.coordinator.metrics import Metrics
from tp_runtime.coordinator.steps_in_flight import StepRecord
from tp_runtime.coordinator.trace_file import TraceFile
from tp_runtime.transport.trace_area import SpanKind


class StepTimes:
    """Called by the engine in the order of the steps; `trace` is given under `--trace`."""

    def __init__(self, metrics: Metrics, activity: ActivityLog, trace: TraceFile | None) -> None:
        self._metrics = metrics
        self._activity = activity
        self._trace = trace
        self._published: deque[int] = deque()
        """Of each step under way."""
        self._answered = 0

    def published(self, step: int, size: int, started: int, planned: int, published: int) -> None:
        """A plan of `size` bytes was formed from `started` to `planned`, then published."""
        self._published.append(published)
        self._metrics.published(size, started, planned, published)
        if self._trace is not None:
            self._trace.coordinator.span(SpanKind.PLAN, step, started, planned)
            self._trace.coordinator.span(SpanKind.PUBLISH, step, planned, published)

    def answered(self, records: list[StepRecord], received: int, started: int) -> int:
        """Their answers, which came at `received`, were taken between `started` and now, which is
        returned. Steps that were taken together share that time evenly."""
        now = time.monotonic_ns()
        for number, record in enumerate(records):
            begun = started + (now - started) * number // len(records)
            done = started + (now - started) * (number + 1) // len(records)
            published, self._answered = self._published.popleft(), record.step
            self._metrics.answered(record, published, received, received + done - begun)
            self._activity.answered(record, published, received)
            if self._trace is not None:
                self._trace.coordinator.span(SpanKind.WAIT, record.step, published, received)
                self._trace.coordinator.span(SpanKind.COMMIT, record.step, begun, done)
        return now

    def handed_over(self, started: int) -> None:
        """The tokens of all steps answered so far have been given to the text threads."""
        if self._trace is not None:
            now = time.monotonic_ns()
            self._trace.coordinator.span(SpanKind.HAND_OVER, self._answered, started, now)

    def forget(self) -> None:
        """No step is under way any more."""
        self._published.clear()

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest step under way was published; `now` as `time.monotonic()`."""
        return now - self._published[0] / 1e9 if self._published else 0.0
