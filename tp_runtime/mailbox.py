"""A queue between threads that wakes its reader through a descriptor.

Any thread puts; one thread drains. The descriptor fits into epoll, poll or a ZeroMQ poller, so a
reader waits for its mailbox and its sockets at once.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Generic, TypeVar

from tp_runtime.transport.eventfd import eventfd_read, eventfd_write

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Unbounded; whoever puts into it is bounded elsewhere (requests in flight, steps)."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable while something lies in the box that `drain` has not seen."""
        return self._doorbell

    def put(self, item: T) -> None:
        """From any thread."""
        self._items.append(item)
        eventfd_write(self._doorbell)

    def drain(self) -> list[T]:
        """Everything put so far, in order; never waits. For the one reader."""
        with contextlib.suppress(BlockingIOError):
            eventfd_read(self._doorbell)
        items = []
        with contextlib.suppress(IndexError):
            while True:
                items.append(self._items.popleft())
        return items

    def __len__(self) -> int:
        return len(self._items)

    def __del__(self) -> None:
        # Not sooner: a thread that still puts would write into whatever has the number then.
        os.close(self._doorbell)
