"""Ending every process of a server, from its launcher."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tp_runtime.launch.parent_death import send_signal, wait_gone
from tp_runtime.run_folder import ProcessId, RunFolder

GONE_S = 1.5


def descendants(pid: int) -> list[ProcessId]:
    """Children, their children and so on, of all threads of the process."""
    found: list[ProcessId] = []
    for child in _children(pid):
        with contextlib.suppress(ProcessLookupError):
            found.append(ProcessId.of(child))
        found += descendants(child)
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def kill_processes(folder: RunFolder) -> None:
    """Kill the coordinator and every descendant of this process, and wait until they are gone."""
    doomed = descendants(os.getpid())
    coordinator = folder.read_coordinator()
    if coordinator is not None and coordinator not in doomed:
        doomed.append(coordinator)  # its keeper may be gone, and with it the line to us
    for process in doomed:
        send_signal(process, signal.SIGKILL)
    wait_gone(doomed, GONE_S)
