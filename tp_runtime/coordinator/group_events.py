"""What a group of workers tells its owner, and the states it goes through."""

from __future__ import annotations

import enum
from typing import Protocol

from tp_runtime.coordinator.failure import Failure
from tp_runtime.coordinator.handshake import CacheAgreement


class GroupState(enum.Enum):
    """Where the group stands. OVER: given up, no generation will follow."""

    WAITING_FOR_KEEPERS = "waiting for keepers"
    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"
    KILLING = "killing"
    STOPPING = "stopping"
    OVER = "over"


class GroupEvents(Protocol):
    """What the owner of the group is told."""

    def on_ready(self, agreement: CacheAgreement) -> None: ...

    def on_failed(self, failures: list[Failure]) -> None:
        """Workers are being killed; nothing of the generation can be used any more."""

    def on_all_killed(self, cause: Failure) -> None:
        """The last worker of a generation that was ready is gone; others may be forked next."""

    def on_progress(self, text: str) -> None: ...

    def on_over(self, block: str) -> None:
        """Given up; `block` is the report for the terminal."""
