"""What the server was busy with lately, for the status page: ranks, restarts, slowest steps.

Written by the engine thread alone; knows nothing of how it is shown.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping

from tp_runtime.coordinator.failure import Failure, describe, first_cause
from tp_runtime.coordinator.generation import WorkerPlace
from tp_runtime.coordinator.host import Host
from tp_runtime.coordinator.local_host import LocalHost
from tp_runtime.coordinator.steps_in_flight import StepRecord
from tp_runtime.messages import Activity, RankStatus, RestartReport, SlowStep

WINDOW_S = 300.0
"""The slowest steps are those of the last two windows at most."""
NUM_SLOW_STEPS = 10
NUM_RESTARTS = 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ActivityLog:
    """`snapshot` is what a client gets."""

    def __init__(self) -> None:
        self._restarts: deque[RestartReport] = deque(maxlen=NUM_RESTARTS)
        self._slowest: list[tuple[float, int, SlowStep]] = []
        """A heap, the quickest on top."""
        self._before: list[tuple[float, int, SlowStep]] = []
        self._window_since = time.monotonic()
        self._failing: list[Failure] = []

    def failed(self, failures: list[Failure]) -> None:
        """Workers failed; what is reported within the next moment joins this same list."""
        self._restarts.append(RestartReport(time.time(), describe(first_cause(failures))))
        self._failing = failures

    def ready(self) -> None:
        """Workers run (again); by now the cause can be told from its echoes."""
        if self._failing:
            at = self._restarts.pop().at
            self._restarts.append(RestartReport(at, describe(first_cause(self._failing))))
        self._failing = []

    def recovered(self, seconds: Mapping[str, float]) -> None:
        """The last restart is over; `seconds` by part."""
        if self._restarts:
            last = self._restarts.pop()
            self._restarts.append(RestartReport(last.at, last.cause, dict(seconds)))

    def answered(self, record: StepRecord, published: int, received: int) -> None:
        """Times in nanoseconds of CLOCK_MONOTONIC. Steps in which a graph is recorded are known to
        be slow, and do not count."""
        if record.records_graph:
            return
        seconds = (received - published) / 1e9
        slowest = self._slowest
        if len(slowest) >= NUM_SLOW_STEPS and seconds <= slowest[0][0]:
            return  # almost every step
        prefill = sum(chunk.size for chunk in record.chunks)
        step = SlowStep(record.step, time.time(), seconds, len(record.decode), prefill)
        entry = (seconds, record.step, step)
        if len(slowest) < NUM_SLOW_STEPS:
            heapq.heappush(slowest, entry)
        else:
            heapq.heapreplace(slowest, entry)

    def snapshot(self, ranks: Iterable[RankStatus]) -> Activity:
        now = time.monotonic()
        if now - self._window_since > WINDOW_S:
            self._window_since = now
            self._before, self._slowest = self._slowest, []
        slow = heapq.nlargest(NUM_SLOW_STEPS, [*self._slowest, *self._before], key=_seconds)
        return Activity(list(ranks), list(self._restarts), [step for _, _, step in slow])


def _seconds(entry: tuple[float, int, SlowStep]) -> float:
    return entry[0]


def rank_status(place: WorkerPlace, host: Host) -> RankStatus:
    """What is known of a rank now; the memory of another host's process is not."""
    beat, pid, loaded = host.beat(place.rank), place.pid or 0, place.loaded
    return RankStatus(
        rank=place.rank,
        host=host.name,
        pid=pid,
        phase=beat.phase.name.lower(),
        step=beat.step,
        age_s=beat.age_s if beat.age_s < math.inf else -1.0,
        memory_bytes=resident_bytes(pid) if pid and isinstance(host, LocalHost) else 0,
        kv_block_bytes=loaded.kv_block_bytes if loaded is not None else 0,
    )


def resident_bytes(pid: int) -> int:
    """Memory of a process of this host, shared pages included; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
