"""The frames of a client message, read with distrust.

A message is two frames: FRAME_HEADER and one msgpack ClientMessage. Whatever is wrong with them
becomes a MalformedMessage that can be answered and counted. Knows nothing of sockets.
"""

from __future__ import annotations

import msgspec

from tp_runtime.errors import InvalidRequestError, ProtocolError, TPRuntimeError
from tp_runtime.messages import (
    FRAME_HEADER,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    ClientMessage,
)

_decoder = msgspec.msgpack.Decoder(ClientMessage)
_any_decoder = msgspec.msgpack.Decoder()


class MalformedMessage(Exception):
    """`kind`: garbage, version, oversized or invalid, for counting; `request_id` when the message
    still gave one, so that its sender knows what the answer is about."""

    def __init__(self, kind: str, request_id: str, error: TPRuntimeError) -> None:
        super().__init__(str(error))
        self.kind = kind
        self.request_id = request_id
        self.error = error


def read_client_message(frames: list[bytes]) -> ClientMessage:
    """The message in the frames that follow a client's identity; raises MalformedMessage."""
    if not frames or len(frames[0]) != len(FRAME_HEADER) or frames[0][:3] != FRAME_HEADER[:3]:
        raise MalformedMessage(
            "garbage",
            "",
            ProtocolError("This is not a tp_runtime message; connect with tp_runtime.Client."),
        )
    if frames[0] != FRAME_HEADER:
        raise MalformedMessage("version", _request_id(frames), _version_error(frames[0][3]))
    if len(frames) != 2:
        raise MalformedMessage(
            "garbage", "", ProtocolError(f"A message has 2 frames; this one has {len(frames)}.")
        )
    size = len(frames[1])
    if size > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            "oversized",
            "",
            ProtocolError(
                f"The message has {size} bytes; this server takes up to {MAX_MESSAGE_BYTES}."
            ),
        )
    return _decode(frames)


def _decode(frames: list[bytes]) -> ClientMessage:
    try:
        return _decoder.decode(frames[1])
    except msgspec.ValidationError as error:
        raise MalformedMessage(
            "invalid",
            _request_id(frames),
            InvalidRequestError(f"The request does not have the right form: {error}."),
        ) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError) as error:
        # TypeError: a map in the message has a map or a list as its key.
        raise MalformedMessage(
            "garbage", "", ProtocolError(f"The message cannot be read: {error}.")
        ) from None


def _version_error(version: int) -> ProtocolError:
    return ProtocolError(
        f"The client speaks version {version} of the protocol and this server version "
        f"{PROTOCOL_VERSION}; install the same tp_runtime on both sides."
    )


def _request_id(frames: list[bytes]) -> str:
    """The `request_id` of a message that is otherwise unreadable, "" without one."""
    if len(frames) < 2 or len(frames[1]) > MAX_MESSAGE_BYTES:
        return ""
    try:
        raw = _any_decoder.decode(frames[1])
    except (ValueError, TypeError, RecursionError):
        return ""
    name = raw.get("request_id") if isinstance(raw, dict) else None
    return name if isinstance(name, str) else ""
