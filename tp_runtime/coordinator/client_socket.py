"""The ZeroMQ socket that clients connect to: bind, send without waiting, notice who is gone.

Knows nothing of what the messages mean. Not thread-safe: made on one thread, used on one other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import Counter

import zmq

from tp_runtime.errors import ConfigError
from tp_runtime.messages import FRAME_HEADER

_MAX_FRAME_BYTES = 64 << 20
"""libzmq drops the connection of whoever sends a larger frame, before the memory is spent."""
_SEND_QUEUE = 512
"""Messages that libzmq itself holds for one client; the rest waits, and is bounded, in the front
end."""
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 15_000
"""A peer whose host vanished without closing the connection is dropped after this."""
_MAX_IPC_PATH = 107
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerGone(Exception):
    """No such client is connected (any more)."""


class ClientSocket:
    """A bound ROUTER socket; `address` is where clients connect.

    Raises ConfigError when the address cannot be bound."""

    def __init__(self, listen: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._file: tuple[str, int] | None = None  # path and inode, which libzmq leaves behind
        try:
            self.address = self._bind(listen)
        except BaseException:
            self.close(0.0)
            raise

    def _bind(self, listen: str) -> str:
        if listen.startswith("ipc://"):
            _check_path(listen.removeprefix("ipc://"))
        elif listen.startswith("tcp://"):
            if ":" in listen.rpartition(":")[0].removeprefix("tcp://"):
                self.socket.setsockopt(zmq.IPV6, 1)
        else:
            raise ConfigError(
                f"--listen {listen!r} is not an address; give tcp://HOST:PORT or ipc://PATH."
            )
        try:
            self.socket.bind(listen)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"The address {listen} cannot be used ({os.strerror(error.errno or 0)}); give "
                "another one with --listen, or port 0 for any free port."
            ) from error
        if listen.startswith("ipc://"):
            path = listen.removeprefix("ipc://")
            self._file = path, os.stat(path).st_ino
        return connectable(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def receive(self) -> list[bytes] | None:
        """Identity of a client and the frames it sent; None when nothing is there."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, identity: bytes, payload: bytes) -> bool:
        """False when the client's queue is full; raises PeerGone."""
        try:
            self.socket.send_multipart((identity, FRAME_HEADER, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone from None
            raise
        return True

    def take_events(self, counters: Counter[str]) -> bool:
        """Whether a connection was lost since the last call; counts handshakes that failed."""
        lost = False
        while self.monitor.poll(0):
            (event,) = struct.unpack_from("=H", self.monitor.recv_multipart()[0])
            if event & _HANDSHAKE_FAILED:
                counters["handshakes_failed"] += 1
            else:
                lost = True
        return lost

    def close(self, linger_s: float) -> None:
        """Gives messages under way so long to leave; removes the socket's file."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(linger_s * 1000))
        self._context.term()
        if self._file is not None:
            path, inode = self._file
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)


def connectable(endpoint: str) -> str:
    """The endpoint as a client on this host can use it: a wildcard address becomes loopback."""
    for wildcard, loopback in (
        ("tcp://0.0.0.0:", "tcp://127.0.0.1:"),
        ("tcp://[::]:", "tcp://[::1]:"),
    ):
        if endpoint.startswith(wildcard):
            return loopback + endpoint.removeprefix(wildcard)
    return endpoint


def _check_path(path: str) -> None:
    """libzmq would take the path away from a server that listens there."""
    if len(path.encode()) > _MAX_IPC_PATH:
        raise ConfigError(
            f"ipc://{path} is {len(path.encode())} bytes long; a socket's path has at most "
            f"{_MAX_IPC_PATH}. Give a shorter one."
        )
    probe = socket.socket(socket.AF_UNIX)
    with contextlib.closing(probe), contextlib.suppress(OSError):
        probe.connect(path)
        raise ConfigError(f"Another server listens at ipc://{path}; give another path.")
