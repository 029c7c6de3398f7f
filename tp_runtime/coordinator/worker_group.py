"""The workers of a server, through their keepers: fork, handshake, watch, kill, fork again.

One-for-all supervision: when any worker fails, all are killed and a new generation is forked. The
group decides nothing about requests; it tells its owner through `GroupEvents`.

Everything here runs on the engine's thread; descriptors are watched through a `Watcher`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tp_runtime.coordinator.failure import GRACE_S, Failure, Kind, report
from tp_runtime.coordinator.generation import Generation, WorkerPlace
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ServerUnavailableError
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    AllocateKV,
    ForkWorker,
    KeeperHello,
    KeeperMessage,
    KillWorker,
    Quit,
    WorkerExited,
    WorkerFailed,
    WorkerForked,
    WorkerLoaded,
    WorkerProgress,
    WorkerReady,
    WorkerStatus,
)
from tp_runtime.transport.fd_socket import FdListener, FdSocket
from tp_runtime.transport.heartbeat import Phase

logger = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0
"""A killed process that has not been reaped by then is stuck in the kernel; nothing helps it."""


class GroupState(enum.Enum):
    """Where the group stands. OVER: given up, no generation will follow."""

    WAITING_FOR_KEEPERS = "waiting for keepers"
    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"
    KILLING = "killing"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True)
class CacheAgreement:
    """What the ranks agreed on: blocks (the minimum of all ranks) and their size in tokens."""

    num_blocks: int
    block_size: int
    attention_backend: str
    graph_sizes: tuple[int, ...]
    num_parameters: int


class Watcher(Protocol):
    """Calls back on the engine's thread when a descriptor is readable."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class GroupEvents(Protocol):
    """What the owner of the group is told."""

    def on_ready(self, agreement: CacheAgreement) -> None: ...

    def on_failed(self, failures: list[Failure]) -> None:
        """Workers are being killed; nothing of the generation can be used any more."""

    def on_progress(self, text: str) -> None: ...

    def on_over(self, block: str) -> None:
        """Given up; `block` is the report for the terminal."""


class WorkerGroup:
    """See the module's docstring. `generation` is the one in use, None before the first."""

    def __init__(
        self,
        config: EngineConfig,
        listener: FdListener[KeeperMessage],
        watcher: Watcher,
        events: GroupEvents,
    ) -> None:
        self._config = config
        self._listener = listener
        self._watcher = watcher
        self._events = events
        self._keepers: dict[int, FdSocket[KeeperMessage]] = {}
        self._failures: list[Failure] = []
        self._restarts: deque[float] = deque()
        self._since = time.monotonic()
        self._number = 0
        self.state = GroupState.WAITING_FOR_KEEPERS
        self.generation: Generation | None = None
        self.restarts = 0
        listener.setblocking(False)
        watcher.watch(listener.fileno(), self._accept)

    @property
    def size(self) -> int:
        return self._config.tensor_parallel_size

    # ------------------------------------------------------------ keepers

    def _accept(self) -> None:
        keeper = self._listener.accept()
        if keeper is None:
            return
        keeper.setblocking(False)
        self._watcher.watch(keeper.fileno(), lambda: self._from_stranger(keeper))

    def _from_stranger(self, keeper: FdSocket[KeeperMessage]) -> None:
        """The first message of a connection says which rank it keeps."""
        received = keeper.receive()
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
        if len(self._keepers) == self.size and self.state is GroupState.WAITING_FOR_KEEPERS:
            self._fork_all()
        return True

    def _problem_of(self, hello: KeeperHello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return (
                f"Rank {hello.rank} speaks protocol {hello.version}, the coordinator "
                f"{PROTOCOL_VERSION}; install the same tp_runtime everywhere."
            )
        if hello.world_size != self.size:
            return f"Rank {hello.rank} is one of {hello.world_size}; this server has {self.size}."
        if hello.rank in self._keepers or not 0 <= hello.rank < self.size:
            return f"There is a keeper of rank {hello.rank} already, or no such rank."
        return ""

    def _from_keeper(self, rank: int) -> None:
        keeper = self._keepers.get(rank)
        while keeper is not None and rank in self._keepers:
            received = keeper.receive()
            if received is None:
                if keeper.closed_by_peer:
                    self._keeper_lost(rank)
                return
            message = received[0]
            if isinstance(message, WorkerForked):
                self._forked(rank, message)
            elif isinstance(message, WorkerExited):
                self._exited(rank, message)

    def _forked(self, rank: int, message: WorkerForked) -> None:
        if (place := self._place(rank, message.generation)) is not None:
            place.pid = message.pid

    def _exited(self, rank: int, message: WorkerExited) -> None:
        place = self._place(rank, message.generation)
        if place is None:
            return
        place.pid, place.exit_status = message.pid, message.status
        if self.state is GroupState.KILLING:
            self._advance_killing()
        elif self.state not in (GroupState.OVER, GroupState.STOPPING):
            self._from_worker(rank)  # what it said before its end is the better report
            if all(f.rank != rank for f in self._failures):
                phase, step = self._progress_of(rank)
                self._fail(Failure.exited(rank, phase, step, message.status))

    def _keeper_lost(self, rank: int) -> None:
        keeper = self._keepers.pop(rank)
        self._watcher.unwatch(keeper.fileno())
        keeper.close()
        if self.generation is not None and (place := self.generation.places[rank]):
            place.exit_status = place.exit_status if place.exit_status is not None else -9
        if self.state in (GroupState.OVER, GroupState.STOPPING):
            return
        phase, step = self._progress_of(rank)
        self._fail(Failure(Kind.KEEPER_LOST, rank, phase, step, "its keeper process is gone"))

    # ------------------------------------------------------------ start

    def _fork_all(self) -> None:
        self._number += 1
        self._failures = []
        self.generation = Generation.create(
            self._number, self.size, traced=bool(self._config.trace)
        )
        self._enter(GroupState.STARTING)
        for place in self.generation.places:
            self._watcher.watch(
                place.status.fileno(), lambda rank=place.rank: self._from_worker(rank)
            )
            self._command(place.rank, ForkWorker(self._number), tuple(place.descriptors))
            self.generation.sent(place.rank)

    def _command(
        self, rank: int, message: ForkWorker | KillWorker | Quit, fds: tuple[int, ...] = ()
    ) -> None:
        keeper = self._keepers.get(rank)
        if keeper is None:
            return
        with contextlib.suppress(ServerUnavailableError):
            keeper.send(message, fds)  # its end shows as an end of file on our side

    def _from_worker(self, rank: int) -> None:
        generation = self.generation
        if generation is None:
            return
        place = generation.places[rank]
        while True:
            received = place.status.receive()
            if received is None:
                if place.status.closed_by_peer:
                    self._watcher.unwatch(place.status.fileno())
                return
            self._on_status(place, received[0])

    def _on_status(self, place: WorkerPlace, message: WorkerStatus) -> None:
        if isinstance(message, WorkerProgress):
            place.progress = message.text
            self._events.on_progress(message.text)
        elif isinstance(message, WorkerLoaded):
            place.loaded = message
            self._loaded()
        elif isinstance(message, WorkerReady):
            place.ready = True
            self._ready(message)
        elif isinstance(message, WorkerFailed):
            self._fail(
                Failure.raised(
                    place.rank, message.phase, message.step, message.error, message.traceback
                )
            )

    def _loaded(self) -> None:
        generation = self.generation
        if generation is None or not generation.all_loaded:
            return
        reports = [p.loaded for p in generation.places if p.loaded is not None]
        for other in reports[1:]:
            if (other.digest, other.block_size) != (reports[0].digest, reports[0].block_size):
                self._fail(
                    Failure(
                        Kind.RAISED,
                        other.rank,
                        "load",
                        0,
                        "model config, vocabulary, parameter count or code version differ from "
                        "rank 0's; give every host the same model folder and tp_runtime.",
                    )
                )
                return
        blocks = min(r.max_kv_blocks for r in reports)
        for place in generation.places:
            with contextlib.suppress(ServerUnavailableError):
                place.status.send(AllocateKV(blocks))

    def _ready(self, message: WorkerReady) -> None:
        generation = self.generation
        if generation is None or not generation.all_ready or self.state is not GroupState.STARTING:
            return
        reports = [p.loaded for p in generation.places if p.loaded is not None]
        self._enter(GroupState.READY)
        self._events.on_ready(
            CacheAgreement(
                num_blocks=min(r.max_kv_blocks for r in reports),
                block_size=reports[0].block_size,
                attention_backend=reports[0].attention_backend,
                graph_sizes=tuple(message.graph_sizes),
                num_parameters=sum(r.num_parameters for r in reports),
            )
        )

    # ------------------------------------------------------------ failure

    def fail_hung(self, rank: int, seconds: float) -> None:
        """The engine saw no answer for too long."""
        phase, step = self._progress_of(rank)
        self._fail(Failure(Kind.HUNG, rank, phase, step, f"hangs ({seconds:.1f} s)"))

    def fail_answer(self, error: str) -> None:
        """Rank 0 answered something that does not belong to the oldest step under way."""
        phase, step = self._progress_of(0)
        self._fail(Failure(Kind.RAISED, 0, phase, step, error))

    def expect_exit(self) -> None:
        """The workers were told to stop; their ends are no failures from here on."""
        self._enter(GroupState.STOPPING)

    def slowest_rank(self) -> int:
        """The rank whose heartbeat is furthest behind."""
        if self.generation is None:
            return 0
        beats = [(self.generation.heartbeat.read(r), r) for r in range(self.size)]
        return min(beats, key=lambda b: (b[0].step, b[0].phase != Phase.RUN, -b[0].age_s))[1]

    def _fail(self, failure: Failure) -> None:
        if self.state in (GroupState.KILLING, GroupState.STOPPING, GroupState.OVER):
            return
        self._failures.append(failure)
        if self.state is not GroupState.FAILING:
            self._enter(GroupState.FAILING)
            self._events.on_failed(self._failures)

    def tick(self) -> None:
        """Deadlines; called a few times a second, and more often while something is failing."""
        age = time.monotonic() - self._since
        if self.state is GroupState.FAILING and age >= GRACE_S:
            self._kill_all()
        elif self.state is GroupState.KILLING and age >= KILL_DEADLINE_S:
            self._give_up("A killed worker does not end; its process is stuck in the kernel.")
        elif self.state is GroupState.STARTING and age >= self._config.start_timeout_s:
            self.fail_hung(self.slowest_rank(), age)
        elif self.state is GroupState.WAITING_FOR_KEEPERS and age >= self._config.start_timeout_s:
            missing = [r for r in range(self.size) if r not in self._keepers]
            self._failures = [
                Failure(Kind.KEEPER_LOST, missing[0], "start", 0, "its keeper never connected")
            ]
            self._give_up("It did not start in time.")

    def _kill_all(self) -> None:
        self._enter(GroupState.KILLING)
        for rank in range(self.size):
            self._command(rank, KillWorker(self._number))
        self._advance_killing()

    def _advance_killing(self) -> None:
        generation = self.generation
        if generation is None or any(
            p.exit_status is None and p.rank in self._keepers for p in generation.places
        ):
            return
        started = all(p.ready for p in generation.places)
        self._close_generation()
        if len(self._keepers) < self.size:
            self._lose_keepers()
        elif not self._may_restart(started):
            self._give_up(self._why_no_restart(started))
        else:
            self.restarts += 1
            block = report(self._failures, "all workers are started again; requests go on.")
            logger.error("%s", block)
            self._fork_all()

    def _may_restart(self, started: bool) -> bool:
        if not started and self._number == 1:
            return False  # it never worked: the same start would fail again
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._config.restart_window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._config.max_worker_restarts:
            return False
        self._restarts.append(now)
        return True

    def _why_no_restart(self, started: bool) -> str:
        if not started and self._number == 1:
            return "the server does not start."
        return (
            f"given up after {len(self._restarts)} restarts within "
            f"{self._config.restart_window_s:g} s (--max-worker-restarts)."
        )

    def _lose_keepers(self) -> None:
        """A keeper cannot be forked from here; only the launcher can start one. The others are
        ended at once so that the launcher, if it has restarts left, starts the whole group."""
        for rank in list(self._keepers):
            self._command(rank, Quit(1))
            self._watcher.unwatch(self._keepers[rank].fileno())
            self._keepers.pop(rank).close()
        self._enter(GroupState.WAITING_FOR_KEEPERS)

    def _give_up(self, consequence: str) -> None:
        self._enter(GroupState.OVER)
        self._events.on_over(report(self._failures, consequence))

    def quit(self, status: int, message: str = "") -> None:
        """End every keeper (and with it its worker) with this exit status."""
        self.state = GroupState.OVER
        for rank in list(self._keepers):
            self._command(rank, Quit(status, message))

    # ------------------------------------------------------------ small things

    def _enter(self, state: GroupState) -> None:
        self.state = state
        self._since = time.monotonic()

    def _place(self, rank: int, generation: int) -> WorkerPlace | None:
        if self.generation is None or self.generation.number != generation:
            return None
        return self.generation.places[rank]

    def _progress_of(self, rank: int) -> tuple[str, int]:
        if self.generation is None:
            return "start", 0
        beat = self.generation.heartbeat.read(rank)
        return beat.phase.name.lower(), beat.step

    def _close_generation(self) -> None:
        if self.generation is None:
            return
        for place in self.generation.places:
            if not place.status.closed_by_peer:
                with contextlib.suppress(KeyError):
                    self._watcher.unwatch(place.status.fileno())
        self.generation.close()
        self.generation = None
