"""One generation of workers as the coordinator holds it: what is known of each rank, on all hosts.

A generation is never repaired. When any of its workers fails all of them are killed and the next
generation starts afresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tp_runtime.coordinator.host import Host
from tp_runtime.coordinator.host_memory import HostMemory
from tp_runtime.messages import WorkerLoaded
from tp_runtime.run_folder import is_stopped
from tp_runtime.transport.heartbeat import Heartbeat
from tp_runtime.transport.ring import RingReader


@dataclass
class WorkerPlace:
    """What the coordinator knows of one rank's worker in this generation."""

    rank: int
    pid: int | None = None
    loaded: WorkerLoaded | None = None
    ready: bool = False
    exit_status: int | None = None
    progress: str = ""

    def is_stopped(self) -> bool:
        """Whether the process was stopped by a signal. For ranks of this host."""
        return self.pid is not None and is_stopped(self.pid)


class PlanBroadcast:
    """Every plan to every host. Another host's only leaves here; it arrives while the ring of this
    one is written."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = sorted(hosts, key=lambda host: host.ranks.start, reverse=True)

    def write(self, plan: bytes, timeout_s: float) -> None:
        """Raises WorkerFailedError when a worker of this host takes nothing for so long."""
        for host in self._hosts:
            host.publish(plan, timeout_s)


class Generation:
    """`memory` is what rank 0's host shares with its workers."""

    def __init__(self, number: int, size: int, hosts: Sequence[Host], memory: HostMemory) -> None:
        self.number = number
        self.plans = PlanBroadcast(hosts)
        self.places = [WorkerPlace(rank) for rank in range(size)]
        self._memory = memory

    @property
    def answers(self) -> RingReader:
        """From rank 0."""
        return self._memory.answers

    @property
    def heartbeat(self) -> Heartbeat:
        """The page of this host; the beats of every rank come through its `Host`."""
        return self._memory.heartbeat

    @property
    def all_ready(self) -> bool:
        return all(place.ready for place in self.places)

    @property
    def all_exited(self) -> bool:
        return all(p.pid is None or p.exit_status is not None for p in self.places)
