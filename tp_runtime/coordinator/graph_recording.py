"""When the workers record the graphs that they put off at their start, one at a time.

Whoever arrives waits for the one that is being recorded (0.05 to 0.15 s), so it is done while
nothing runs. Where something always runs it is done all the same, once in a while: the graphs save
more than that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

IDLE_S = 0.2
"""After the last request, or READY: whoever sends the next one sooner is not kept waiting."""
BUSY_S = 1.0
"""Between two beside running requests."""
MOST_CRASHES = 2
"""After so many while a graph was recorded the workers go on with what they have at a start."""


class GraphRecording:
    """`left`: how many the present workers have not been asked for yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.left = 0
        self._worked = self._recorded = 0.0
        self._crashes = 0

    def begin(self, left: int) -> None:
        """Workers are ready, with so many graphs to record."""
        self.left = left if self._crashes < MOST_CRASHES else 0
        self._worked = self._recorded = self._clock()

    def crashed(self) -> None:
        """The workers are gone, and a graph was asked for in a step that was under way."""
        self._crashes += 1
        if self._crashes == MOST_CRASHES:
            logger.warning(
                "Workers died %d times while a CUDA graph was recorded in service; from now on "
                "only those of the start are.",
                MOST_CRASHES,
            )

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
