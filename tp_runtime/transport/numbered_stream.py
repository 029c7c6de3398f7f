"""Numbers on the messages of one conversation, so that none is lost, repeated or another run's.

ZeroMQ keeps the order of one connection and drops nothing here (no high-water mark, no
reconnection); the numbers prove it. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import secrets
import struct

from tp_runtime.errors import ProtocolError

_HEADER = struct.Struct("<8sQ")
RUN_ID_BYTES = 8


def new_run_id() -> bytes:
    """Random, for one run of a coordinator."""
    return secrets.token_bytes(RUN_ID_BYTES)


class NumberedStream:
    """One end of a conversation: stamps what leaves (1, 2, 3, ...) and checks what arrives."""

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._sent = 0
        self._received = 0

    def stamp(self) -> bytes:
        """The header of the next message that leaves."""
        self._sent += 1
        return _HEADER.pack(self._run_id, self._sent)

    def check(self, header: bytes) -> None:
        """Raises ProtocolError when this is not the header of the next message that is due."""
        if len(header) != _HEADER.size:
            raise ProtocolError(f"A header of {len(header)} bytes where {_HEADER.size} were due.")
        run_id, number = _HEADER.unpack(header)
        if run_id != self._run_id:
            raise ProtocolError("A message of another run arrived; it was not taken.")
        if number != self._received + 1:
            raise ProtocolError(
                f"Message {number} arrived where {self._received + 1} was due; one is missing or "
                "came twice."
            )
        self._received = number
