"""How often something may be started again within a time window before it is given up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RestartLimit:
    """At most `most` restarts within `window_s` seconds (supervisor intensity)."""

    def __init__(
        self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._restarts: deque[float] = deque()

    @property
    def used(self) -> int:
        """Restarts that counted when `take` was last called."""
        return len(self._restarts)

    def take(self) -> bool:
        """Whether one more is allowed now; if so it counts."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._most:
            return False
        self._restarts.append(now)
        return True

    def forgive(self) -> None:
        """The cause is known and gone; earlier restarts do not count."""
        self._restarts.clear()
