"""How long a steady step takes, and so how many steps it takes to be far enough ahead.

Plans are published ahead so that the workers find the next step however late the coordinator comes.
How late it comes is a matter of milliseconds, not of steps: of long steps a few are enough, and
whoever arrives waits for no more than those.
"""

from __future__ import annotations

import math

LEAD_S = 0.010
"""Work that is under way ahead of the step that runs. An engine beside busy threads answers within
1 to 3 ms, 6 ms once in a hundred times."""
_WEIGHT = 0.2
"""Of the last measurement in the mean."""


class StepPace:
    """Times are nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._last: int | None = None

    def answered(self, steps: int, steady: bool, busy: bool, received: int) -> None:
        """So many answers came together. `steady`: all were of pure decode steps, which follow each
        other without a pause. `busy`: others are under way still. Where none are, the workers had
        nothing to do for a while, and what was measured is the coordinator: more must be ahead."""
        if steps < 1:
            return
        last, self._last = self._last, received
        if not steady or last is None:
            return
        known, seconds = self._seconds, (received - last) / 1e9 / steps
        if not busy:
            self._seconds = None if known is None else known / 2
        else:
            self._seconds = seconds if known is None else known + _WEIGHT * (seconds - known)

    def forget(self) -> None:
        """The workers were replaced."""
        self._seconds = self._last = None

    def steps_ahead(self, least: int, most: int) -> int:
        """Published and not yet answered, the one that runs included; `most` as long as nothing is
        known."""
        if not self._seconds:
            return most
        return max(least, min(most, 1 + math.ceil(LEAD_S / self._seconds)))
