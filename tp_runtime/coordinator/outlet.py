"""What the engine thread tells the outside: answers to requests, and what the server is doing.

Every call returns at once; the work is done on the text and front-end threads. The counterpart of
`Inbox`.
"""

from __future__ import annotations

from typing import Protocol

from tp_runtime.coordinator.frontend import Frontend
from tp_runtime.coordinator.inbox import RequestKey, SubmittedRequest
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.sequence import SequenceUpdate
from tp_runtime.coordinator.server_status import ServerStatus
from tp_runtime.errors import TPRuntimeError


class CacheFacts(Protocol):
    """What the ranks agreed on, as far as clients are told."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...


class Outlet:
    """For the engine thread only, except that nothing breaks if others call it."""

    def __init__(self, frontend: Frontend, status: ServerStatus) -> None:
        self._frontend = frontend
        self._status = status

    def accepted(self, request: SubmittedRequest) -> None:
        """The request is in the scheduler's queue; its client is told the seed."""
        self._frontend.texts.accepted(request)

    def failed(self, key: RequestKey, error: TPRuntimeError) -> None:
        """The end of a request; harmless when its client is gone."""
        self._frontend.texts.failed(key, error)

    def updates(self, updates: list[SequenceUpdate]) -> None:
        """What one step brought, in any number of requests. The list is handed over."""
        self._frontend.texts.updates(updates)

    def ready(self, agreement: CacheFacts, limits: SchedulerLimits) -> None:
        """Workers are ready under these limits, at start or after they were replaced."""
        self._status.ready(agreement.num_blocks, agreement.block_size, limits.max_model_len)
        self._frontend.texts.check_against(limits)

    def state(self, state: str, text: str = "") -> None:
        """starting, ready, recovering or draining, and what is being waited for."""
        self._status.state(state)

    def stats(self, stats: dict[str, float]) -> None:
        """Numbers for `Info.stats`; replaces those of the last call."""
        self._status.stats(stats)

    def refuse(self, error: TPRuntimeError) -> None:
        """New requests get this error from now on, before any work is spent on them."""
        self._frontend.refuse(error)

    def fail_all(self, error: TPRuntimeError) -> None:
        """Every request under way gets this error, also those still being tokenized."""
        self._frontend.fail_all(error)

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends what was said so far, for at most `timeout_s`, and closes the client socket."""
        self._frontend.close(timeout_s)
