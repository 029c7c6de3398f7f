"""Dying with one's parent, by two mechanisms.

PR_SET_PDEATHSIG is immediate but belongs to the parent's *thread* that made the child, and misses a
parent that was gone before the call. A pidfd belongs to the process and misses nothing, but needs
somebody who polls it. A child here uses both.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable

from tp_runtime.run_folder import ProcessId

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> bool:
    """Have the kernel send `signum` to this process when its parent's thread ends.

    False when `parent` is not the parent (any more): the caller should end itself then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def open_pidfd(process: ProcessId) -> int:
    """A descriptor that becomes readable when the process ends.

    Raises ProcessLookupError when it is already gone or its pid belongs to another one."""
    fd = os.pidfd_open(process.pid)
    if not process.alive():
        os.close(fd)
        raise ProcessLookupError(f"Process {process.pid} has ended.")
    return fd


def send_signal(process: ProcessId, signum: int) -> bool:
    """Signal exactly this process, never one that reused its pid. False when it is gone."""
    try:
        fd = open_pidfd(process)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until the processes have ended; returns those that have not after `timeout_s`.

    Children of the caller count as ended when they are zombies; they are not reaped here."""

    deadline = time.monotonic() + timeout_s
    left = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            fd = open_pidfd(process)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                left.append(process)
            os.close(fd)
    return left
