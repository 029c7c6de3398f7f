"""A server that belongs to the program that starts it, as a child process.

The child is `tp-runtime serve`. It ends when this program does, however that ends: it holds one end
of a pipe of which only this program holds the other, and watches this process by pidfd. Nothing
here depends on which thread starts it, and the main module is never imported again, so no
`__main__` guard is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ServerUnavailableError, TPRuntimeError, WorkerFailedError
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo

_CLOSE_S = 3.0
"""The child ends in order within 1.2 s and then kills; past this it is killed itself."""
_FAILURE_GRACE_S = 3.0
_START_MARGIN_S = 30.0
_TURN_S = 0.02
_numbers = itertools.count()


class LocalServer:
    """Starts the child; `wait_ready`, then use `info.address`, then `close` (any number of times).

    Also closed by garbage collection and at interpreter exit; a forked copy of this program leaves
    it alone."""

    def __init__(self, config: EngineConfig) -> None:
        me = ProcessId.current()
        self._config = config
        self.folder = RunFolder.for_owner(me, str(next(_numbers)))
        self.folder.create(claimed=True, private=True)
        theirs, mine = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tp_runtime.launch.cli", "serve"),
                    *("--engine-config", config.to_json()),
                    *("--owned-by", str(me.pid), str(me.start_time), str(theirs)),
                    *("--run-dir", str(self.folder.path)),
                ],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C is this program's, which then closes the server
            )
        except BaseException:
            os.close(mine)
            self.folder.remove()
            raise
        finally:
            os.close(theirs)
        self._finalizer = weakref.finalize(
            self, _close, me.pid, mine, self._process, self.folder, threading.Lock()
        )

    def wait_ready(self) -> ServerInfo:
        """Wait until the server takes requests.

        Raises what kept it from that: ConfigError, WeightsError, WorkerFailedError, ...; the child
        is gone then. The child itself tells the terminal what takes long."""
        deadline = time.monotonic() + self._config.start_timeout_s + _START_MARGIN_S
        try:
            while True:
                self.raise_if_over()
                status, info = self.folder.read_status(), self.folder.read_server()
                if status is not None and status.state == "ready" and info is not None:
                    return info
                if time.monotonic() > deadline:
                    raise WorkerFailedError(
                        f"The server was not ready after {self._config.start_timeout_s:g} s "
                        "(start_timeout_s); look above for what it was doing."
                    )
                time.sleep(_TURN_S)
        except BaseException:
            self.close()
            raise

    def raise_if_over(self) -> None:
        """Raises the recorded cause when the server has failed, ServerUnavailableError when it is
        gone without one."""
        failure = self.folder.read_failure()
        if failure is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_FAILURE_GRACE_S)
            raise failure.error()
        status = self._process.poll()
        if status is not None:
            failure = self.folder.read_failure()
            raise failure.error() if failure is not None else _gone(status)

    def close(self) -> None:
        """End the server and wait until nothing of it is left. Idempotent."""
        self._finalizer()


def _gone(status: int) -> TPRuntimeError:
    how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    return ServerUnavailableError(
        f"The server process has ended ({how}); look above for its message."
    )


def _close(
    creator: int,
    pipe: int,
    process: subprocess.Popen[bytes],
    folder: RunFolder,
    lock: threading.Lock,
) -> None:
    if os.getpid() != creator:
        return
    with lock:
        os.close(pipe)
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # keepers and workers die with it, the coordinator sees it
            process.wait()
        _end_coordinator(folder)
        folder.remove()


def _end_coordinator(folder: RunFolder) -> None:
    coordinator = folder.read_coordinator()
    deadline = time.monotonic() + 1.0
    while coordinator is not None and coordinator.alive():
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(coordinator.pid, signal.SIGKILL)
            return
        time.sleep(_TURN_S)


def child_environment() -> dict[str, str]:
    """The child finds this very package, however this program found it."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):  # there the child finds it anyway
        paths = [str(root), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment
