"""Eventfd calls that keep the interpreter lock do what those of `os` do."""

from __future__ import annotations

import os

import pytest

from tp_runtime.transport.eventfd import eventfd_read, eventfd_write


def test_what_is_written_is_read_once() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    eventfd_write(fd)
    eventfd_write(fd, 4)
    assert eventfd_read(fd) == 5
    os.eventfd_write(fd, 2)
    assert eventfd_read(fd) == 2
    with pytest.raises(BlockingIOError):
        eventfd_read(fd)
    os.close(fd)


def test_a_closed_descriptor_is_an_error() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        eventfd_write(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        eventfd_read(fd)
