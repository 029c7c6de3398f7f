"""Spans in memory, and following them while they are written."""

from __future__ import annotations

import time

import pytest

from tp_runtime.transport import trace_area
from tp_runtime.transport.trace_area import Span, SpanKind, TraceArea, TraceFollower, unpack_spans


def read(follower: TraceFollower, most: int = 1000, resting: bool = True) -> list[int]:
    return [span.step for span in unpack_spans(follower.new_records(most, resting))]


def test_every_span_is_read_once_also_when_the_block_begins_anew() -> None:
    area = TraceArea.private()
    follower, started = TraceFollower(area), time.monotonic_ns() - trace_area.CAPACITY * 10
    seen: list[int] = []
    for step in range(trace_area.CAPACITY + 1500):
        area.span(SpanKind.RUN, step, started + step, started + step + 3)
        if step % 700 == 699:
            seen += read(follower)
    while new := read(follower):
        seen += new
    assert seen == list(range(trace_area.CAPACITY + 1500))


def test_at_most_so_many_come_at_once() -> None:
    area = TraceArea.private()
    for step in range(5):
        area.span(SpanKind.APPLY, step, step, step + 1)
    follower = TraceFollower(area)
    assert [read(follower, 2), read(follower, 2), read(follower, 2)] == [[0, 1], [2, 3], [4]]


def test_what_was_written_a_moment_ago_is_left_for_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    area, now = TraceArea.private(), time.monotonic_ns()
    area.span(SpanKind.RUN, 1, now - 10, now)
    follower = TraceFollower(area)
    monkeypatch.setattr(trace_area.time, "monotonic_ns", lambda: now + 1000)
    assert read(follower, resting=False) == []
    monkeypatch.setattr(trace_area.time, "monotonic_ns", lambda: now + 10**7)
    assert read(follower, resting=False) == [1]


def test_spans_gives_what_was_written() -> None:
    area = TraceArea.private()
    area.span(SpanKind.DEVICE, 7, 100, 250)
    assert list(area.spans()) == [Span(SpanKind.DEVICE, 7, 100, 250)]
