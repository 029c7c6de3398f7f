"""The keepers and workers of this very host: unix sockets, shared memory, descriptors.

Used by the coordinator for its own host, and by a relay (coordinator.relay), which imitates the
coordinator for the keepers of another one. It decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time

from tp_runtime.coordinator.host import HostEvents
from tp_runtime.coordinator.host_memory import HostMemory
from tp_runtime.errors import ProtocolError, ServerUnavailableError
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    AllocateKV,
    ForkWorker,
    KeeperCommand,
    KeeperHello,
    KeeperMessage,
    KillWorker,
    Pulse,
    Quit,
    WorkerExited,
    WorkerFailed,
    WorkerForked,
)
from tp_runtime.transport.fd_socket import FdListener, FdSocket
from tp_runtime.transport.heartbeat import Beat, Phase
from tp_runtime.transport.loop_socket import Watcher

logger = logging.getLogger(__name__)

PULSE_S = 1.0


class LocalHost:
    """Implements `Host`. `memory` is that of the generation in use, None between two."""

    def __init__(
        self,
        listener: FdListener[KeeperMessage],
        watcher: Watcher,
        events: HostEvents,
        ranks: range,
        world_size: int,
        traced: bool = False,
    ) -> None:
        self.ranks = ranks
        self.name = socket.gethostname()
        self.memory: HostMemory | None = None
        self._next_pulse = 0.0
        self._world_size = world_size
        self._traced = traced
        self._listener = listener
        self._watcher = watcher
        self._events = events
        self._keepers: dict[int, FdSocket[KeeperMessage]] = {}
        listener.setblocking(False)
        watcher.watch(listener.fileno(), self._accept)

    # ------------------------------------------------------------ keepers

    def _accept(self) -> None:
        keeper = self._listener.accept()
        if keeper is None:
            return
        keeper.setblocking(False)
        self._watcher.watch(keeper.fileno(), lambda: self._from_stranger(keeper))

    def _from_stranger(self, keeper: FdSocket[KeeperMessage]) -> None:
        """The first message of a connection says which rank it keeps."""
        try:
            received = keeper.receive()
        except ProtocolError as error:
            logger.warning("Somebody at the door for keepers was turned away: %s", error)
            received = None
        else:
            if received is None and not keeper.closed_by_peer:
                return
        self._watcher.unwatch(keeper.fileno())
        hello = received[0] if received is not None else None
        if not isinstance(hello, KeeperHello) or not self._welcome(hello, keeper):
            keeper.close()

    def _welcome(self, hello: KeeperHello, keeper: FdSocket[KeeperMessage]) -> bool:
        problem = self._problem_of(hello)
        if problem:
            logger.error(problem)
            with contextlib.suppress(ServerUnavailableError):
                keeper.send(Quit(1, problem))
            return False
        rank = hello.rank
        self._keepers[rank] = keeper
        self._watcher.watch(keeper.fileno(), lambda: self._from_keeper(rank))
        self._events.on_keeper(self, rank)
        return True

    def _problem_of(self, hello: KeeperHello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return (
                f"Rank {hello.rank} speaks protocol {hello.version}, the coordinator "
                f"{PROTOCOL_VERSION}; install the same tp_runtime everywhere."
            )
        if hello.world_size != self._world_size:
            return (
                f"Rank {hello.rank} is one of {hello.world_size}; this server has "
                f"{self._world_size}."
            )
        if hello.rank not in self.ranks:
            return (
                f"Rank {hello.rank} does not belong to {self.name}, which has ranks "
                f"{self.ranks.start} to {self.ranks.stop - 1} of this server; stop every torchrun "
                "of it and start them again."
            )
        if hello.rank in self._keepers:
            return f"There is a keeper of rank {hello.rank} already."
        return ""

    def _from_keeper(self, rank: int) -> None:
        keeper = self._keepers.get(rank)
        while keeper is not None and self._keepers.get(rank) is keeper:
            try:
                received = keeper.receive()
            except ProtocolError as error:
                logger.error("The keeper of rank %d is ended: %s", rank, error)
                self.kill_keeper(rank)  # its end is noticed as any other
                return
            if received is None:
                if keeper.closed_by_peer:
                    self._forget(rank)
                    self._events.on_keeper_lost(rank)
                return
            message = received[0]
            if isinstance(message, WorkerExited):
                self._from_worker(rank)  # what it said before its end comes first
            if isinstance(message, WorkerForked | WorkerExited):
                self._events.on_rank(rank, message)

    def _forget(self, rank: int) -> None:
        keeper = self._keepers.pop(rank)
        self._watcher.unwatch(keeper.fileno())
        keeper.close()

    def _command(self, rank: int, message: KeeperCommand, fds: tuple[int, ...] = ()) -> None:
        keeper = self._keepers.get(rank)
        if keeper is not None:
            with contextlib.suppress(ServerUnavailableError):
                keeper.send(message, fds)  # its end shows as an end of file on our side

    # ------------------------------------------------------------ Host

    def fork(self, generation: int) -> None:
        self.release()
        self.memory = HostMemory.create(len(self.ranks), self._traced)
        for rank, worker in zip(self.ranks, self.memory.workers, strict=True):
            self._watch_worker(rank, worker.status.fileno())
            self._command(rank, ForkWorker(generation), tuple(worker.descriptors))
            worker.sent()

    def _watch_worker(self, rank: int, status_fd: int) -> None:
        self._watcher.watch(status_fd, lambda: self._from_worker(rank))

    def _from_worker(self, rank: int) -> None:
        memory = self.memory
        if memory is None:
            return
        status = memory.workers[rank - self.ranks.start].status
        while self.memory is memory:  # what it says may end the generation
            try:
                received = status.receive()
            except ProtocolError as error:
                self._watcher.unwatch(status.fileno())
                beat = self.beat(rank)
                phase, code = beat.phase.name.lower(), error.code
                self._events.on_rank(
                    rank, WorkerFailed(rank, phase, beat.step, str(error), "", code)
                )
                return
            if received is None:
                if status.closed_by_peer:
                    self._watcher.unwatch(status.fileno())
                return
            self._events.on_rank(rank, received[0])

    def kill(self, generation: int) -> None:
        for rank in self.ranks:
            self._command(rank, KillWorker(generation))

    def allocate(self, num_blocks: int) -> None:
        if self.memory is None:
            return
        for worker in self.memory.workers:
            with contextlib.suppress(ServerUnavailableError):
                worker.status.send(AllocateKV(num_blocks))

    def publish(self, plan: bytes, timeout_s: float) -> None:
        if self.memory is not None:
            self.memory.plans.write(plan, timeout_s)

    def beat(self, rank: int) -> Beat:
        if self.memory is None:
            return Beat(0, Phase.START, float("inf"))
        return self.memory.heartbeat.read(rank - self.ranks.start)

    def release(self) -> None:
        if self.memory is None:
            return
        for worker in self.memory.workers:
            self._watcher.unwatch(worker.status.fileno())
        self.memory.close()
        self.memory = None

    def pulse(self) -> None:
        """Shows the keepers, once in a while, that this process is neither stopped nor stuck."""
        now = time.monotonic()
        if now < self._next_pulse:
            return
        self._next_pulse = now + PULSE_S
        for rank in list(self._keepers):
            with contextlib.suppress(BlockingIOError):  # a stopped keeper reads nothing
                self._command(rank, Pulse())

    def kill_keeper(self, rank: int) -> None:
        """By the kernel, for one that does not do as told. Its end shows as an end of file."""
        keeper = self._keepers.get(rank)
        if keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper.peer_pid(), signal.SIGKILL)

    def drop_keepers(self, status: int) -> None:
        for rank in list(self._keepers):
            self._command(rank, Quit(status))
            self._forget(rank)

    def quit(self, status: int, message: str) -> None:
        for rank in list(self._keepers):
            self._command(rank, Quit(status, message))
