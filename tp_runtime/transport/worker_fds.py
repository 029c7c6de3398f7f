"""The six descriptors a worker is born with, in the order in which they travel with ForkWorker."""

from __future__ import annotations

from typing import NamedTuple


class WorkerDescriptors(NamedTuple):
    """Owned by the worker after the fork; the keeper closes its own copies."""

    plan_ring: int
    plan_doorbell: int
    answer_ring: int
    """Used by rank 0 alone."""
    answer_doorbell: int
    heartbeat: int
    status: int
    """A SOCK_SEQPACKET socket to the coordinator (`FdSocket`)."""
