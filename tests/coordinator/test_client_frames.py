"""Frames of clients, right and wrong: nothing but a message or a MalformedMessage comes out."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_runtime.coordinator.client_frames import MalformedMessage, read_client_message
from tp_runtime.messages import (
    FRAME_HEADER,
    MAX_MESSAGE_BYTES,
    Cancel,
    ClientMessage,
    Detokenize,
    Generate,
    GetInfo,
    Ping,
    Resume,
    Tokenize,
    encode,
)
from tp_runtime.sampling_params import SamplingParams

MESSAGES: list[ClientMessage] = [
    Generate("r", SamplingParams(stop=["x"], logit_bias={5: 1.0}), prompt="Hello"),
    Generate("r", SamplingParams(), prompt_token_ids=[1, 2], resume=[Resume(0, b"\0" * 8, 3)]),
    Generate("r", SamplingParams(), messages=[{"role": "user", "content": "x"}], stream=False),
    Cancel("r"),
    Ping(),
    GetInfo("r"),
    Tokenize("r", prompt="x"),
    Detokenize("r", [1, 2]),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_is_read_back(message: ClientMessage) -> None:
    assert read_client_message([FRAME_HEADER, encode(message)]) == message


def malformed(frames: list[bytes]) -> MalformedMessage:
    with pytest.raises(MalformedMessage) as caught:
        read_client_message(frames)
    return caught.value


def test_another_version_is_named_and_its_request_too() -> None:
    header = FRAME_HEADER[:3] + bytes([FRAME_HEADER[3] + 1])
    error = malformed([header, encode({"type": "new", "request_id": "r7"})])
    assert (error.kind, error.request_id) == ("version", "r7")
    version = FRAME_HEADER[3]
    assert f"version {version + 1} of the protocol and this server version {version}" in str(error)


def test_a_wrong_field_is_an_invalid_request_with_its_name() -> None:
    raw = {"type": "generate", "request_id": "r7", "params": {"temperature": "hot"}}
    error = malformed([FRAME_HEADER, msgspec.msgpack.encode(raw)])
    assert (error.kind, error.request_id, error.error.code) == ("invalid", "r7", "invalid_request")
    assert "$.params.temperature" in str(error)
    raw = {"type": "generate", "request_id": "r7", "params": {"temprature": 1}}
    error = malformed([FRAME_HEADER, msgspec.msgpack.encode(raw)])
    assert "temprature" in str(error)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"GET / HTTP/1.1"],
        [FRAME_HEADER],
        [FRAME_HEADER, b""],
        [FRAME_HEADER, b"\xc1"],
        [FRAME_HEADER, encode(Ping())[:-1]],
        [FRAME_HEADER, encode(Ping()), b"more"],
        [FRAME_HEADER, b"\x91" * 100_000],
        [FRAME_HEADER, encode(Cancel("r")).replace(b"r", b"\xff")],
    ],
)
def test_garbage_is_named_as_such(frames: list[bytes]) -> None:
    error = malformed(frames)
    assert error.kind in ("garbage", "invalid")
    assert str(error)


def test_an_oversized_message_is_not_decoded() -> None:
    error = malformed([FRAME_HEADER, b"\xc4" * (MAX_MESSAGE_BYTES + 1)])
    assert (error.kind, error.error.code) == ("oversized", "protocol")


@given(st.lists(st.binary(max_size=60) | st.just(FRAME_HEADER), max_size=4))
@settings(max_examples=300, deadline=None)
def test_random_frames_never_raise_anything_else(frames: list[bytes]) -> None:
    with contextlib.suppress(MalformedMessage):
        read_client_message(frames)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_never_raise_anything_else(
    message: ClientMessage, data: st.DataObject
) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        with contextlib.suppress(MalformedMessage):
            read_client_message([FRAME_HEADER, damaged])


@pytest.mark.parametrize(
    "payload",
    [
        # A map as the key of the message's own map, and of a map inside chat_template_kwargs.
        b"\x81\x81\xa1a\x01\x02",
        encode(Generate("r", SamplingParams(), chat_template_kwargs={"k": None})).replace(
            b"\xa1k\xc0", b"\xa1k\x81\x81\xa1a\x01\x02"
        ),
    ],
)
def test_a_map_as_a_key_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_client_message([FRAME_HEADER, payload])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["type", "request_id", "params", "prompt", "resume", "stream", "x"]),
        values | st.sampled_from(["generate", "cancel", "tokenize"]),
    )
)
@settings(max_examples=120, deadline=None)
def test_well_formed_nonsense_never_raises_anything_else(raw: dict[str, object]) -> None:
    with contextlib.suppress(MalformedMessage):
        read_client_message([FRAME_HEADER, msgspec.msgpack.encode(raw)])
