"""How a launcher is told to end: signals, and the end of the program that owns it.

Signals are taken by a thread that waits for them (`sigwait`), blocked everywhere else: torch's
elastic agent installs handlers of its own on the main thread, which would end the ranks without the
coordinator's knowledge. The first request asks the coordinator, a second one or a deadline kills.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn

from tp_runtime.launch import exit_status
from tp_runtime.launch.descendants import kill_processes
from tp_runtime.launch.parent_death import open_pidfd, send_signal
from tp_runtime.run_folder import ProcessId, RunFolder

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
INTERRUPT_S = 1.2
"""After Ctrl-C everything is gone within two seconds: this long for the orderly way."""
DRAIN_MARGIN_S = 3.0


class StopRequest:
    """Make it before other threads exist (and before torch is imported), on the main thread."""

    def __init__(self, folder: RunFolder, drain_timeout_s: float) -> None:
        self._folder = folder
        self._drain_timeout_s = drain_timeout_s
        self._lock = threading.Lock()
        self.requested = False
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._take_signals, name="signals", daemon=True).start()

    def watch_owner(self, owner: ProcessId, pipe: int) -> None:
        """Stop at once when the owner ends or closes the other end of `pipe`."""
        watch = threading.Thread(
            target=self._watch_owner, args=(owner, pipe), name="owner", daemon=True
        )
        watch.start()

    def _take_signals(self) -> None:
        while True:
            signum = signal.sigwait(SIGNALS)
            self.stop(drain=signum == signal.SIGTERM, signum=signum)

    def _watch_owner(self, owner: ProcessId, pipe: int) -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        try:
            poll.register(open_pidfd(owner), select.POLLIN)
            poll.poll()
        except ProcessLookupError:
            pass
        self.stop(drain=False)

    def stop(self, *, drain: bool, signum: int = signal.SIGTERM) -> None:
        """The first call asks the coordinator and returns; a second one kills at once."""
        with self._lock:
            first, self.requested = not self.requested, True
        if not first:
            self.kill_all(exit_status.of_signal(signum))
        wait = self._drain_timeout_s + DRAIN_MARGIN_S if drain else INTERRUPT_S
        coordinator = self._folder.read_coordinator()
        asked = coordinator is not None and send_signal(
            coordinator, signal.SIGTERM if drain else signal.SIGINT
        )
        if not asked:
            self.kill_all(exit_status.OK)
        threading.Thread(target=self._kill_after, args=(wait,), daemon=True).start()

    def _kill_after(self, seconds: float) -> None:
        time.sleep(seconds)
        self.kill_all(exit_status.OK)

    def kill_all(self, status: int) -> NoReturn:
        """Kill every process of the server, remove its folder and leave with `status`."""
        kill_processes(self._folder)
        self._folder.remove()
        sys.stderr.flush()
        os._exit(status)
