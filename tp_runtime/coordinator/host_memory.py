"""What the workers of one host share with the process that leads them, for one generation.

That process is the coordinator, or the relay of another host. Nothing here is repaired: the next
generation gets fresh memory, so a late write of a dying worker cannot reach the new ones.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from tp_runtime.messages import WorkerStatus
from tp_runtime.transport.fd_socket import FdSocket, close_all
from tp_runtime.transport.heartbeat import Heartbeat, create_heartbeat_page
from tp_runtime.transport.ring import RingReader, RingWriter, create_doorbell, create_ring
from tp_runtime.transport.trace_area import create_traced_page
from tp_runtime.transport.worker_fds import WorkerDescriptors


@dataclass
class WorkerEnds:
    """One worker's descriptors on their way to it, and our end of its status socket."""

    status: FdSocket[WorkerStatus]
    descriptors: WorkerDescriptors
    status_socket: socket.socket

    def sent(self) -> None:
        """The worker's own end of its status socket has been passed on; ours must not keep it
        open, or the death of the worker would not be seen as an end of file."""
        self.status_socket.close()


@dataclass
class HostMemory:
    """Rings, heartbeat page and status sockets; `workers` by local rank."""

    plans: RingWriter
    answers: RingReader
    """Written by rank 0 alone, so silent on every host but its own."""
    heartbeat: Heartbeat
    workers: list[WorkerEnds] = field(default_factory=list)

    @classmethod
    def create(cls, num_workers: int, traced: bool = False) -> HostMemory:
        """`traced`: with room for the spans of each worker (see transport.trace_area).

        Raises OSError when memory or descriptors cannot be had."""
        made: list[int] = []
        try:
            made.append(create_ring("tp_runtime-plans"))
            made.append(create_ring("tp_runtime-answers"))
            made.append(create_traced_page(num_workers) if traced else create_heartbeat_page())
            made += [create_doorbell() for _ in range(num_workers + 1)]
            plan_ring, answer_ring, heartbeat, answer_bell, *bells = made
            memory = cls(
                RingWriter(plan_ring, bells),
                RingReader(answer_ring, answer_bell),
                Heartbeat(heartbeat),
            )
            pairs = [FdSocket[WorkerStatus].pair(WorkerStatus) for _ in bells]
        except OSError:
            close_all(made)
            raise
        for bell, (mine, theirs) in zip(bells, pairs, strict=True):
            mine.setblocking(False)
            fds = WorkerDescriptors(
                plan_ring, bell, answer_ring, answer_bell, heartbeat, theirs.fileno()
            )
            memory.workers.append(WorkerEnds(mine, fds, theirs))
        return memory

    def close(self) -> None:
        for worker in self.workers:
            worker.status.close()
            worker.status_socket.close()
        self.plans.close()
        self.answers.close()
        self.heartbeat.close()
