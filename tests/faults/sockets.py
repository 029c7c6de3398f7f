"""Closes the sockets of another process under it: pidfd_getfd(2), then shutdown(2).

A socket that is shut down behaves, on both sides, as if its connection had ended; the process
itself is not asked. The kernel allows it for processes that the caller may trace: its own
descendants."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress

_PIDFD_GETFD = 438
_UCRED = struct.Struct("=iII")
_syscall = ctypes.CDLL(None, use_errno=True).syscall


def close_sockets(pid: int, to: int | None = None) -> int:
    """How many were closed: all of the process, or its unix connections to the process `to`. It may
    end of the first ones already, or be ended, and then the others are closed too."""
    pidfd, closed = os.pidfd_open(pid), 0
    try:
        for fd in sockets_of(pid):
            try:
                closed += _close(pidfd, fd, to)
            except ProcessLookupError:
                if not closed:
                    raise
                break
        return closed
    finally:
        os.close(pidfd)


def sockets_of(pid: int) -> list[int]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _close(pidfd: int, fd: int, to: int | None) -> bool:
    copy = _syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd is not allowed here")
    with socket.socket(fileno=copy) as one, suppress(OSError):
        if to is None or _peer(one) == to:
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _peer(connection: socket.socket) -> int:
    """The process that listens at the other end, 0 for other than unix sockets."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[0])
