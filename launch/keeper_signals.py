"""INT and TERM as a keeper sees them.

Until the keeper's loop runs (while torch is imported) a signal ends the process at once, without a
traceback. Then signals are only noted and wake the loop through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from tp_runtime.launch import exit_status

ECHO_S = 0.5
"""torchrun repeats a signal to its ranks that the terminal may have sent them already; one that
comes so soon after another is not a second wish."""


class KeeperSignals:
    """Install before slow imports. `before_exit` runs when a signal ends the process early."""

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self._before_exit = before_exit
        self._first: float | None = None
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._leave)
        # A launcher that handles signals on a thread of its own blocks them in all others, and a
        # blocked signal stays blocked across exec.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

    def _leave(self, signum: int, frame: FrameType | None) -> None:
        self._before_exit()
        os._exit(exit_status.of_signal(signum))

    def collect(self) -> None:
        """From now on signals are noted for `take`."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return [s for s in os.read(self._read, 64) if s in (signal.SIGINT, signal.SIGTERM)]
        return []

    def is_second_wish(self) -> bool:
        """Whether this is a second wish to stop; notes the first one."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first > ECHO_S

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
