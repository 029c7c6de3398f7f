"""One connected client as the front end sees it: its requests, and what it has yet to read."""

from __future__ import annotations

from collections import deque

from tp_runtime.coordinator.client_request import ClientRequest
from tp_runtime.coordinator.text_threads import Outgoing


class ConnectedClient:
    """`backlog` holds messages that the socket did not take, because the client does not read.

    Times are those of `time.monotonic()`."""

    __slots__ = ("backlog", "backlog_bytes", "identity", "requests", "stalled_since")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.requests: dict[str, ClientRequest] = {}
        """Those under way, by `request_id`."""
        self.backlog: deque[Outgoing] = deque()
        self.backlog_bytes = 0
        self.stalled_since = 0.0
        """When the socket last took something before the backlog began to wait."""

    def push(self, message: Outgoing, now: float) -> None:
        if not self.backlog:
            self.stalled_since = now
        self.backlog.append(message)
        self.backlog_bytes += len(message.payload)

    def pop(self, now: float) -> None:
        """The first message of the backlog was sent."""
        self.backlog_bytes -= len(self.backlog.popleft().payload)
        self.stalled_since = now

    def replace_backlog(self, messages: list[Outgoing]) -> None:
        """Drops everything unsent in favour of a few last words."""
        self.backlog = deque(messages)
        self.backlog_bytes = sum(len(message.payload) for message in messages)
