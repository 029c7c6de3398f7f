"""One generation of workers as the coordinator holds it: rings, heartbeat page, status sockets.

A generation is never repaired. When any of its workers fails all of them are killed and the next
generation gets fresh memory, so a late write of a dying worker cannot reach the new ones.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from tp_runtime.messages import WorkerLoaded, WorkerStatus
from tp_runtime.transport.fd_socket import FdSocket
from tp_runtime.transport.heartbeat import Heartbeat, create_heartbeat_page
from tp_runtime.transport.ring import (
    RingReader,
    RingWriter,
    create_doorbell,
    create_ring,
)
from tp_runtime.transport.trace_area import create_traced_page
from tp_runtime.transport.worker_fds import WorkerDescriptors


@dataclass
class WorkerPlace:
    """What the coordinator knows of one rank's worker in this generation."""

    rank: int
    status: FdSocket[WorkerStatus]
    descriptors: WorkerDescriptors
    status_socket: socket.socket
    pid: int | None = None
    loaded: WorkerLoaded | None = None
    ready: bool = False
    exit_status: int | None = None
    progress: str = ""


@dataclass
class Generation:
    """Memory and descriptors shared with the workers of one host."""

    number: int
    plans: RingWriter
    answers: RingReader
    heartbeat: Heartbeat
    places: list[WorkerPlace] = field(default_factory=list)

    @classmethod
    def create(cls, number: int, world_size: int, traced: bool = False) -> Generation:
        """`traced`: with room for the spans of each rank (see transport.trace_area).

        Raises OSError when memory or descriptors cannot be had."""
        plan_ring, answer_ring = create_ring("tp_runtime-plans"), create_ring("tp_runtime-answers")
        heartbeat = create_traced_page(world_size) if traced else create_heartbeat_page()
        bells = [create_doorbell() for _ in range(world_size)]
        answer_bell = create_doorbell()
        generation = cls(
            number,
            RingWriter(plan_ring, bells),
            RingReader(answer_ring, answer_bell),
            Heartbeat(heartbeat),
        )
        for rank, bell in enumerate(bells):
            mine, theirs = FdSocket[WorkerStatus].pair(WorkerStatus)
            mine.setblocking(False)
            fds = WorkerDescriptors(
                plan_ring, bell, answer_ring, answer_bell, heartbeat, theirs.fileno()
            )
            generation.places.append(WorkerPlace(rank, mine, fds, theirs))
        return generation

    def sent(self, rank: int) -> None:
        """The worker's own end of its status socket has been passed on; ours must not keep it
        open, or the death of the worker would not be seen as an end of file."""
        self.places[rank].status_socket.close()

    @property
    def all_loaded(self) -> bool:
        return all(p.loaded is not None for p in self.places)

    @property
    def all_ready(self) -> bool:
        return all(p.ready for p in self.places)

    @property
    def all_exited(self) -> bool:
        return all(p.pid is None or p.exit_status is not None for p in self.places)

    def close(self) -> None:
        for place in self.places:
            place.status.close()
            place.status_socket.close()
        self.plans.close()
        self.answers.close()
        self.heartbeat.close()


def pid_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
