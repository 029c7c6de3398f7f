"""Packets with descriptors: whole, in order, and an end of the peer that is always seen."""

from __future__ import annotations

import os
import socket

import pytest

from tp_runtime.errors import ConfigError, ProtocolError, ServerUnavailableError
from tp_runtime.messages import (
    ForkWorker,
    KeeperCommand,
    KeeperHello,
    KeeperMessage,
    KillWorker,
    Quit,
)
from tp_runtime.transport.fd_socket import MAX_PACKET, FdListener, FdSocket


@pytest.fixture
def pair():
    mine, theirs = FdSocket[KeeperCommand].pair(KeeperCommand)
    other = FdSocket[KeeperMessage](theirs, KeeperMessage)
    yield mine, other
    mine.close()
    other.close()


def test_messages_arrive_whole_and_in_order(pair):
    mine, other = pair
    for generation in range(20):
        other.send(KillWorker(generation))
    assert [mine.receive()[0].generation for _ in range(20)] == list(range(20))


def test_descriptors_ride_along_and_are_closed_on_exec(pair):
    mine, other = pair
    read, write = os.pipe()
    other.send(ForkWorker(3), (read, write))
    os.close(write)
    message, (their_read, their_write) = mine.receive()
    assert message == ForkWorker(3)
    os.write(their_write, b"through")
    assert os.read(read, 10) == b"through"
    assert not os.get_inheritable(their_read)
    for fd in (read, their_read, their_write):
        os.close(fd)


def test_end_of_the_peer_is_told_from_nothing_there_yet(pair):
    mine, other = pair
    mine.setblocking(False)
    assert mine.receive() is None
    assert not mine.closed_by_peer
    other.send(Quit(1, "done"))
    other.close()
    assert mine.receive()[0] == Quit(1, "done")
    assert mine.receive() is None
    assert mine.closed_by_peer


def test_sending_to_a_peer_that_is_gone_is_a_typed_error(pair):
    mine, other = pair
    other.close()
    with pytest.raises(ServerUnavailableError):
        mine.send(KillWorker(1))


def test_garbage_is_a_protocol_error_and_its_descriptors_are_closed():
    mine, theirs = FdSocket[KeeperCommand].pair(KeeperCommand)
    before = set(os.listdir("/proc/self/fd"))
    socket.send_fds(theirs, [b"\xff not msgpack"], [0, 1, 2])
    with pytest.raises(ProtocolError):
        mine.receive()
    assert set(os.listdir("/proc/self/fd")) == before
    theirs.send(b"x" * (MAX_PACKET + 1))
    with pytest.raises(ProtocolError, match="larger"):
        mine.receive()
    theirs.close()
    mine.close()


def test_a_message_too_large_for_a_packet_is_refused_before_it_is_sent(pair):
    mine, _ = pair
    with pytest.raises(ProtocolError, match="does not fit"):
        mine.send(Quit(1, "x" * MAX_PACKET))


def test_listener_accepts_and_names_its_process(tmp_path):
    listener = FdListener[KeeperMessage](tmp_path / "k.sock", KeeperMessage)
    client = FdSocket[KeeperCommand].connect(tmp_path / "k.sock", KeeperCommand)
    server = listener.accept()
    client.send(KeeperHello(1, 0, 0, 1, 42, "host"))
    assert server.receive()[0].pid == 42
    assert client.peer_pid() == os.getpid()
    for end in (client, server, listener):
        end.close()
    assert not (tmp_path / "k.sock").exists()


def test_a_socket_left_by_a_dead_process_is_replaced_and_a_living_one_is_not(tmp_path):
    path = tmp_path / "k.sock"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(path))
    dead.close()
    listener = FdListener[KeeperMessage](path, KeeperMessage)
    with pytest.raises(ConfigError, match="already listens"):
        FdListener[KeeperMessage](path, KeeperMessage)
    listener.close()


def test_nobody_listening_is_a_typed_error_within_the_time_given(tmp_path):
    with pytest.raises(ServerUnavailableError, match="Nobody listens"):
        FdSocket[KeeperCommand].connect(tmp_path / "none.sock", KeeperCommand, timeout_s=0.1)


def test_a_path_too_long_for_a_socket_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        FdListener[KeeperMessage](tmp_path / ("x" * 120), KeeperMessage)
