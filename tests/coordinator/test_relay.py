"""A relay between the coordinator's group of workers and keepers that only talk."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import msgspec
import pytest
import zmq

from tests.coordinator.fake_keepers import FakeKeeper, GroupUnderTest
from tp_runtime.coordinator import relay as relay_module
from tp_runtime.coordinator import relay_door
from tp_runtime.coordinator.relay import Relay
from tp_runtime.coordinator.relay_door import shared_settings
from tp_runtime.coordinator.worker_group import GroupState
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    ForkWorker,
    HostBeats,
    KeeperHere,
    KeeperMessage,
    KillWorker,
    Quit,
    RelayCommand,
    RelayHello,
    encode,
)
from tp_runtime.run_folder import RunFolder
from tp_runtime.transport.fd_socket import FdListener
from tp_runtime.transport.heartbeat import Phase
from tp_runtime.transport.numbered_stream import NumberedStream
from tp_runtime.transport.signal_pipe import SignalPipe
from tp_runtime.transport.trace_area import SpanKind, TraceArea


class TwoHosts(GroupUnderTest):
    """Rank 0 is on the coordinator's host; the rest is behind a relay."""

    def __init__(self, path, **settings) -> None:
        self.relay: Relay | None = None
        (path / "here").mkdir()
        super().__init__(path / "here", others=True, **settings)
        self.folder = RunFolder(path / "there").create()
        self.relay_listener = FdListener[KeeperMessage](self.folder.keepers_socket, KeeperMessage)
        self.signals = SignalPipe({signal.SIGUSR1})
        self.life, self.launcher = os.pipe()

    def open_relay(self, **other_settings) -> None:
        self.relay = Relay(
            msgspec.structs.replace(self.config, **other_settings),
            range(1, self.group.size),
            "127.0.0.1",
            self.door.key,
            self.relay_listener,
            self.folder,
            self.life,
            self.signals,
        )

    def connect(self) -> None:
        if self.relay is None:
            self.open_relay()
        self.keepers.append(FakeKeeper(self.path, 0, self.group.size))
        for rank in range(1, self.group.size):
            there = self.folder.keepers_socket
            self.keepers.append(FakeKeeper(there, rank, self.group.size, local_rank=rank - 1))
        self.expect(ForkWorker)

    def turn(self) -> None:
        super().turn()
        if self.relay is not None and self.relay._status is None:
            self.relay.turn(0.002)

    def close(self) -> None:
        super().close()
        if self.relay is not None:
            self.relay.close()
        self.relay_listener.close()
        self.signals.close()
        os.close(self.life)
        with contextlib.suppress(OSError):
            os.close(self.launcher)


@pytest.fixture
def make(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    made = []

    def build(**settings) -> TwoHosts:
        made.append(TwoHosts(tmp_path, **settings))
        return made[-1]

    yield build
    for hosts in made:
        hosts.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, before)


def test_ranks_of_another_host_start_fail_and_come_back_like_those_of_this_one(make):
    hosts = make(size=3)
    hosts.start()
    assert hosts.events.agreements[0].num_parameters == 300
    assert [place.pid for place in hosts.group.generation.places] == [1000, 1001, 1002]
    hosts.keepers[2].raise_error("CUDA out of memory", step=9)
    hosts.keepers[2].exit(1)
    hosts.killed([0, 1])
    hosts.expect(KillWorker, [2])
    (failure,) = hosts.events.failures[0]
    assert (failure.rank, failure.step, failure.details) == (2, 9, "Traceback: CUDA out of memory")
    hosts.expect(ForkWorker)
    hosts.become_ready()
    assert hosts.group.restarts == 1


def test_plans_reach_the_ring_of_the_other_host_whole_and_in_order(make):
    hosts = make()
    hosts.start()
    plans = [bytes([i]) * (1 + i * 40_000) for i in range(20)]
    there = hosts.relay._host.memory.plans
    written: list[bytes] = []
    write, there.write = there.write, lambda plan, timeout_s: written.append(plan)
    for plan in plans:
        hosts.group.generation.plans._hosts[0].publish(plan, 1.0)
    hosts.until(lambda: len(written) == len(plans))
    there.write = write
    assert written == plans


def test_heartbeats_of_the_other_host_reach_the_report_of_a_hang(make):
    hosts = make(size=3)
    hosts.start()
    for keeper, step in zip(hosts.keepers, (9, 8, 9), strict=True):
        keeper.beat(step, Phase.RUN)
    hosts.until(lambda: hosts.door.hosts[0].beat(2).step == 9)
    assert hosts.group.slowest_rank() == 1
    hosts.group.fail_hung(1, 7.0)
    (failure,) = hosts.events.failures[0]
    assert (failure.phase, failure.step) == ("run", 8)


def test_a_signal_of_the_other_host_reaches_the_coordinator(make):
    hosts = make()
    hosts.start()
    seen: list[int] = []
    # Both ends live in this process: what the relay takes first, the door sends to us again.
    os.kill(os.getpid(), signal.SIGUSR1)
    take = hosts.signals.take
    hosts.signals.take = lambda: seen.extend(found := take()) or (found if len(seen) == 1 else [])
    hosts.until(lambda: len(seen) == 2)


def test_a_keeper_lost_there_is_the_end_and_the_reason_is_told_on_both_hosts(make):
    hosts = make()
    hosts.start()
    hosts.keepers.pop(1).close()
    hosts.killed([0])
    hosts.until(lambda: hosts.group.state is GroupState.OVER)
    assert "Rank 1: its keeper process is gone" in hosts.events.block
    hosts.group.quit(1)
    hosts.until(lambda: hosts.relay._status is not None)
    assert hosts.folder.read_failure().message == hosts.events.block


def test_new_keepers_find_the_relay_that_lives_on(make):
    hosts = make(restarts=1)
    hosts.start()
    hosts.keepers.pop(0).close()
    hosts.killed([1])
    hosts.expect(Quit)
    hosts.keepers.pop().close()
    hosts.start()
    assert hosts.group.generation.number == 2


def test_the_end_of_the_launcher_there_is_told_at_once(make):
    hosts = make()
    hosts.start()
    os.close(hosts.launcher)
    hosts.until(lambda: bool(hosts.events.failures), seconds=1.0)
    assert "its launcher (torchrun) is gone" in hosts.events.failures[0][0].error
    (quit,) = hosts.expect(Quit, [1])
    assert quit.status == 1


def test_at_the_end_of_the_coordinator_the_relay_goes_and_the_keepers_wait_for_the_next(make):
    hosts = make()
    hosts.start()
    hosts.group.tick = lambda: None
    hosts.door.close()
    hosts.door = None
    hosts.until(lambda: hosts.relay._status == relay_module.COORDINATOR_LOST)
    assert hosts.keepers[1].next() is None  # not told to quit
    assert hosts.folder.read_failure() is None


def test_silence_of_either_side_counts_as_its_loss(make, monkeypatch):
    monkeypatch.setattr(relay_door, "SILENCE_S", 0.4)
    monkeypatch.setattr(relay_module, "PATIENCE_S", 0.8)
    hosts = make()
    hosts.start()
    relay, hosts.relay = hosts.relay, None  # its loop does not turn any more
    hosts.until(lambda: bool(hosts.events.failures), seconds=3.0)
    assert "nothing was heard from it" in hosts.events.failures[0][0].error
    hosts.relay = relay
    hosts.group.tick = lambda: None  # and now ours
    relay._ticked = relay._heard = time.monotonic()
    hosts.until(lambda: relay._status is not None)


def test_other_settings_are_refused_by_name(make):
    hosts = make(max_num_seqs=8)
    hosts.open_relay(max_num_seqs=16, model="another path is no difference")
    hosts.until(lambda: hosts.relay._status == 1)
    message = hosts.folder.read_failure().message
    assert "was started with other settings: max_num_seqs 16 (here 8)" in message
    assert hosts.door.hosts == []


class Stranger:
    """A peer at the door that knows more or less of what it should."""

    def __init__(self, hosts: TwoHosts) -> None:
        self._hosts = hosts
        key = hosts.door.key
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{key.port}")
        self.stream = NumberedStream(bytes.fromhex(key.run_id))

    def hello(self, **fields) -> None:
        wanted = {
            "version": PROTOCOL_VERSION,
            "token": self._hosts.door.key.token,
            "host": "there",
            "first_rank": 1,
            "num_ranks": 1,
            "settings": shared_settings(self._hosts.config),
        }
        self.send(RelayHello(**{**wanted, **fields}))

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send_multipart([self.stream.stamp(), encode(message)])

    def answer(self) -> RelayCommand | None:
        """None when there is none within a moment."""
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            self._hosts.turn()
            if self._socket.poll(0):
                return msgspec.msgpack.decode(self._socket.recv_multipart()[1], type=RelayCommand)
        return None

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def stranger(make):
    made = Stranger(make())
    yield made
    made.close()


def test_who_does_not_know_the_token_gets_no_answer(stranger):
    stranger.hello(token="0" * 32)
    assert stranger.answer() is None
    stranger.send(KeeperHere(1))
    assert stranger.answer() is None
    assert stranger._hosts.door.hosts == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 77}, "install the same tp_runtime everywhere"),
        ({"first_rank": 0}, "not free"),
        ({"num_ranks": 5}, "not free"),
        ({"num_ranks": 0}, "not free"),
    ],
)
def test_a_relay_that_does_not_fit_is_told_why(stranger, fields, why):
    stranger.hello(**fields)
    quit = stranger.answer()
    assert isinstance(quit, Quit)
    assert why in quit.message
    assert stranger._hosts.door.hosts == []


@pytest.mark.parametrize("fault", ["gap", "foreign rank", "out of place", "garbage", "other run"])
def test_a_relay_that_breaks_the_protocol_is_given_up(stranger, fault):
    hosts = stranger._hosts
    stranger.hello()
    stranger.send(KeeperHere(1))
    hosts.until(lambda: 1 in hosts.group._hosts)
    if fault == "gap":
        stranger.stream.stamp()
        stranger.send(HostBeats([(1, 1, 0.0)]))
    elif fault == "foreign rank":
        stranger.send(KeeperHere(0))
    elif fault == "out of place":
        stranger.hello()
    elif fault == "garbage":
        stranger._socket.send_multipart([stranger.stream.stamp(), b"\xc1"])
    else:
        stranger.stream = NumberedStream(b"another!")
        stranger.send(HostBeats([(1, 1, 0.0)]))
    hosts.until(lambda: bool(hosts.events.failures))
    assert "Rank 1" in str(hosts.events.failures) or hosts.events.failures[0][0].rank == 1
    assert hosts.door.hosts == []


def test_under_trace_the_relay_sends_what_its_ranks_did_each_span_once(make):
    hosts = make(size=3, trace="unused")
    hosts.start()
    areas = {
        keeper.rank: TraceArea.of_rank(keeper.heartbeat.fd, keeper.local_rank)
        for keeper in hosts.keepers[1:]
    }
    arrived = hosts.door.spans
    now = time.monotonic_ns()
    for step in (1, 2):
        for rank, area in areas.items():
            area.span(SpanKind.RUN, step, now - 5000 + rank, now)
        if step == 1:
            hosts.until(lambda: all(list(arrived.spans(1, rank)) for rank in (1, 2)))
    hosts.group.quit(0)
    hosts.until(lambda: hosts.relay._status is not None)
    hosts.door.wait_for_last_spans(5.0)
    for rank in (1, 2):
        spans = list(arrived.spans(1, rank))
        assert [(span.kind, span.step) for span in spans] == [(SpanKind.RUN, 1), (SpanKind.RUN, 2)]
        assert all(span.end - span.start == 5000 - rank for span in spans)
        assert 0 <= spans[0].end - now < 1e9  # one clock here: off by the way of the message
    assert arrived.complete({1, 2})
