"""Keepers and workers that only talk: what a group of workers sees of them, without processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tp_runtime.coordinator.event_loop import EventLoop
from tp_runtime.coordinator.failure import Failure
from tp_runtime.coordinator.relay_door import RelayDoor
from tp_runtime.coordinator.worker_group import CacheAgreement, Doors, GroupState, WorkerGroup
from tp_runtime.engine_config import EngineConfig
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    AllocateKV,
    ForkWorker,
    KeeperCommand,
    KeeperHello,
    KeeperMessage,
    KillWorker,
    Pulse,
    WorkerExited,
    WorkerFailed,
    WorkerForked,
    WorkerLoaded,
    WorkerReady,
)
from tp_runtime.transport.fd_socket import FdListener, FdSocket, close_all
from tp_runtime.transport.heartbeat import Heartbeat, Phase


class Recorder:
    """Implements `GroupEvents`."""

    def __init__(self) -> None:
        self.agreements: list[CacheAgreement] = []
        self.failures: list[list[Failure]] = []
        self.causes: list[Failure] = []
        self.progress: list[str] = []
        self.block = ""

    def on_ready(self, agreement: CacheAgreement) -> None:
        self.agreements.append(agreement)

    def on_failed(self, failures: list[Failure]) -> None:
        self.failures.append(failures)

    def on_all_killed(self, cause: Failure) -> None:
        self.causes.append(cause)

    def on_progress(self, text: str) -> None:
        self.progress.append(text)

    def on_over(self, block: str) -> None:
        self.block = block


class FakeKeeper:
    """One rank's keeper and, after a fork, its worker."""

    def __init__(
        self, path: Path, rank: int, size: int, local_rank: int | None = None, version: int = 0
    ) -> None:
        self.rank = rank
        self.local_rank = rank if local_rank is None else local_rank
        self.generation = 0
        self.status: FdSocket[AllocateKV] | None = None
        self.heartbeat: Heartbeat | None = None
        self.socket: FdSocket[KeeperCommand] = FdSocket.connect(path, KeeperCommand)
        self.socket.setblocking(False)
        version = version or PROTOCOL_VERSION
        self.socket.send(KeeperHello(version, rank, self.local_rank, size, os.getpid(), "here"))

    def next(self) -> KeeperCommand | None:
        """The next command, obeyed as far as descriptors go."""
        received = self.socket.receive()
        while received is not None and isinstance(received[0], Pulse):
            received = self.socket.receive()
        if received is None:
            return None
        command, fds = received
        if isinstance(command, ForkWorker):
            self.drop_worker()
            self.generation = command.generation
            self.status = FdSocket(socket.socket(fileno=fds[5]), AllocateKV)
            self.status.setblocking(False)
            self.heartbeat = Heartbeat(fds[4])
            close_all(fds[:4])
            self.socket.send(WorkerForked(self.generation, 1000 + self.rank))
        return command

    def load(self, digest: str = "same", blocks: int = 10, block_size: int = 16) -> None:
        assert self.status is not None
        self.status.send(
            WorkerLoaded(self.rank, digest, 100, blocks, block_size, 4096, "reference")
        )

    def ready(self) -> None:
        assert self.status is not None
        self.status.send(WorkerReady(self.rank, [1, 2], 3))

    def beat(self, step: int, phase: Phase) -> None:
        assert self.heartbeat is not None
        self.heartbeat.beat(self.local_rank, step, phase)

    def raise_error(self, error: str, step: int = 3) -> None:
        assert self.status is not None
        self.status.send(WorkerFailed(self.rank, "run", step, error, "Traceback: " + error))

    def exit(self, status: int) -> None:
        self.drop_worker()
        self.socket.send(WorkerExited(self.generation, 1000 + self.rank, status))

    def drop_worker(self) -> None:
        if self.status is not None and self.heartbeat is not None:
            self.status.close()
            self.heartbeat.close()
            self.status = self.heartbeat = None

    def close(self) -> None:
        self.drop_worker()
        self.socket.close()


class GroupUnderTest:
    """A group, its loop, and keepers that obey it as far as a test lets them."""

    def __init__(
        self,
        folder: Path,
        size: int = 2,
        restarts: int | None = 0,
        others: bool = False,
        **settings,
    ) -> None:
        """`others`: rank 0 alone is on this host, the rest come through the door for relays."""
        settings = {"start_timeout_s": 30.0, **settings}
        self.config = EngineConfig(model="unused", tensor_parallel_size=size, **settings)
        self.path = folder / "keepers.sock"
        self.listener: FdListener[KeeperMessage] = FdListener(self.path, KeeperMessage)
        self.loop = EventLoop()
        self.events = Recorder()
        self.door = RelayDoor("127.0.0.1", self.config) if others else None
        doors = Doors(self.listener, 1 if others else size, self.door, restarts)
        self.group = WorkerGroup(self.config, doors, self.loop, self.events)
        self.keepers: list[FakeKeeper] = []

    def connect(self) -> None:
        for rank in range(self.group.size):
            self.keepers.append(FakeKeeper(self.path, rank, self.group.size))
        self.expect(ForkWorker)

    def start(self) -> None:
        """All the way to READY."""
        self.connect()
        self.become_ready()

    def become_ready(self) -> None:
        for keeper in self.keepers:
            keeper.load()
        self.until(lambda: all(k.status and k.status.receive() for k in self.keepers[-1:]))
        for keeper in self.keepers:
            keeper.ready()
        self.until(lambda: self.group.state is GroupState.READY)

    def expect(self, kind: type, ranks: list[int] | None = None) -> list[KeeperCommand]:
        """That each of these keepers gets a command of this kind next."""
        got: dict[int, KeeperCommand] = {}
        wanted = [k for k in self.keepers if ranks is None or k.rank in ranks]

        def arrived() -> bool:
            for keeper in wanted:
                if keeper.rank not in got and (command := keeper.next()) is not None:
                    got[keeper.rank] = command
            return len(got) == len(wanted)

        self.until(arrived)
        assert {type(command) for command in got.values()} == {kind}, got
        return list(got.values())

    def killed(self, ranks: list[int] | None = None) -> None:
        """The group kills these; they end."""
        self.expect(KillWorker, ranks)
        for keeper in self.keepers:
            if ranks is None or keeper.rank in ranks:
                keeper.exit(-9)

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.group.state, self.events.__dict__)
            self.turn()

    def turn(self) -> None:
        self.group.tick()
        self.loop.turn(0.005)

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.close()
        self.listener.close()
        if self.door is not None:
            self.door.close()
        self.loop.close()
