"""A ZeroMQ socket in an epoll loop misses nothing, whatever looks at it in between."""

from __future__ import annotations

import time

import pytest
import zmq

from tp_runtime.coordinator.event_loop import EventLoop
from tp_runtime.transport.loop_socket import LoopSocket


@pytest.fixture
def ends():
    server, client = LoopSocket(zmq.DEALER, 5.0), LoopSocket(zmq.DEALER, 5.0)
    port = server.socket.bind_to_random_port("tcp://127.0.0.1")
    client.socket.connect(f"tcp://127.0.0.1:{port}")
    client.send([b"hello"])
    assert server.socket.recv() == b"hello"  # from now on both may send
    yield server, client
    server.close()
    client.close()


def test_a_message_that_came_during_a_send_still_calls_back(ends):
    server, client = ends
    loop = EventLoop()
    got: list[bytes] = []

    def take() -> None:
        while (frames := server.receive()) is not None:
            got.extend(frames)

    server.watch(loop, take)
    for i in range(50):
        client.send([b"%d" % i])
        time.sleep(0.002)
        server.send([b"x"])  # looks at the events, so libzmq's own descriptor falls silent
        deadline = time.monotonic() + 5.0
        while len(got) <= i:
            assert time.monotonic() < deadline, got
            loop.turn(5.0)
    assert got == [b"%d" % i for i in range(50)]


def test_nothing_is_dropped_however_many_messages_wait(ends):
    server, client = ends
    for i in range(5000):  # five times ZeroMQ's usual high-water mark
        client.send([b"%d" % i])
    got = []
    deadline = time.monotonic() + 10.0
    while len(got) < 5000:
        assert time.monotonic() < deadline
        while (frames := server.receive()) is not None:
            got.append(int(frames[0]))
    assert got == list(range(5000))


def test_last_words_of_a_peer_that_ends_are_not_lost() -> None:
    """With libzmq's reconnection switched off (-1) about one in five was."""
    for _ in range(20):
        server, client = LoopSocket(zmq.DEALER, 5.0), LoopSocket(zmq.DEALER, 5.0)
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = server.socket.bind_to_random_port("tcp://127.0.0.1")
        client.socket.connect(f"tcp://127.0.0.1:{port}")
        client.send([b"hello"])
        server.socket.recv()
        server.send([b"the last word"])
        server.close(1.0)
        assert monitor.poll(5000)
        assert client.receive() == [b"the last word"]
        client.socket.disable_monitor()
        monitor.close(0)
        client.close()
