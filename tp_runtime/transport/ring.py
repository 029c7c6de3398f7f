"""A shared-memory ring: one writer, several readers, messages of any size, in order, none lost.

The memory is an anonymous memfd, passed by descriptor: it has no name in /dev/shm, does not count
against that file system's limit, and is gone with its last holder. Every page is written once at
creation, so memory that is not there fails at start and not at a later touch.

Each reader has a *doorbell*, an eventfd counting messages published and not yet taken. The kernel's
eventfd is what orders the bytes between processes (write: release, read: acquire), so no memory
fence is needed in Python; a CRC on each record shows damage all the same. A reader may spin on the
doorbell for a moment and then blocks in the kernel, so an idle reader costs nothing.

Layout: a header (magic, capacity, one consumed-bytes word per reader), then `capacity` bytes used
as a byte stream. A record is (length, sequence, crc32) and its payload, wrapped at the end. A
message larger than the ring is written in fragments while the readers drain it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Callable

from tp_runtime.errors import ProtocolError, WorkerFailedError
from tp_runtime.transport.eventfd import eventfd_read, eventfd_write

DEFAULT_CAPACITY = 1 << 20
_MAGIC = 0x54505249
_HEADER = 4096
_RECORD = struct.Struct("<IIIHH")  # payload length, sequence, crc32, more-fragments flag, unused
_MAX_READERS = 64
_CONSUMED0 = 8  # index of the first consumed word in the header, in 8-byte words


def create_memory(name: str, size: int) -> int:
    """An anonymous memory file of `size` bytes with all pages present; returns its descriptor.

    Raises OSError (ENOSPC, ENOMEM) when the memory cannot be had."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_doorbell() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class _Mapping:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self.bytes = memoryview(self._map)
        self.words = self.bytes[:_HEADER].cast("Q")
        self.data = self.bytes[_HEADER:]
        self.capacity = size - _HEADER

    def close(self) -> None:
        self.data.release()
        self.words.release()
        self.bytes.release()
        self._map.close()
        os.close(self.fd)


def create_ring(name: str, capacity: int = DEFAULT_CAPACITY) -> int:
    """A new ring of `capacity` bytes; returns the memory's descriptor."""
    fd = create_memory(name, _HEADER + capacity)
    with mmap.mmap(fd, _HEADER) as head:
        struct.pack_into("<QQ", head, 0, _MAGIC, capacity)
    return fd


class RingWriter:
    """The only writer of a ring. `doorbells[i]` belongs to reader i."""

    def __init__(self, fd: int, doorbells: list[int]) -> None:
        if len(doorbells) > _MAX_READERS:
            raise ValueError(f"a ring has at most {_MAX_READERS} readers, not {len(doorbells)}")
        self._ring = _Mapping(fd)
        self._doorbells = doorbells
        self._written = 0
        self._sequence = 0

    def free_bytes(self) -> int:
        words, n = self._ring.words, len(self._doorbells)
        consumed = min(words[_CONSUMED0 + i] for i in range(n)) if n else self._written
        return self._ring.capacity - (self._written - consumed)

    def write(
        self,
        payload: bytes,
        timeout_s: float = 30.0,
        abort: Callable[[], bool] | None = None,
    ) -> None:
        """Publish one message to every reader.

        Returns at once while there is room; waits for the slowest reader otherwise. Raises
        WorkerFailedError after `timeout_s` without room, or as soon as `abort()` is true."""
        limit = self._ring.capacity // 2 - _RECORD.size
        view = memoryview(payload)
        while True:
            part, view = view[:limit], view[limit:]
            self._wait_for_room(_RECORD.size + len(part), timeout_s, abort)
            self._put(part, more=bool(view))
            if not view:
                return

    def _wait_for_room(self, need: int, timeout_s: float, abort: Callable[[], bool] | None) -> None:
        if self.free_bytes() >= need:
            return
        deadline = time.monotonic() + timeout_s
        while self.free_bytes() < need:
            if abort is not None and abort():
                raise WorkerFailedError("The ring was given up: its readers are being replaced.")
            if time.monotonic() > deadline:
                raise WorkerFailedError(
                    f"A reader of the ring took nothing for {timeout_s:g} s; it hangs or is dead."
                )
            time.sleep(0.0002)

    def _put(self, part: memoryview, more: bool) -> None:
        head = _RECORD.pack(len(part), self._sequence, zlib.crc32(part), int(more), 0)
        self._copy_in(head)
        self._copy_in(part)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        for doorbell in self._doorbells:
            eventfd_write(doorbell)

    def _copy_in(self, part: bytes | memoryview) -> None:
        capacity, data = self._ring.capacity, self._ring.data
        at = self._written % capacity
        first = min(len(part), capacity - at)
        data[at : at + first] = part[:first]
        if first < len(part):
            data[: len(part) - first] = part[first:]
        self._written += len(part)

    def close(self) -> None:
        self._ring.close()
        for doorbell in self._doorbells:
            with contextlib.suppress(OSError):
                os.close(doorbell)


class RingReader:
    """Reader `index` of a ring, woken by `doorbell`."""

    def __init__(self, fd: int, doorbell: int, index: int = 0) -> None:
        self._ring = _Mapping(fd)
        if self._ring.words[0] != _MAGIC:
            raise ProtocolError("This descriptor is not a ring of tp_runtime.")
        self.doorbell = doorbell
        self._index = index
        self._read = self._ring.words[_CONSUMED0 + index]
        self._sequence = 0
        self._pending = 0
        self._parts: list[bytes] = []

    def try_read(self) -> bytes | None:
        """The next whole message, or None when there is none yet. Never blocks."""
        while True:
            if self._pending == 0:
                try:
                    self._pending = eventfd_read(self.doorbell)
                except BlockingIOError:
                    return None
            self._pending -= 1
            part, more = self._take()
            if not more and not self._parts:
                return part
            self._parts.append(part)
            if not more:
                whole, self._parts = b"".join(self._parts), []
                return whole

    def read(self, timeout_s: float | None = None, spin_s: float = 0.0) -> bytes | None:
        """The next message; None when `timeout_s` ran out. Spins for `spin_s`, then sleeps."""
        start = time.monotonic()
        while (message := self.try_read()) is None:
            waited = time.monotonic() - start
            if waited < spin_s:
                continue
            left = None if timeout_s is None else timeout_s - waited
            if left is not None and left <= 0:
                return None
            poll = select.poll()
            poll.register(self.doorbell, select.POLLIN)
            poll.poll(None if left is None else left * 1000)
        return message

    def _take(self) -> tuple[bytes, bool]:
        length, sequence, crc, more, _ = _RECORD.unpack(self._copy_out(_RECORD.size))
        if sequence != self._sequence or length > self._ring.capacity:
            raise ProtocolError(
                f"Ring record {self._sequence} was expected and {sequence} found: a message is "
                "missing or the ring was overwritten."
            )
        part = self._copy_out(length)
        if zlib.crc32(part) != crc:
            raise ProtocolError(f"Ring record {sequence} is damaged (checksum differs).")
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._ring.words[_CONSUMED0 + self._index] = self._read
        return part, bool(more)

    def _copy_out(self, n: int) -> bytes:
        capacity, data = self._ring.capacity, self._ring.data
        at = self._read % capacity
        first = min(n, capacity - at)
        part = bytes(data[at : at + first])
        if first < n:
            part += bytes(data[: n - first])
        self._read += n
        return part

    def close(self) -> None:
        self._ring.close()
        with contextlib.suppress(OSError):
            os.close(self.doorbell)
