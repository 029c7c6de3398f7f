"""The HTTP process as its starter holds it: a bound socket, and a process that is started again.

Who starts it owns it: `tp-runtime serve`, or under torchrun the first keeper. The socket stays
with the starter, so connections that arrive while the process is being replaced wait in its queue.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from tp_runtime.http.settings import HttpSettings, bind, url_of
from tp_runtime.launch.server_notice import print_failure
from tp_runtime.run_folder import RunFolder, is_stopped

API_KEY_VARIABLE = "TP_RUNTIME_API_KEY"
CLOSE_S = 0.5
"""Answers under way get so long to leave at the end; the server itself has drained by then."""
STOPPED_S = 5.0
"""One that was stopped (SIGSTOP) answers nobody; after so long it is killed."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_SOUND_AFTER_S = 30.0
"""One that ran for so long did not fail at its start; the next pause is short again."""


class HttpProcess:
    """Binds at once; `start`, then `turn` a few times a second, then `close`.

    Raises ConfigError or TPRuntimeError, one sentence, when the address cannot be had."""

    def __init__(self, settings: HttpSettings, patience_s: float = 0.0) -> None:
        self._settings = settings
        self._socket = bind(settings, patience_s)
        self.url = url_of(self._socket)
        self._folder: RunFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = 0.0
        self._stopped_at: float | None = None
        if settings.open_to_others:
            print_failure(
                f"anybody who reaches {settings.host} port {self._socket.getsockname()[1]} can use "
                "this server; set --api-key, or leave --host at 127.0.0.1."
            )

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def start(self, folder: RunFolder) -> None:
        self._folder = folder
        folder.write_http(self.url)
        self._start(folder)

    def turn(self) -> None:
        """Starts the process again when it has ended, or stays stopped."""
        if self._process is None or self._folder is None:
            return
        now = time.monotonic()
        if self._process.poll() is None:
            self._look_whether_stopped(self._process, now)
            return
        if not self._again_at:
            status = self._process.returncode
            how = f"signal {-status}" if status < 0 else f"status {status}"
            print_failure(f"the HTTP process ended ({how}) and is started again.")
            if now - self._started > _SOUND_AFTER_S:
                self._pause_s = _FIRST_PAUSE_S
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if now >= self._again_at:
            self._start(self._folder)

    def _look_whether_stopped(self, process: subprocess.Popen[bytes], now: float) -> None:
        if not is_stopped(process.pid):
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at > STOPPED_S:
            process.kill()

    def close(self) -> None:
        """Ends the process, within CLOSE_S if it can."""
        process, self._process = self._process, None
        self._socket.close()
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_S)
            return
        process.kill()
        process.wait()

    def forget(self) -> None:
        """For a forked child of the starter: the socket is not its own."""
        self._socket.close()

    def _start(self, folder: RunFolder) -> None:
        fd = self._socket.fileno()
        command = [sys.executable, "-m", "tp_runtime.http", "--run-dir", str(folder.path)]
        command += ["--socket", str(fd), "--watch-pid", str(os.getpid())]
        environment = {**os.environ, API_KEY_VARIABLE: self._settings.api_key}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(fd,),
            start_new_session=True,  # Ctrl-C is the starter's
        )
        self._started, self._again_at = time.monotonic(), 0.0
