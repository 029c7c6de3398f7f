"""INT and TERM as a keeper sees them.

Until the keeper's loop runs (while torch is imported) a signal ends the process at once, without a
traceback. Then signals are only noted and wake the loop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from tp_runtime.launch import exit_status
from tp_runtime.transport.signal_pipe import SignalPipe

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 0.5
"""torchrun repeats a signal to its ranks that the terminal may have sent them already; one that
comes so soon after another is not a second wish."""


class KeeperSignals:
    """Make it before slow imports. `before_exit` runs when a signal ends the process early."""

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self._before_exit = before_exit
        self._first: float | None = None
        for signum in SIGNALS:
            signal.signal(signum, self._leave)
        # A launcher that handles signals on a thread of its own blocks them in all others, and a
        # blocked signal stays blocked across exec.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _leave(self, signum: int, frame: FrameType | None) -> None:
        self._before_exit()
        os._exit(exit_status.of_signal(signum))

    def collect(self) -> SignalPipe:
        """From now on signals arrive in this pipe."""
        return SignalPipe(SIGNALS)

    def is_second_wish(self) -> bool:
        """Whether a signal that came now is a second wish to stop; notes the first one."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first > ECHO_S
