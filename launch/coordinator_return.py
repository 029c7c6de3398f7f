"""How a keeper gets from a coordinator that died to the next one, at the same place.

The first keeper of the coordinator's host starts another; all keepers connect to it as soon as it
listens. It knows nothing of the old one's requests: their clients resubmit them. A coordinator that
gave up has said why in the run folder, and is not started again; nor is one that dies too often.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tp_runtime.coordinator.restart_limit import RestartLimit
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ServerUnavailableError, WorkerFailedError
from tp_runtime.launch.coordinator_process import CoordinatorProcess
from tp_runtime.messages import KeeperCommand
from tp_runtime.run_folder import ProcessId, RunFolder
from tp_runtime.transport.fd_socket import FdSocket

END_S = 1.0
"""Between the end of a process's sockets and its own lie milliseconds."""


class CoordinatorReturn:
    """`start` makes a coordinator, None: another keeper does that; `started` is the one that runs,
    if this keeper made it. The limit is that of workers
    (`--max-worker-restarts` within `--restart-window`)."""

    def __init__(
        self,
        config: EngineConfig,
        folder: RunFolder,
        start: Callable[[], CoordinatorProcess] | None,
        started: CoordinatorProcess | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._start = start
        self._started = started
        self._limit = RestartLimit(config.max_worker_restarts, config.restart_window_s)
        self._lost_at = 0.0

    @property
    def starts(self) -> bool:
        """Whether it is this keeper that brings the coordinator back."""
        return self._start is not None

    def lost(self, coordinator: ProcessId | None) -> bool:
        """The connection ended without a word. True: so did the coordinator; call `attempt` from
        now on. False: it lives, and has given this rank up."""
        self._lost_at = time.monotonic()
        if self._started is not None:
            return self._started.wait(END_S)  # reaped, and its address free
        while coordinator is not None and coordinator.alive():
            if time.monotonic() > self._lost_at + END_S:
                return False
            time.sleep(0.005)
        return True

    def attempt(self) -> FdSocket[KeeperCommand] | None:
        """A connection to the next coordinator once it listens, None until then.

        Raises the failure that was recorded, WorkerFailedError when it dies too often, and
        ServerUnavailableError when nobody brings it back."""
        failure = self._folder.read_failure()
        if failure is not None:
            raise failure.error()
        if self._start is not None and (self._started is None or self._started.ended() is not None):
            self._note_restart()
            try:
                self._folder.write_status("recovering", "the coordinator is started again")
                self._started = self._start()
            except OSError as error:
                raise ServerUnavailableError(f"No coordinator can be started: {error}.") from error
        try:
            return FdSocket[KeeperCommand].connect(self._folder.keepers_socket, KeeperCommand)
        except ServerUnavailableError:
            if time.monotonic() - self._lost_at > self._config.start_timeout_s:
                raise
            return None

    def _note_restart(self) -> None:
        if not self._limit.take():
            raise WorkerFailedError(
                f"The coordinator ended without a word {self._limit.used + 1} times within "
                f"{self._config.restart_window_s:g} s (--max-worker-restarts, --restart-window); "
                "its messages are above."
            )
