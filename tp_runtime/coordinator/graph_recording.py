"""When the workers record the graphs that they put off at their start, one at a time.

Whoever arrives waits for the one that is being recorded (0.05 to 0.15 s), so it is done while
nothing runs. Where something always runs it is done all the same, once in a while: the graphs save
more than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_S = 0.2
"""After the last request, or READY: a client that sends one after the other never waits."""
BUSY_S = 1.0
"""Between two beside running requests."""


class GraphRecording:
    """Of one generation of workers. `left`: how many are still to be recorded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.left = 0
        self._worked = self._recorded = 0.0

    def begin(self, left: int) -> None:
        """The workers are ready, with so many graphs to record."""
        self.left = left
        self._worked = self._recorded = self._clock()

    def due(self, has_work: bool, is_idle: bool) -> bool:
        """Whether the next plan shall ask for one. `is_idle`: nothing is under way either, so that
        at most one is asked for while nothing runs."""
        if not self.left:
            return False
        now = self._clock()
        if has_work:
            self._worked = now
            return now - self._recorded >= BUSY_S
        return is_idle and now - self._worked >= IDLE_S

    def asked(self) -> None:
        """A plan that asks for one was formed."""
        self.left -= 1
        self._recorded = self._clock()
