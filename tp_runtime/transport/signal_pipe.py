"""Signals as bytes in a pipe, so that a loop over descriptors sees them like everything else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable


class SignalPipe:
    """Takes over `signals` for this process; make it on the main thread."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals = tuple(signals)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for signum in self._signals:
            signal.signal(signum, lambda *_: None)  # a handler, or the default action would win
        # A parent may have blocked them until there is somebody to take them: until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[signal.Signals]:
        """The signals that have arrived, in order; never blocks."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(n) for n in os.read(self._read, 64)]
        return []

    def close(self) -> None:
        """The handlers stay; for a forked child that has no use for the pipe."""
        os.close(self._read)
        os.close(self._write)
