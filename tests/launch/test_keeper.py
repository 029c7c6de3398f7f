"""A keeper and its worker, with this test as the coordinator and as the launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tp_runtime.engine_config import EngineConfig
from tp_runtime.launch import exit_status
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    ForkWorker,
    KeeperHello,
    KeeperMessage,
    KillWorker,
    Quit,
    WorkerExited,
    WorkerForked,
)
from tp_runtime.run_folder import ProcessId, RunFolder
from tp_runtime.transport.fd_socket import FdListener

PROGRAM = Path(__file__).with_name("keeper_program.py")
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}


class KeeperUnderTest:
    """The keeper process, its connection, and what its workers say."""

    def __init__(self, folder: RunFolder, *arguments: str, parent: list[str] | None = None) -> None:
        self.listener = FdListener[KeeperMessage](folder.keepers_socket, KeeperMessage)
        folder.write_config(EngineConfig(model="unused", drain_timeout_s=0.3))
        command = [sys.executable, str(PROGRAM), str(folder.path), str(os.getpid()), *arguments]
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.connection = self.listener.accept()
        self.hello = self.receive(KeeperHello)

    def receive(self, kind):
        received = self.connection.receive()
        assert received is not None, self.process.stderr.read()
        assert isinstance(received[0], kind)
        return received[0]

    def fork(self, generation: int = 1) -> tuple[socket.socket, dict]:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes = [os.memfd_create(f"fd{i}") for i in range(5)]
        self.connection.send(ForkWorker(generation), (*pipes, theirs.fileno()))
        theirs.close()
        for fd in pipes:
            os.close(fd)
        forked = self.receive(WorkerForked)
        assert forked.generation == generation
        facts = json.loads(mine.recv(10000))
        assert facts["pid"] == forked.pid
        return mine, facts

    def wait(self) -> int:
        return self.process.wait(5)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


@pytest.fixture
def folder():
    folder = RunFolder.for_owner(ProcessId.current(), "keeper-test").create()
    yield folder
    folder.remove()


@pytest.fixture
def keeper(folder):
    keeper = KeeperUnderTest(folder)
    yield keeper
    keeper.close()


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def test_hello_says_who_it_is(keeper):
    assert keeper.hello.version == PROTOCOL_VERSION
    assert (keeper.hello.rank, keeper.hello.world_size) == (0, 1)
    assert keeper.hello.pid == keeper.process.pid


def test_a_worker_is_born_with_its_descriptors_and_nothing_else(keeper):
    worker, facts = keeper.fork(7)
    assert (facts["rank"], facts["generation"]) == (0, 7)
    assert facts["stdin"] == os.devnull
    assert facts["ignores"] == [True, True]
    assert int(facts["omp"]) >= 1
    assert facts["session"]  # the elastic agent's killpg reaches it with its keeper
    listing = 1  # os.listdir's own descriptor
    assert len(facts["open"]) == len({0, 1, 2, *facts["given"]}) + listing
    worker.close()


def test_a_worker_that_exits_is_reported_with_its_status(keeper):
    worker, facts = keeper.fork()
    worker.send(b"exit 5")
    assert keeper.receive(WorkerExited) == WorkerExited(1, facts["pid"], 5)


def test_a_worker_that_raises_exits_with_one_and_shows_its_traceback(keeper):
    worker, _ = keeper.fork()
    worker.send(b"a planted failure")
    assert keeper.receive(WorkerExited).status == 1
    keeper.connection.send(Quit(0))
    keeper.wait()
    assert "RuntimeError: a planted failure" in keeper.process.stderr.read()


def test_a_killed_worker_is_reported_with_its_signal_and_the_next_one_forked(keeper):
    _, first = keeper.fork(1)
    keeper.connection.send(KillWorker(1))
    assert keeper.receive(WorkerExited) == WorkerExited(1, first["pid"], -signal.SIGKILL)
    _, second = keeper.fork(2)
    assert second["pid"] != first["pid"]


def test_killing_an_older_generation_leaves_the_worker_alone(keeper):
    keeper.fork(1)
    keeper.connection.send(KillWorker(1))
    keeper.receive(WorkerExited)
    worker, facts = keeper.fork(2)
    keeper.connection.send(KillWorker(1))
    worker.send(b"exit 3")
    assert keeper.receive(WorkerExited) == WorkerExited(2, facts["pid"], 3)


def test_a_fork_while_a_worker_lives_replaces_it(keeper):
    _, first = keeper.fork(1)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.connection.send(ForkWorker(2), (theirs.fileno(),) * 6)
    assert keeper.receive(WorkerExited) == WorkerExited(1, first["pid"], -signal.SIGKILL)
    assert keeper.receive(WorkerForked).generation == 2
    mine.close()
    theirs.close()


def test_quit_kills_the_worker_and_gives_the_status(keeper):
    _, facts = keeper.fork()
    keeper.connection.send(Quit(1, "Rank 0 failed: a planted cause."))
    assert keeper.wait() == 1
    assert gone_within(facts["pid"], 0.0)
    assert "a planted cause" in keeper.process.stderr.read()


def test_the_end_of_the_coordinator_ends_keeper_and_worker(keeper):
    _, facts = keeper.fork()
    keeper.connection.close()
    assert keeper.wait() == exit_status.COORDINATOR_LOST
    assert gone_within(facts["pid"], 0.0)


def test_kill_minus_nine_of_the_keeper_takes_its_worker_along(keeper):
    _, facts = keeper.fork()
    keeper.process.kill()
    assert gone_within(facts["pid"], 1.0)


def test_a_keeper_with_another_thread_refuses_to_fork_and_says_which(folder):
    keeper = KeeperUnderTest(folder, "thread")
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.connection.send(ForkWorker(1), (theirs.fileno(),) * 6)
    assert keeper.wait() == exit_status.NOT_FORKABLE
    assert "thread" in folder.read_failure().message
    mine.close()
    theirs.close()
    keeper.close()


def test_sigterm_waits_for_the_coordinator_and_sigint_hardly(folder):
    for signum, at_most in ((signal.SIGTERM, 4.0), (signal.SIGINT, 2.0)):
        # The keeper signals its coordinator, which is this process.
        noted = []
        before = signal.signal(signum, lambda number, frame, noted=noted: noted.append(number))
        keeper = KeeperUnderTest(folder)
        _, facts = keeper.fork()
        try:
            started = time.monotonic()
            keeper.process.send_signal(signum)
            assert keeper.wait() == exit_status.OK
            assert 0.5 < time.monotonic() - started < at_most
            assert noted == [signum]
            assert gone_within(facts["pid"], 0.0)
        finally:
            signal.signal(signum, before)
            keeper.close()


def test_a_second_signal_ends_the_keeper_at_once_but_not_an_echo_of_the_first(folder):
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    keeper = KeeperUnderTest(folder)
    try:
        keeper.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        keeper.process.send_signal(signal.SIGTERM)
        time.sleep(0.6)
        assert keeper.process.poll() is None
        keeper.process.send_signal(signal.SIGTERM)
        assert keeper.wait() == exit_status.of_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        keeper.close()


def test_the_end_of_the_launcher_ends_the_keeper_though_its_own_parent_lives(folder):
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listener = FdListener[KeeperMessage](folder.keepers_socket, KeeperMessage)
    folder.write_config(EngineConfig(model="unused"))
    keeper = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder.path), str(agent.pid)], env=ENVIRONMENT
    )
    connection = listener.accept()
    connection.receive()
    agent.kill()
    agent.wait()
    assert keeper.wait(2) == exit_status.LAUNCHER_LOST
    connection.close()
    listener.close()
