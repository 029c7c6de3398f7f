"""One attempt at a connection: a DEALER socket that is used until it breaks and never reconnects.

libzmq's own reconnection is off, so that no message is ever delivered to a server that the client
has not met. Knows nothing of calls.
"""

from __future__ import annotations

import re
import time

import msgspec
import zmq

from tp_runtime.errors import InvalidRequestError, ProtocolError
from tp_runtime.messages import FRAME_HEADER, PROTOCOL_VERSION, ServerMessage

_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 15_000
_NEVER_MS = 86_400_000
"""Until libzmq itself reconnects. -1 (never) would drop what the server said just before its end:
libzmq then removes the connection together with messages that were received and not yet read."""
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_decode = msgspec.msgpack.Decoder(ServerMessage).decode


class ClientLink:
    """`established` once the server has answered; `heard` is when it last said anything."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.established = False
        self.instance = ""
        self.opened = self.heard = time.monotonic()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the calls that the user makes
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if address.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
        self.monitor = self.socket.get_monitor_socket(_LOST)
        self.socket.connect(address)

    def send(self, payload: bytes) -> None:
        """Returns at once; a message to a link that breaks is lost with it."""
        self.socket.send_multipart((FRAME_HEADER, payload), zmq.NOBLOCK)

    def receive(self) -> ServerMessage | None:
        """None when nothing is there; raises ProtocolError for what is not a message."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.heard = time.monotonic()
        if frames[0] != FRAME_HEADER:
            raise _header_error(frames[0])
        try:
            return _decode(frames[1])
        except (msgspec.DecodeError, IndexError) as error:
            raise ProtocolError(f"A message of the server cannot be read: {error}.") from None

    def lost(self) -> bool:
        """Whether the connection failed or was closed."""
        lost = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            lost = True
        return lost

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def check_address(address: str) -> None:
    """Raises InvalidRequestError for what no server can have as its address."""
    if not re.fullmatch(r"tcp://[^/]+:[0-9]{1,5}|ipc://.+", address):
        raise InvalidRequestError(
            f"{address!r} is not an address; give tcp://HOST:PORT or ipc://PATH."
        )


def _header_error(header: bytes) -> ProtocolError:
    if len(header) == len(FRAME_HEADER) and header[:3] == FRAME_HEADER[:3]:
        return ProtocolError(
            f"The server speaks version {header[3]} of the protocol and this client version "
            f"{PROTOCOL_VERSION}; install the same tp_runtime on both sides."
        )
    return ProtocolError("What answers at this address is not a tp_runtime server.")
