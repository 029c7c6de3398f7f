"""Requests that crash the workers: suspected after two crashes in a row, replayed alone, convicted
by a third.

Workers do not say which request they died of. So whoever was in the running steps of two crashes in
a row is suspected; suspects run alone, one after the other, for as many steps as it took them to
crash, while all others wait with their tokens kept. A suspect that gets through is acquitted. One
that takes the workers along again is failed, it alone, and the rest go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from tp_runtime.coordinator.failure import Failure, Kind
from tp_runtime.coordinator.inbox import RequestKey
from tp_runtime.coordinator.request_table import RequestTable
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey
from tp_runtime.errors import RequestFailedError

MARGIN = 2
"""Tokens past the last step that may have crashed, for good measure."""


@dataclass
class _Suspect:
    request: RequestKey
    acquitted_at: dict[SeqKey, int]
    """Generated tokens with which each sample has passed the place of the crash."""
    killed_alone: bool = False


class Quarantine:
    """Runs on the engine's thread. Crashes more than `window_s` apart are not in a row."""

    def __init__(
        self,
        requests: RequestTable,
        run_ahead: int,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._margin = run_ahead + MARGIN
        self._window_s = window_s
        self._clock = clock
        self._last_crash = float("-inf")
        self._before: dict[RequestKey, int] = {}
        """Who was running in the last crash, with the tokens it had."""
        self._suspects: deque[_Suspect] = deque()
        """The first one runs alone."""

    @property
    def alone(self) -> RequestKey | None:
        """The request that runs alone now."""
        return self._suspects[0].request if self._suspects else None

    def crashed(self, scheduler: Scheduler, cause: Failure) -> bool:
        """The workers are gone, and `scheduler` still knows what was under way. True when this
        convicted a request, which has got its error."""
        keys = scheduler.in_flight.alive_keys()
        now, since = self._clock(), self._last_crash
        self._last_crash = now
        if self._suspects:
            return any(key.request == self.alone for key in keys) and self._judge(scheduler, cause)
        running: dict[RequestKey, list[SeqKey]] = {}
        for key in keys:
            running.setdefault(_request_of(key), []).append(key)
        tokens = {request: _tokens(scheduler, keys) for request, keys in running.items()}
        before = self._before if now - since <= self._window_s else {}
        self._before = tokens
        # Whoever did not get on between the two crashes is the likeliest, so it comes first.
        again = sorted((r for r in running if r in before), key=lambda r: tokens[r] - before[r])
        self._suspects.extend(
            _Suspect(
                request,
                {key: _tokens(scheduler, [key]) + self._margin for key in running[request]},
            )
            for request in again
        )
        self._admit(scheduler)
        return False

    def _judge(self, scheduler: Scheduler, cause: Failure) -> bool:
        """The workers died while a suspect ran alone."""
        suspect = self._suspects[0]
        if _from_outside(cause) and not suspect.killed_alone:
            suspect.killed_alone = True  # perhaps it was an operator; it is tried once more
            return False
        self._requests.fail(
            suspect.request,
            RequestFailedError(
                "The workers crashed three times while this request ran, the last time while it "
                f"ran alone, so it was given up and the others go on. {cause.error}"
            ),
        )
        # The others were suspected of the same crashes.
        self._suspects.clear()
        self._before = {}
        self._admit(scheduler)
        return True

    def progress(self, scheduler: Scheduler) -> None:
        """Acquits the suspect that runs alone once it has passed the place of its crash, or ended.
        Cheap when nobody is suspected."""
        while self._suspects and self._passed(scheduler, self._suspects[0]):
            self._suspects.popleft()
            self._before = {}
            self._admit(scheduler)

    def _passed(self, scheduler: Scheduler, suspect: _Suspect) -> bool:
        live = self._requests.samples(suspect.request)
        return all(_tokens(scheduler, [key]) >= suspect.acquitted_at.get(key, 0) for key in live)

    def _admit(self, scheduler: Scheduler) -> None:
        alone = self.alone
        scheduler.admit_only(None if alone is None else self._requests.samples(alone))


def _request_of(key: SeqKey) -> RequestKey:
    return cast(RequestKey, key.request)


def _tokens(scheduler: Scheduler, keys: list[SeqKey]) -> int:
    """Tokens generated by these sequences so far."""
    found = [scheduler.find(key) for key in keys]
    return sum(seq.num_generated for seq in found if seq is not None)


def _from_outside(cause: Failure) -> bool:
    """SIGKILL comes from an operator or the kernel's out-of-memory killer, never from the code of
    the worker itself."""
    return cause.kind is Kind.KILLED and "SIGKILL" in cause.error
