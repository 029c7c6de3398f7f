"""Where the time of a recovery goes: from the workers' last sign of life to the next token.

A stopwatch with one running part at a time, so that the parts add up to the whole. A failure
during a recovery goes on with the same one: its parts are then sums over all attempts. Knows
nothing of workers; who sees the events says what comes next.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping


class Part(enum.Enum):
    """In the order in which they come."""

    DETECT = "detect"
    """From the last heartbeat of the rank that failed, so up to half a second too much for a worker
    that had nothing to do, and a step for one that ran."""
    KILL = "kill"
    """Reports are collected, all workers killed and reaped."""
    FORK = "fork"
    """Until every rank has a new process; new keepers from the launcher too, where one was lost."""
    LOAD = "load"
    """Process group, weights, KV cache, warm-up: until all workers are ready."""
    PREFILL = "re-prefill"
    """Until the first token after that; nothing when no request waits."""


class RecoveryClock:
    """`running` from `failed` to `over`. `seconds` and `recoveries` add up all that ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._part = Part.DETECT
        self._since = 0.0
        self._spent = dict.fromkeys(Part, 0.0)
        self.running = False
        self.recoveries = 0
        self.seconds = dict.fromkeys(Part, 0.0)

    def failed(self, silent_s: float) -> None:
        """A failure is known now, of a rank that was heard of `silent_s` ago."""
        if not self.running:
            self.running = True
            self._spent = dict.fromkeys(Part, 0.0)
            self._part, self._since = Part.DETECT, self._clock() - silent_s
        self.enter(Part.KILL)

    def enter(self, part: Part) -> None:
        """What ran until now ends, and `part` begins. Nothing happens outside a recovery."""
        if self.running:
            now = self._clock()
            self._spent[self._part] += now - self._since
            self._part, self._since = part, now

    def over(self) -> Mapping[str, float]:
        """The next token is there, or there is none to come. Seconds by the name of the part."""
        self.enter(self._part)
        self.running = False
        self.recoveries += 1
        for part, seconds in self._spent.items():
            self.seconds[part] += seconds
        return {part.value: seconds for part, seconds in self._spent.items()}


def in_words(parts: Mapping[str, float]) -> str:
    """One sentence for the log."""
    listed = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    return f"Recovered in {sum(parts.values()):.3f} s: {listed}."
