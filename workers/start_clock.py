"""Where a worker's time goes between its fork and READY, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartClock:
    """A stopwatch with one running part at a time; a part entered twice is added up."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._part, self._since = part, clock()
        self.seconds: dict[str, float] = {part: 0.0}

    def enter(self, part: str) -> None:
        """What ran until now ends, and `part` begins."""
        now = self._clock()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now
        self.seconds.setdefault(part, 0.0)

    def stop(self) -> dict[str, float]:
        """Seconds by part, in the order in which they were first entered."""
        self.enter(self._part)
        return self.seconds
