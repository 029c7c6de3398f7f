"""A host as the group of workers sees it: something that forks, kills and speaks for its ranks."""

from __future__ import annotations

from typing import Protocol

from tp_runtime.messages import WorkerExited, WorkerForked, WorkerStatus
from tp_runtime.transport.heartbeat import Beat

RankMessage = WorkerForked | WorkerExited | WorkerStatus


class Host(Protocol):
    """`ranks` are consecutive; `name` is for error messages."""

    ranks: range
    name: str

    def fork(self, generation: int) -> None:
        """Fresh memory, and a worker from every keeper. Raises OSError without memory."""

    def kill(self, generation: int) -> None: ...

    def allocate(self, num_blocks: int) -> None:
        """Tell every worker how many KV blocks were agreed on."""

    def publish(self, plan: bytes, timeout_s: float) -> None:
        """To every worker of the host. Raises WorkerFailedError when one takes nothing."""

    def beat(self, rank: int) -> Beat: ...

    def release(self) -> None:
        """The workers are gone; so is what they shared."""

    def drop_keepers(self, status: int) -> None:
        """End them without further word; others may take their place."""

    def quit(self, status: int, message: str) -> None:
        """End the keepers for good."""


class HostEvents(Protocol):
    """What the owner of hosts is told, on the loop's thread."""

    def on_keeper(self, host: Host, rank: int) -> None:
        """There is a keeper of this rank now."""

    def on_rank(self, rank: int, message: RankMessage) -> None:
        """The keeper or the worker of this rank said something; an exit comes last."""

    def on_keeper_lost(self, rank: int) -> None: ...

    def on_host_lost(self, host: Host, why: str) -> None:
        """All its keepers and workers are out of reach, and to be taken for gone."""
