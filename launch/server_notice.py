"""Telling the terminal what a starting server waits for, and when it is ready."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tp_runtime.launch.wait_notice import WaitNotice
from tp_runtime.run_folder import RunFolder, ServerInfo, process_birth


class ServerNotice:
    """Call `turn` a few times a second. `silent`: somebody else tells it all. `ready_is_news`
    false: the waits are told, but not the address."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        silent: bool = False,
        ready_is_news: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._folder = folder
        self._silent = silent
        self._ready_is_news = ready_is_news and not silent
        self._stream = sys.stderr if stream is None else stream
        self._wait: WaitNotice | None = WaitNotice(self._stream)
        self._since = process_birth()
        self.ready = False

    def turn(self, fallback: str = "starting the rank processes (they import torch)") -> None:
        """`fallback`: what is waited for while the coordinator has said nothing yet."""
        status = self._folder.read_status()
        state = status.state if status is not None else "starting"
        if state == "ready" and not self.ready:
            self.ready, self._wait = True, None
            info = self._folder.read_server()
            if info is not None and self._ready_is_news:
                line = ready_line(info, self._folder.read_http(), time.monotonic() - self._since)
                print(line, file=self._stream, flush=True)
        elif state != "ready" and not self._silent:
            if self._wait is None:
                self._wait = WaitNotice(self._stream)
            self._wait.update(status.text if status is not None and status.text else fallback)


def print_failure(message: str, stream: TextIO | None = None) -> None:
    """One sentence with the program's name, or a report of several lines as it is."""
    block = "\n" in message
    print(message if block else f"tp_runtime: {message}", file=stream or sys.stderr, flush=True)


def ready_line(info: ServerInfo, http: str, seconds: float) -> str:
    """`http`: URL of the HTTP server, empty when there is none; `seconds`: how long it took."""
    web = f"{http}/v1 (OpenAI's API) and " if http else ""
    workers = "worker" if info.tensor_parallel_size == 1 else "workers"
    return (
        f"tp_runtime: {info.model} is ready on {info.tensor_parallel_size} {info.device} {workers} "
        f'at {web}{info.address} (Client("{info.address}"); Ctrl-C stops it), '
        f"{seconds:.1f} s after the start"
    )
