"""One message and its descriptors per packet, over a unix socket (SOCK_SEQPACKET).

Used between coordinator and keepers and for what a worker reports. A packet is one msgspec message
in msgpack; file descriptors ride along (SCM_RIGHTS). Packets keep their borders and order, and the
end of the peer is seen as an end of file at once, however it died.

This module knows nothing of what the messages mean.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from tp_runtime.errors import ConfigError, ProtocolError, ServerUnavailableError

T = TypeVar("T")

MAX_PACKET = 64 * 1024
"""Bytes of one message at most: well below the kernel's default socket buffer of about 200 KiB, so
that one packet always fits. Larger things travel through a ring."""
MAX_DESCRIPTORS = 16
_MAX_PATH = 107
"""Bytes of a unix socket path at most (sun_path without its closing zero)."""
_UCRED = struct.Struct("=iII")


class FdSocket(Generic[T]):
    """One end of a connection on which messages of type `T` arrive.

    When `receive` returns None, `closed_by_peer` tells the end of the peer from "nothing there yet"
    on a non-blocking socket. Not thread-safe: one reader, one writer.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self.closed_by_peer = False

    @classmethod
    def connect(cls, path: Path | str, receives: Any, timeout_s: float = 0.0) -> FdSocket[T]:
        """Connect to a listener, trying again for `timeout_s` while nobody listens.

        Raises ServerUnavailableError when that time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(str(check_path(path)))
                return cls(sock, receives)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                sock.close()
                if time.monotonic() >= deadline:
                    raise ServerUnavailableError(
                        f"Nobody listens at {path}; start the server first."
                    ) from error
            except BaseException:
                sock.close()
                raise
            time.sleep(0.02)

    @classmethod
    def pair(cls, receives: Any) -> tuple[FdSocket[T], socket.socket]:
        """A connected pair: this end, and the raw socket to hand to another process."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(mine, receives), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._socket.setblocking(blocking)

    def send(self, message: msgspec.Struct, fds: list[int] | tuple[int, ...] = ()) -> None:
        """Send one message; `fds` stay open here and arrive as new descriptors.

        Raises ServerUnavailableError when the peer is gone, ProtocolError when it is too large."""
        payload = msgspec.msgpack.encode(message)
        if len(payload) > MAX_PACKET or len(fds) > MAX_DESCRIPTORS:
            raise ProtocolError(
                f"A {type(message).__name__} of {len(payload)} bytes with {len(fds)} descriptors "
                f"does not fit a packet ({MAX_PACKET} bytes, {MAX_DESCRIPTORS} descriptors)."
            )
        try:
            if fds:
                socket.send_fds(self._socket, [payload], list(fds), socket.MSG_NOSIGNAL)
            else:
                self._socket.send(payload, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError) as error:
            self.closed_by_peer = True
            raise ServerUnavailableError("The other end of the socket is gone.") from error

    def receive(self) -> tuple[T, list[int]] | None:
        """The next message and its descriptors (close-on-exec, owned by the caller).

        None: nothing there yet (non-blocking socket), or the peer is gone (`closed_by_peer`).
        Raises ProtocolError on garbage; descriptors that came with it are closed."""
        try:
            payload, fds, flags = self._receive_packet()
        except BlockingIOError:
            return None
        except ConnectionResetError:
            self.closed_by_peer = True
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(fds)
            raise ProtocolError("A packet was larger than this end reads; it was dropped.")
        if not payload:
            self.closed_by_peer = True
            close_all(fds)
            return None
        try:
            return self._decoder.decode(payload), fds
        except msgspec.DecodeError as error:
            close_all(fds)
            raise ProtocolError(f"A packet could not be understood: {error}") from error

    def _receive_packet(self) -> tuple[bytes, list[int], int]:
        fds = array.array("i")
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * fds.itemsize)
        payload, ancillary, flags, _ = self._socket.recvmsg(
            MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return payload, fds.tolist(), flags

    def peer_pid(self) -> int:
        """Process id of the peer: for a connection, of the process that called `listen`."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, _, _ = _UCRED.unpack(raw)
        return int(pid)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> FdSocket[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class FdListener(Generic[T]):
    """Accepts connections at a path that no living process listens on.

    A socket file left by a dead process is replaced; one that somebody answers is not."""

    def __init__(self, path: Path | str, receives: Any, backlog: int = 128) -> None:
        self.path = check_path(path)
        self._receives = receives
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            remove_stale_socket(self.path)
            self._socket.bind(str(self.path))
            self._socket.listen(backlog)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._socket.setblocking(blocking)

    def accept(self) -> FdSocket[T] | None:
        """The next connection; None when none waits (non-blocking) or it is another user's."""
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return None
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(raw)[1] != os.getuid():
            sock.close()
            return None
        return FdSocket(sock, self._receives)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


def check_path(path: Path | str) -> Path:
    """The path, or ConfigError when it is too long for a unix socket."""
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(
            f"The socket path {path} is longer than {_MAX_PATH} bytes; set XDG_RUNTIME_DIR (or "
            "TMPDIR) to a shorter folder."
        )
    return Path(path)


def remove_stale_socket(path: Path) -> None:
    """Remove a socket file on which nobody listens; raises ConfigError when somebody does."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    else:
        raise ConfigError(f"Another server already listens at {path}; stop it first.")
    finally:
        probe.close()


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
