"""Eventfd calls that keep the interpreter lock.

`os.eventfd_write` gives the lock up around a call that never waits. Where other threads are busy,
as in the coordinator, getting it back takes up to a switch interval: 40 us for a call of 1 us.
Only for descriptors made with EFD_NONBLOCK.
"""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_write = _libc.eventfd_write
_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_read = _libc.eventfd_read
_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))


def eventfd_write(fd: int, value: int = 1) -> None:
    """As `os.eventfd_write`; raises OSError."""
    if _write(fd, value):
        raise _error()


def eventfd_read(fd: int) -> int:
    """As `os.eventfd_read`; raises BlockingIOError when there is nothing, OSError otherwise."""
    value = ctypes.c_uint64()
    if _read(fd, ctypes.byref(value)):
        raise _error()
    return value.value


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))  # BlockingIOError for EAGAIN
