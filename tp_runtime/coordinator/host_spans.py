"""`--trace` over several hosts: the spans of the ranks behind a relay, on their way and arrived.

Each host has a clock of its own. The difference to the coordinator's is taken from the message that
was on its way for the shortest time, and is off by that time: some ten microseconds in one rack.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from tp_runtime.coordinator.local_host import LocalHost
from tp_runtime.messages import HostSpans
from tp_runtime.transport.trace_area import Span, TraceArea, TraceFollower, unpack_spans

RECORDS = 20_000
"""In one message; half of the bytes that a relay's message may have."""


class SpanSender:
    """In a relay: what its ranks have done since the last time."""

    def __init__(self, host: LocalHost, send: Callable[[HostSpans], None]) -> None:
        self._host = host
        self._send = send
        self._generation = 0
        self._followers: dict[int, TraceFollower] = {}

    def follow(self, generation: int) -> None:
        """The workers of `generation` were forked."""
        memory = self._host.memory
        self._generation = generation
        self._followers = {}
        if memory is not None:
            for number, rank in enumerate(self._host.ranks):
                area = TraceArea.of_rank(memory.heartbeat.fd, number)
                self._followers[rank] = TraceFollower(area)

    def send_new(self) -> None:
        """A message for each rank that has done something."""
        for rank, follower in self._followers.items():
            records = follower.new_records(RECORDS)
            if records:
                self._send(self._message(rank, records))

    def send_rest(self, last: bool) -> None:
        """Everything that is left, the workers being gone. `last`: and the word that no other
        workers follow."""
        for rank, follower in self._followers.items():
            while records := follower.new_records(RECORDS, resting=True):
                self._send(self._message(rank, records))
            if last:
                self._send(self._message(rank, b"", last=True))

    def _message(self, rank: int, records: bytes, last: bool = False) -> HostSpans:
        return HostSpans(self._generation, rank, records, time.monotonic_ns(), last)


class ArrivedSpans:
    """In the coordinator: what the relays have sent, on the coordinator's clock."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self._offsets: dict[int, int] = {}
        self._ended: set[int] = set()

    def take(self, message: HostSpans) -> None:
        rank, offset = message.rank, time.monotonic_ns() - message.clock
        self._offsets[rank] = min(offset, self._offsets.get(rank, offset))
        self._records[message.generation, rank].append(message.records)
        if message.last:
            self._ended.add(rank)

    def complete(self, ranks: set[int]) -> bool:
        """Whether these ranks have said their last."""
        return ranks <= self._ended

    def spans(self, generation: int, rank: int) -> Iterator[Span]:
        offset = self._offsets.get(rank, 0)
        for records in self._records[generation, rank]:
            for kind, step, start, end in unpack_spans(records):
                yield Span(kind, step, start + offset, end + offset)
