"""One page of shared memory in which each rank of a host says how far it is.

A rank owns one 64-byte line of three 8-byte words: step, phase, and the time of the last change
(CLOCK_MONOTONIC nanoseconds, the same clock for every process of a host). A reader may see a line
half updated; it only ever judges by age, so that does not matter.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from typing import NamedTuple

from tp_runtime.transport.ring import create_memory

PAGE = 4096
_LINE_WORDS = 8
MAX_RANKS = PAGE // (8 * _LINE_WORDS)


class Phase(enum.IntEnum):
    """What a worker is doing; the names appear in error messages."""

    START = 0
    INIT = 1
    LOAD = 2
    WARM_UP = 3
    IDLE = 4
    APPLY = 5
    RUN = 6
    ANSWER = 7
    STOP = 8


class Beat(NamedTuple):
    step: int
    phase: Phase
    age_s: float


def create_heartbeat_page() -> int:
    """A zeroed page; returns its descriptor."""
    return create_memory("tp_runtime-heartbeat", PAGE)


class Heartbeat:
    """A view of the page. `beat` is called by the owner of a line, `read` by anybody."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE)
        self._words = memoryview(self._map).cast("Q")

    def beat(self, local_rank: int, step: int, phase: Phase) -> None:
        at = local_rank * _LINE_WORDS
        self._words[at] = step
        self._words[at + 1] = int(phase)
        self._words[at + 2] = time.monotonic_ns()

    def read(self, local_rank: int) -> Beat:
        """Age is infinite before the first beat."""
        at = local_rank * _LINE_WORDS
        step, phase, when = self._words[at], self._words[at + 1], self._words[at + 2]
        age = (time.monotonic_ns() - when) / 1e9 if when else float("inf")
        return Beat(step, Phase(phase), age)

    def clear(self) -> None:
        """Forget every line (before a new generation of workers)."""
        self._map[:PAGE] = bytes(PAGE)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)
