"""Spans of time in a block of memory: what one process did in which step, and when.

A record has a fixed size and is written with one pack, so tracing costs about a microsecond a step
and what a process wrote is still there after it was killed. When the block is full the oldest
records are overwritten. Times are CLOCK_MONOTONIC nanoseconds, one clock for a whole host.

The areas of the workers lie behind the heartbeat page, in the same memory file. Nothing is known
here of how a trace is shown.
"""

from __future__ import annotations

import enum
import mmap
import struct
import time
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from tp_runtime.transport.heartbeat import PAGE
from tp_runtime.transport.ring import create_memory

_RECORD = struct.Struct("<IIqq")
CAPACITY = 1 << 16
"""Records of one process: up to four in a step, so the last 16,000 steps are kept. More could not
be written to a file in the second that the end of a server may take."""
AREA_BYTES = CAPACITY * _RECORD.size
_SETTLE_NS = 2_000_000


class SpanKind(enum.IntEnum):
    """What was done. 0 marks a record that was never written."""

    PLAN = 1
    """Coordinator: the scheduler forms the step."""
    PUBLISH = 2
    """Coordinator: encoding the plan and writing it to the ring."""
    WAIT = 3
    """Coordinator: from the plan's publication to the receipt of its answer."""
    COMMIT = 4
    """Coordinator: reading the answer."""
    APPLY = 5
    """Rank: from the plan's arrival until the batch state follows it."""
    RUN = 6
    """Rank: launching the step; on a CPU, computing it."""
    ANSWER = 7
    """Rank 0: the ids are on the host; sending them."""
    DEVICE = 8
    """Rank with a GPU: the step on the device. What lies between two of them is a gap."""

    HAND_OVER = 9
    """Coordinator: giving the tokens of this and earlier steps to the text threads."""


class Span(NamedTuple):
    """Nanoseconds of CLOCK_MONOTONIC."""

    kind: SpanKind
    step: int
    start: int
    end: int


class TraceArea:
    """One writer; may be read by others once the writer rests or is gone."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._at = 0
        self._size = len(memory) // _RECORD.size * _RECORD.size

    @classmethod
    def private(cls) -> TraceArea:
        """An area of this process alone."""
        return cls(mmap.mmap(-1, AREA_BYTES))

    @classmethod
    def of_rank(cls, fd: int, local_rank: int) -> TraceArea:
        """A worker's area in the memory that `create_traced_page` made."""
        return cls(mmap.mmap(fd, AREA_BYTES, offset=PAGE + local_rank * AREA_BYTES))

    def span(self, kind: SpanKind, step: int, start: int, end: int) -> None:
        _RECORD.pack_into(self._memory, self._at, kind, step, start, end)
        self._at += _RECORD.size
        if self._at >= self._size:
            self._at = 0

    def spans(self) -> Iterator[Span]:
        """Everything written and not overwritten, in no particular order."""
        return unpack_spans(self._memory[: self._size])

    def records(self, at: int, count: int) -> bytes:
        """`count` records from number `at` on, or those up to the end of the block."""
        return self._memory[at * _RECORD.size : min((at + count) * _RECORD.size, self._size)]


class TraceFollower:
    """Reads an area while another process writes it, each record once."""

    def __init__(self, area: TraceArea) -> None:
        self._area = area
        self._at = 0
        self._ends = array("q", bytes(8 * CAPACITY))
        """Of what was read last at each place: a record that ends later is a new one."""

    def new_records(self, most: int, resting: bool = False) -> bytes:
        """Up to `most` records, packed for `unpack_spans`. Unless the writer is `resting`, what was
        written in the last moment may be half there, and comes the next time."""
        settled = time.monotonic_ns() - (0 if resting else _SETTLE_NS)
        count, found = 0, self._area.records(self._at, most)
        for kind, _, _, end in _RECORD.iter_unpack(found):
            if not kind or end <= self._ends[self._at + count] or end > settled:
                break
            self._ends[self._at + count] = end
            count += 1
        self._at = (self._at + count) % CAPACITY
        return found[: count * _RECORD.size]


def unpack_spans(records: bytes) -> Iterator[Span]:
    """The spans of packed records."""
    for kind, step, start, end in _RECORD.iter_unpack(records):
        if kind:
            yield Span(SpanKind(kind), step, start, end)


def traced_bytes(ranks: int) -> int:
    """Size of a heartbeat page with the areas of so many ranks."""
    return PAGE + ranks * AREA_BYTES


def create_traced_page(ranks: int) -> int:
    """A heartbeat page with an area for each of `ranks` behind it; returns its descriptor."""
    return create_memory("tp_runtime-heartbeat", traced_bytes(ranks))
