"""A ZeroMQ socket in an epoll loop.

libzmq's descriptor is edge-triggered: it falls silent when *any* call on the socket has looked at
the events behind it, also a send, while messages wait. So every send looks whether something came
in, and if so rings an eventfd that is watched beside it.

Knows nothing of what the frames mean. One thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from tp_runtime.transport.eventfd import eventfd_read, eventfd_write

_NEVER_MS = 86_400_000
"""Until libzmq itself reconnects, which nobody waits for. -1 (never) would drop what the peer said
just before its end: the connection then goes together with what was received and not yet read."""


class Watcher(Protocol):
    """Calls back on its own thread when a descriptor is readable."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class LoopSocket:
    """Nothing is dropped on the way: no high-water marks, no silent reconnection."""

    def __init__(self, kind: int, heartbeat_s: float) -> None:
        """`heartbeat_s`: libzmq drops a peer that answers none of its pings for so long."""
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, _NEVER_MS),
            (zmq.HEARTBEAT_IVL, int(heartbeat_s * 1000 / 3)),
            (zmq.HEARTBEAT_TIMEOUT, int(heartbeat_s * 1000)),
        ):
            self.socket.setsockopt(option, value)
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watcher: Watcher | None = None

    def watch(self, watcher: Watcher, callback: Callable[[], None]) -> None:
        """`callback` takes everything that is there (`receive` until None)."""
        self._watcher = watcher
        watcher.watch(self._fd, callback)
        watcher.watch(self._bell, callback)
        self.ring()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand over to libzmq, which sends on a thread of its own. Raises zmq.ZMQError."""
        self.socket.send_multipart(frames, zmq.NOBLOCK)
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.ring()

    def ring(self) -> None:
        """Have the callback run at the next turn of the loop."""
        eventfd_write(self._bell)

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None when nothing is there."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            with contextlib.suppress(BlockingIOError):
                eventfd_read(self._bell)
            return None

    def close(self, linger_s: float = 0.0) -> None:
        """Messages that wait get so long to leave."""
        if self._watcher is not None:
            self._watcher.unwatch(self._fd)
            self._watcher.unwatch(self._bell)
        self.socket.close(int(linger_s * 1000))
        self._context.term()
        os.close(self._bell)
