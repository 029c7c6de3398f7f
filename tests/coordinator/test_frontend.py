"""The front end over real sockets: raw clients, right and wrong, fast and slow, alive and gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.fake_engine import FakeServer, fake_server, story, wait_until
from tp_runtime.coordinator.frontend import Frontend, FrontendLimits
from tp_runtime.coordinator.inbox import Inbox
from tp_runtime.errors import ConfigError, ServerUnavailableError, WorkerFailedError
from tp_runtime.messages import (
    FRAME_HEADER,
    MAX_MESSAGE_BYTES,
    Accepted,
    Alive,
    Cancel,
    ClientMessage,
    Failed,
    Generate,
    GetInfo,
    Info,
    Outputs,
    Ping,
    ServerMessage,
    encode,
    unpack_ids,
)
from tp_runtime.sampling_params import SamplingParams

decode = msgspec.msgpack.Decoder(ServerMessage).decode


class RawClient:
    """A DEALER socket and nothing else."""

    def __init__(self, address: str, receive_limit: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_limit)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        if receive_limit < 1000:
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(address)

    def send(self, message: ClientMessage) -> None:
        self.socket.send_multipart([FRAME_HEADER, encode(message)])

    def receive(self, timeout_s: float = 5.0) -> ServerMessage:
        """The next message that is not Alive."""
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            header, payload = self.socket.recv_multipart()
            assert header == FRAME_HEADER
            message = decode(payload)
            if not isinstance(message, Alive):
                return message
        raise TimeoutError("The server sent nothing.")

    def ping(self) -> Alive:
        """Everything sent before has been taken by the server once this returns."""
        self.send(Ping())
        assert self.socket.poll(5000)
        while True:
            message = decode(self.socket.recv_multipart()[1])
            if isinstance(message, Alive):
                return message

    def ids(self, request_id: str) -> list[int]:
        """All token ids of a request with one sample, up to its end."""
        ids: list[int] = []
        while True:
            message = self.receive()
            if isinstance(message, Failed):
                raise AssertionError(message.message)
            if isinstance(message, Outputs):
                for delta in message.deltas:
                    if delta.request_id == request_id:
                        ids += unpack_ids(delta.token_ids)
                        if delta.finish_reason is not None:
                            return ids

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generate(request_id: str, seed: int = 1, max_tokens: int | None = 5, n: int = 1) -> Generate:
    params = SamplingParams(seed=seed, max_tokens=max_tokens, n=n)
    return Generate(request_id, params, prompt="x")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[RawClient]:
    with RawClient(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def fuzzer(server: FakeServer) -> Iterator[RawClient]:
    with RawClient(server.address) as client:
        yield client


def check_served(server: FakeServer) -> None:
    """A well-behaved client is served as if nothing had happened."""
    with RawClient(server.address) as client:
        client.send(generate("ok", seed=4, max_tokens=8))
        assert client.ids("ok") == story(4, 8)


def test_a_request_is_accepted_then_answered(client: RawClient) -> None:
    client.send(generate("r", seed=3, max_tokens=6))
    accepted = client.receive()
    assert isinstance(accepted, Accepted)
    assert (accepted.request_id, accepted.seed) == ("r", 3)
    assert client.ids("r") == story(3, 6)


def test_ping_and_info_name_the_instance(server: FakeServer, client: RawClient) -> None:
    assert client.ping() == Alive(server.frontend.instance, "ready")
    client.send(GetInfo("i"))
    info = client.receive()
    assert isinstance(info, Info)
    assert (info.request_id, info.instance) == ("i", server.frontend.instance)
    assert info.stats["x"] == 1.0
    assert info.stats["frontend_requests"] >= 1


def test_every_client_hears_of_the_server_once_a_second(server: FakeServer) -> None:
    with RawClient(server.address) as client:
        client.ping()
        start = time.monotonic()
        assert client.socket.poll(3000)
        assert isinstance(decode(client.socket.recv_multipart()[1]), Alive)
        assert time.monotonic() - start < 1.5


def test_two_clients_may_use_the_same_request_id(server: FakeServer) -> None:
    with RawClient(server.address) as a, RawClient(server.address) as b:
        a.send(generate("same", seed=1, max_tokens=20))
        b.send(generate("same", seed=2, max_tokens=30))
        assert (a.ids("same"), b.ids("same")) == (story(1, 20), story(2, 30))


def test_a_replayed_frame_does_not_disturb_the_request(server: FakeServer) -> None:
    before = server.frontend.counters["duplicates"]
    server.engine.run.clear()
    with RawClient(server.address) as client:
        for _ in range(3):
            client.send(generate("twice", seed=1, max_tokens=10))
        client.ping()
        server.engine.run.set()
        assert client.ids("twice") == story(1, 10)
    assert server.frontend.counters["duplicates"] == before + 2


def test_a_request_id_may_be_used_again_once_its_request_has_ended(client: RawClient) -> None:
    for seed in range(3):
        client.send(generate("again", seed=seed))
        assert client.ids("again") == story(seed, 5)


def test_cancel_answers_and_frees_at_once_and_is_harmless_afterwards(
    server: FakeServer, client: RawClient
) -> None:
    client.send(generate("c", max_tokens=None))
    wait_until(lambda: server.engine.running)
    client.send(Cancel("c"))
    client.send(Cancel("c"))
    client.send(Cancel("never seen"))
    wait_until(lambda: not server.engine.running)
    client.send(generate("after", seed=2))
    failed: list[tuple[str, str]] = []
    while not failed:
        message = client.receive()
        if isinstance(message, Failed):
            failed.append((message.request_id, message.code))
    assert failed == [("c", "cancelled")]
    assert client.ids("after") == story(2, 5)


def test_another_version_is_answered_by_name(server: FakeServer, client: RawClient) -> None:
    client.socket.send_multipart([b"TPR\xfe", encode({"request_id": "old"})])
    answer = client.receive()
    assert isinstance(answer, Failed)
    assert (answer.request_id, answer.code) == ("old", "protocol")
    assert "version 254" in answer.message
    assert server.frontend.counters["version"] >= 1


def test_an_oversized_message_is_answered(server: FakeServer) -> None:
    with RawClient(server.address) as client:
        client.socket.send_multipart([FRAME_HEADER, bytes(MAX_MESSAGE_BYTES + 1)])
        answer = client.receive()
        assert isinstance(answer, Failed)
        assert answer.code == "protocol"
        assert f"takes up to {MAX_MESSAGE_BYTES}" in answer.message
    check_served(server)


def test_a_frame_past_all_limits_costs_its_sender_the_connection(server: FakeServer) -> None:
    with RawClient(server.address) as client:
        client.ping()
        client.socket.send_multipart([FRAME_HEADER, bytes(80 << 20)])
        check_served(server)


def test_bytes_that_are_no_zeromq_at_all(server: FakeServer) -> None:
    host, _, port = server.address.removeprefix("tcp://").partition(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(junk)
    wait_until(lambda: server.frontend.counters["handshakes_failed"] >= 1)
    check_served(server)


@given(frames=st.lists(st.binary(max_size=40) | st.just(FRAME_HEADER), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_frames_are_answered_or_dropped_and_the_server_goes_on(
    server: FakeServer, fuzzer: RawClient, frames: list[bytes]
) -> None:
    fuzzer.socket.send_multipart(frames)
    assert fuzzer.ping().instance == server.frontend.instance


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Generate("x", SamplingParams()), "Exactly one of prompt, prompt_token_ids and messages"),
        (Generate("x", SamplingParams(), prompt="a", prompt_token_ids=[1]), "must be given, not 2"),
        (Generate("x", SamplingParams(top_p=2.0), prompt="a"), "top_p=2.0 is out of range"),
        (Generate("x", SamplingParams(stop=["a"]), prompt="a", detokenize=False), "stop strings"),
        (Generate("x", SamplingParams(), prompt="a", timeout_s=-1.0), "timeout_s=-1.0"),
        (Generate("", SamplingParams(), prompt="a"), "request_id is empty"),
        (Generate("x", SamplingParams(), messages=[]), "messages is empty"),
        (Generate("x", SamplingParams(), prompt_token_ids=[2**40]), "Token ids must be integers"),
    ],
)
def test_requests_that_cannot_work_are_refused_by_name(
    client: RawClient, message: Generate, expected: str
) -> None:
    client.send(message)
    answer = client.receive()
    assert isinstance(answer, Failed)
    assert (answer.request_id, answer.code) == (message.request_id, "invalid_request")
    assert expected in answer.message


def test_a_client_that_goes_frees_its_requests_within_a_second() -> None:
    with fake_server(step_s=0.005) as server:
        with RawClient(server.address) as stays:
            leaves = RawClient(server.address)
            for i in range(5):
                leaves.send(generate(f"r{i}", max_tokens=None, n=2))
            stays.send(generate("s", seed=3, max_tokens=150))
            wait_until(lambda: len(server.engine.running) == 11)
            leaves.close()
            start = time.monotonic()
            wait_until(lambda: len(server.engine.running) <= 1)
            assert time.monotonic() - start < 1.0
            assert stays.ids("s") == story(3, 150)
        wait_until(lambda: server.frontend.counters["clients_gone"] == 2)
        assert server.frontend.num_requests == 0


def test_a_waiting_request_of_a_client_that_goes_is_freed_too() -> None:
    """Nothing is ever sent to it, so only the search after the disconnect can find it."""
    with fake_server() as server:
        server.engine.run.clear()
        client = RawClient(server.address)
        client.send(generate("r"))
        wait_until(lambda: server.engine.running)
        client.close()
        wait_until(lambda: not server.engine.running, 1.0)


LIMITS = FrontendLimits(max_backlog_bytes=200_000, max_stall_s=30.0)


def long_request(request_id: str) -> Generate:
    """64 samples with logprobs: kilobytes a step."""
    return Generate(request_id, SamplingParams(n=64, seed=1, logprobs=1), prompt="x")


def test_a_slow_reader_is_cut_off_and_the_others_go_on(tmp_path: Path) -> None:
    with (
        fake_server(f"ipc://{tmp_path}/s", limits=LIMITS) as server,
        RawClient(server.address, receive_limit=1) as slow,
        RawClient(server.address) as good,
    ):
        slow.ping()
        slow.send(long_request("slow"))
        good.send(generate("good", seed=2, max_tokens=400))
        assert good.ids("good") == story(2, 400)
        wait_until(lambda: server.frontend.counters["slow_readers"] == 1, 20)
        wait_until(lambda: not server.engine.running)
        # The last words, and at most what a step or two had under way when it was cut off.
        backlog = sum(c.backlog_bytes for c in server.frontend._clients.values())
        assert backlog < LIMITS.max_backlog_bytes / 10
        message = slow.receive()
        while not isinstance(message, Failed):  # it reads on after all
            message = slow.receive()
        assert (message.request_id, message.code) == ("slow", "cancelled")
        assert "too slowly" in message.message
        slow.send(generate("second", seed=5))
        assert slow.ids("second") == story(5, 5)


def test_a_reader_that_stops_is_cut_off_after_the_time_allowed(tmp_path: Path) -> None:
    limits = FrontendLimits(max_stall_s=0.3)
    with fake_server(f"ipc://{tmp_path}/s", limits=limits) as server:
        with RawClient(server.address, receive_limit=1) as slow:
            slow.ping()
            slow.send(long_request("slow"))
            wait_until(lambda: server.frontend.counters["slow_readers"] == 1, 20)
            wait_until(lambda: not server.engine.running)
        check_served(server)


def test_too_many_requests_at_once_are_refused_as_overload() -> None:
    with fake_server(limits=FrontendLimits(max_requests=3)) as server:
        server.engine.run.clear()
        with RawClient(server.address) as client:
            for i in range(4):
                client.send(generate(f"r{i}"))
            codes = {}
            while "r3" not in codes:
                message = client.receive()
                if isinstance(message, Failed):
                    codes[message.request_id] = message.code
            assert codes == {"r3": "overloaded"}


def test_while_draining_new_requests_are_refused_and_old_ones_go_on() -> None:
    with fake_server(step_s=0.005) as server, RawClient(server.address) as client:
        client.send(generate("old", seed=1, max_tokens=60))
        wait_until(lambda: server.engine.running)
        server.frontend.refuse(ServerUnavailableError("The server is stopping."))
        client.send(generate("new"))
        with pytest.raises(AssertionError, match="The server is stopping"):
            client.ids("new")
        assert client.ids("old")[-1] == story(1, 60)[-1]


def test_fail_all_ends_every_request_with_the_error() -> None:
    with fake_server(step_s=0.005) as server, RawClient(server.address) as client:
        for i in range(3):
            client.send(generate(f"r{i}", max_tokens=None))
        wait_until(lambda: len(server.engine.running) == 3)
        server.frontend.fail_all(WorkerFailedError("Rank 1 was killed."))
        failed: list[tuple[str, str, str]] = []
        while len(failed) < 3:
            message = client.receive()
            if isinstance(message, Failed):
                failed.append((message.request_id, message.code, message.message))
        assert sorted(failed) == [
            (f"r{i}", "worker_failed", "Rank 1 was killed.") for i in range(3)
        ]
        wait_until(lambda: not server.engine.running)
        assert server.frontend.num_requests == 0


def test_what_was_ready_is_sent_before_the_socket_closes() -> None:
    with RawClient_closing() as (client, server):
        server.frontend.fail_all(ServerUnavailableError("The server was stopped."))
        server.frontend.close(1.0)
        message = client.receive()
        while not isinstance(message, Failed):
            message = client.receive()
        assert message.message == "The server was stopped."


class RawClient_closing:  # noqa: N801 - reads as a context in the test above
    """A server with one running request, whose closing is the test's own matter."""

    def __enter__(self) -> tuple[RawClient, FakeServer]:
        self.server = FakeServer(step_s=0.005)
        self.client = RawClient(self.server.address)
        self.client.send(generate("r", max_tokens=None))
        wait_until(lambda: self.server.engine.running)
        return self.client, self.server

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.engine.close()


def test_a_fault_inside_does_not_end_the_thread(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(server.address) as client:
        monkeypatch.setattr(server.frontend, "_info", lambda: 1 / 0)
        client.send(Ping())
        wait_until(lambda: "goes on" in caplog.text)
        monkeypatch.undo()
        assert client.ping().state == "ready"


def frontend(listen: str) -> Frontend:
    return Frontend(listen, None, Inbox(), lambda: pytest.fail("not started"))


def test_addresses_are_bound_first_and_published_as_they_are(tmp_path: Path) -> None:
    opened = [frontend(f"tcp://{host}:0") for host in ("127.0.0.1", "0.0.0.0", "127.0.0.1")]
    ports = {int(f.address.removeprefix("tcp://127.0.0.1:")) for f in opened}
    assert len(ports) == 3
    assert 0 not in ports
    opened.append(frontend(f"ipc://{tmp_path}/a.sock"))
    assert opened[-1].address == f"ipc://{tmp_path}/a.sock"
    for each in opened:
        each.close(0.1)
    assert list(tmp_path.iterdir()) == []


def test_an_address_in_use_or_out_of_reach_is_a_config_error(
    server: FakeServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used \(Address already in use\)"):
        frontend(server.address)
    with pytest.raises(ConfigError, match="cannot be used"):
        frontend("tcp://203.0.113.7:0")
    with pytest.raises(ConfigError, match="is not an address"):
        frontend("localhost:80")
    with pytest.raises(ConfigError, match="has at most 107"):
        frontend(f"ipc://{tmp_path}/{'x' * 120}")


def test_a_unix_socket_in_use_is_not_taken_away_but_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = f"{tmp_path}/s.sock"
    with fake_server(f"ipc://{path}") as server:
        with pytest.raises(ConfigError, match="Another server listens"):
            frontend(f"ipc://{path}")
        check_served(server)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    with fake_server(f"ipc://{path}") as server:
        check_served(server)


def test_a_flood_of_requests_does_not_stop_the_streams_that_run() -> None:
    with fake_server(step_s=0.002) as server, RawClient(server.address) as client:
        client.send(generate("stream", seed=1, max_tokens=100))
        stop = threading.Event()

        def flood() -> None:
            with RawClient(server.address) as other:
                while not stop.is_set():
                    for _ in range(50):
                        other.send(Cancel("nothing"))
                    time.sleep(0.001)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            assert client.ids("stream") == story(1, 100)
        finally:
            stop.set()
            thread.join()
