"""Waiting for many descriptors on one thread, with a callback each."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable


class EventLoop:
    """A thin layer over epoll. Callbacks run on the thread that calls `turn`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever `fd` is readable or its peer is gone (level-triggered)."""
        if fd in self._callbacks:
            self._epoll.modify(fd, select.EPOLLIN)
        else:
            self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Harmless when `fd` is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def turn(self, timeout_s: float) -> bool:
        """Waits for at most `timeout_s` and runs the callbacks that are due; False: none was."""
        events = self._epoll.poll(timeout_s)
        for fd, _ in events:
            callback = self._callbacks.get(fd)
            if callback is not None:  # an earlier callback of this turn may have removed it
                callback()
        return bool(events)

    def close(self) -> None:
        self._epoll.close()
