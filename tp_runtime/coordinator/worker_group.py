"""The workers of a server, on all its hosts: fork, handshake, watch, kill, fork again.

One-for-all supervision: when any worker fails, all are killed and a new generation is forked. The
group decides nothing about requests; it tells its owner through `GroupEvents`. How a host is
reached is the business of its `Host`; everything here runs on the engine's thread.
"""

from __future__ import annotations

import logging
import math
import time

from tp_runtime.coordinator.activity import rank_status
from tp_runtime.coordinator.doors import Doors
from tp_runtime.coordinator.failure import GRACE_S, Failure, Kind, first_cause, report
from tp_runtime.coordinator.generation import Generation, WorkerPlace
from tp_runtime.coordinator.group_events import GroupEvents, GroupState
from tp_runtime.coordinator.handshake import CacheAgreement, Disagreement, agree
from tp_runtime.coordinator.host import Host, RankMessage
from tp_runtime.coordinator.local_host import LocalHost
from tp_runtime.coordinator.recovery_clock import Part, RecoveryClock
from tp_runtime.coordinator.restart_limit import RestartLimit
from tp_runtime.coordinator.start_log import log_start
from tp_runtime.engine_config import EngineConfig
from tp_runtime.messages import (
    RankStatus,
    WorkerExited,
    WorkerFailed,
    WorkerForked,
    WorkerLoaded,
    WorkerProgress,
    WorkerReady,
)
from tp_runtime.transport.heartbeat import Phase
from tp_runtime.transport.loop_socket import Watcher

__all__ = ["CacheAgreement", "Doors", "GroupEvents", "GroupState", "WorkerGroup"]

logger = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0
"""A worker that was killed and has not been reaped by then has a keeper that does not work."""
STUCK_S = 30.0
"""A killed process that has not ended by then is stuck in the kernel; nothing helps it. On a
machine that is busy with something more important, dying takes seconds."""


class WorkerGroup:
    """Implements `HostEvents`. `generation` is the one in use, None before the first."""

    def __init__(
        self, config: EngineConfig, doors: Doors, watcher: Watcher, events: GroupEvents
    ) -> None:
        self._config = config
        self._events = events
        self._hosts: dict[int, Host] = {}
        """By rank; a rank whose keeper is not there (yet) is missing."""
        self._failures: list[Failure] = []
        self._limit = RestartLimit(config.max_worker_restarts, config.restart_window_s)
        self._keeper_restarts = doors.keeper_restarts
        self._since = time.monotonic()
        self._number = doors.first_generation - 1
        self._block = ""
        self.state = GroupState.WAITING_FOR_KEEPERS
        self.generation: Generation | None = None
        self.restarts = 0
        self._worked = False
        """Whether any generation was ready: before that a failure is no recovery."""
        self.recovery = RecoveryClock()
        self._local = LocalHost(
            doors.keepers,
            watcher,
            self,
            range(doors.local_ranks),
            self.size,
            traced=bool(config.trace),
        )
        self._relays = doors.relays
        if self._relays is not None:
            self._relays.open(watcher, self)

    @property
    def size(self) -> int:
        return self._config.tensor_parallel_size

    @property
    def _all_hosts(self) -> list[Host]:
        return [self._local, *(self._relays.hosts if self._relays is not None else ())]

    # ------------------------------------------------------------ HostEvents

    def on_keeper(self, host: Host, rank: int) -> None:
        """All keepers are there: fork."""
        self._hosts[rank] = host
        if len(self._hosts) == self.size and self.state is GroupState.WAITING_FOR_KEEPERS:
            self._fork_all()

    def on_rank(self, rank: int, message: RankMessage) -> None:
        """Reports of an older generation's workers cannot come: their memory is gone."""
        generation = self.generation
        if generation is None:
            return
        place = generation.places[rank]
        if isinstance(message, WorkerForked):
            if message.generation == generation.number:
                place.pid = message.pid
                if all(place.pid is not None for place in generation.places):
                    self.recovery.enter(Part.LOAD)
        elif isinstance(message, WorkerExited):
            if message.generation == generation.number:
                self._exited(place, message)
        elif isinstance(message, WorkerProgress):
            place.progress = message.text
            self._events.on_progress(message.text)
        elif isinstance(message, WorkerLoaded):
            place.loaded = message
            self._loaded(generation)
        elif isinstance(message, WorkerReady):
            place.ready = True
            self._ready(generation, message)
        elif isinstance(message, WorkerFailed):
            self._fail(Failure.reported(rank, message))

    def on_keeper_lost(self, rank: int) -> None:
        """Its worker is dying with it."""
        self._lost(rank, Kind.KEEPER_LOST, "its keeper process is gone")

    def on_host_lost(self, host: Host, why: str) -> None:
        """Every keeper and worker there counts as dead; some may have been reported lost before,
        and this is why."""
        present = any(self._hosts.get(rank) is host for rank in host.ranks)
        if not present and self.state is GroupState.WAITING_FOR_KEEPERS:
            return
        for rank in host.ranks:
            self._lost(rank, Kind.HOST_LOST, f"its host {host.name} is lost: {why}")

    def _lost(self, rank: int, kind: Kind, error: str) -> None:
        phase, step = self._progress_of(rank)
        failure = Failure(kind, rank, phase, step, error)
        if self.state is GroupState.KILLING:
            self._failures.append(failure)
        else:
            self._fail(failure)
        self._hosts.pop(rank, None)
        if self.generation is not None:
            place = self.generation.places[rank]
            place.exit_status = place.exit_status if place.exit_status is not None else -9
        self._all_told()

    def _exited(self, place: WorkerPlace, message: WorkerExited) -> None:
        place.pid, place.exit_status = message.pid, message.status
        if self.state is not GroupState.KILLING and all(
            failure.rank != place.rank for failure in self._failures
        ):
            phase, step = self._progress_of(place.rank)
            self._fail(Failure.exited(place.rank, phase, step, message.status))
        self._all_told()

    def _all_told(self) -> None:
        """Goes on when there is nobody left to wait for, or a keeper is lost: an elastic agent
        is about to end the others. (The loss of another host is told after that of its workers,
        and is waited for.)"""
        if self.state is GroupState.KILLING:
            self._advance_killing()
        elif self.state is GroupState.FAILING and self._relays is None:
            lost = len(self._hosts) < self.size
            if lost or not self._left():
                self._kill_all()

    def _left(self) -> bool:
        """Whether a worker that can be reached has not ended yet."""
        places = self.generation.places if self.generation is not None else []
        return any(place.exit_status is None and place.rank in self._hosts for place in places)

    # ------------------------------------------------------------ start

    def _fork_all(self) -> None:
        self._number += 1
        self._failures = []
        self._enter(GroupState.STARTING)
        try:
            for host in self._all_hosts:  # this one first
                host.fork(self._number)
        except OSError as error:
            what = f"the memory it shares with the coordinator cannot be had: {error}"
            self._fail(Failure(Kind.RAISED, 0, "fork", 0, what))
        if self._local.memory is not None:
            self.generation = Generation(
                self._number, self.size, self._all_hosts, self._local.memory
            )

    def _loaded(self, generation: Generation) -> None:
        reports = [place.loaded for place in generation.places if place.loaded is not None]
        if len(reports) < self.size:
            return
        agreement = agree(reports)
        if isinstance(agreement, Disagreement):
            self._fail(Failure(Kind.RAISED, agreement.rank, "load", 0, agreement.error))
            return
        for host in self._all_hosts:
            host.allocate(agreement.num_blocks)

    def _ready(self, generation: Generation, message: WorkerReady) -> None:
        if not generation.all_ready or self.state is not GroupState.STARTING:
            return
        agreement = agree([p.loaded for p in generation.places if p.loaded is not None])
        if isinstance(agreement, CacheAgreement):
            self._enter(GroupState.READY)
            self._worked = True
            self.recovery.enter(Part.PREFILL)
            log_start(message)
            self._events.on_ready(agreement.with_graphs(message.graph_sizes, message.graphs_left))

    # ------------------------------------------------------------ failure

    def fail_hung(self, rank: int, seconds: float) -> None:
        """The engine saw no answer for too long."""
        phase, step = self._progress_of(rank)
        self._fail(Failure(Kind.HUNG, rank, phase, step, f"hangs ({seconds:.1f} s)"))

    def fail_answer(self, error: str) -> None:
        """Rank 0 answered something that does not belong to the oldest step under way."""
        phase, step = self._progress_of(0)
        self._fail(Failure(Kind.RAISED, 0, phase, step, error))

    @property
    def replaces_keepers(self) -> bool:
        """Whether the launcher is about to end all ranks in order to start them again."""
        if len(self._hosts) == self.size or not self._number:
            return False
        failing = self.state in (GroupState.FAILING, GroupState.KILLING)
        waiting = self.state is GroupState.WAITING_FOR_KEEPERS
        return waiting or (failing and self._keeper_restarts != 0)

    def expect_exit(self) -> None:
        """The workers were told to stop; their ends are no failures from here on."""
        self._enter(GroupState.STOPPING)

    def slowest_rank(self) -> int:
        """The rank whose process is stopped, or else whose heartbeat is furthest behind."""
        beats = [(host.beat(rank), rank) for rank, host in sorted(self._hosts.items())]
        if self.generation is None or not beats:
            return 0
        for rank in self._local.ranks:
            if self.generation.places[rank].is_stopped():
                return rank
        return min(beats, key=lambda b: (b[0].step, b[0].phase != Phase.RUN, -b[0].age_s))[1]

    def rank_statuses(self) -> list[RankStatus]:
        """Of all ranks that have a worker, in order."""
        places = self.generation.places if self.generation is not None else []
        hosts = self._hosts
        return [rank_status(p, hosts[p.rank]) for p in places if p.rank in hosts]

    def _look_for_silence(self) -> None:
        """A worker that waits for plans shows itself twice a second."""
        for rank, host in self._hosts.items():
            beat = host.beat(rank)
            if beat.phase is Phase.IDLE and beat.age_s > self._config.step_deadline_s:
                self.fail_hung(rank, beat.age_s)
                return

    def _fail(self, failure: Failure) -> None:
        if self.state in (GroupState.KILLING, GroupState.STOPPING, GroupState.OVER):
            return
        self._failures.append(failure)
        if self.state is not GroupState.FAILING:
            self._enter(GroupState.FAILING)
            if self._worked:
                self.recovery.failed(self._silence_of(failure.rank))
            self._events.on_failed(self._failures)

    def tick(self) -> None:
        """Deadlines; called a few times a second, and more often while something is failing."""
        if self._relays is not None:
            self._relays.tick()
        self._local.pulse()
        age = time.monotonic() - self._since
        if self.state is GroupState.FAILING and age >= GRACE_S:
            self._kill_all()
        elif self.state is GroupState.READY:
            self._look_for_silence()
        elif self.state is GroupState.KILLING and KILL_DEADLINE_S <= age < STUCK_S:
            self._kill_keepers()
        elif self.state is GroupState.KILLING and age >= STUCK_S:
            self._give_up("A killed worker does not end; its process is stuck in the kernel.")
        elif self.state is GroupState.STARTING and age >= self._config.start_timeout_s:
            self.fail_hung(self.slowest_rank(), age)
        elif self.state is GroupState.WAITING_FOR_KEEPERS and age >= self._config.start_timeout_s:
            missing = next(rank for rank in range(self.size) if rank not in self._hosts)
            self._failures = [
                Failure(Kind.KEEPER_LOST, missing, "start", 0, "its keeper never connected")
            ]
            self._give_up("It did not start in time.")

    def _kill_all(self) -> None:
        self._enter(GroupState.KILLING)
        for host in self._all_hosts:
            host.kill(self._number)
        self._advance_killing()

    def _kill_keepers(self) -> None:
        """A keeper that does not do as told is stopped or stuck; its worker dies with it."""
        for place in self.generation.places if self.generation is not None else ():
            if place.exit_status is None and place.rank in self._local.ranks:
                self._local.kill_keeper(place.rank)

    def _advance_killing(self) -> None:
        """Goes on when every worker that can be reached has ended."""
        generation = self.generation
        if self._left():
            return
        started = generation is not None and generation.all_ready
        self.generation = None
        for host in self._all_hosts:
            host.release()
        self.recovery.enter(Part.FORK)
        if len(self._hosts) < self.size:
            self._replace_keepers()
            return
        if started:
            self._events.on_all_killed(first_cause(self._failures))
        if not self._may_restart(started):
            self._give_up(self._why_no_restart(started))
        else:
            self.restarts += 1
            self._tell("all workers are started again; requests go on.")
            self._fork_all()

    def _may_restart(self, started: bool) -> bool:
        if not started and self._number == 1:
            return False  # it never worked: the same start would fail again
        return self._limit.take()

    def _why_no_restart(self, started: bool) -> str:
        if not started and self._number == 1:
            return "the server does not start."
        return (
            f"given up after {self._limit.used} restarts within "
            f"{self._config.restart_window_s:g} s (--max-worker-restarts)."
        )

    def _replace_keepers(self) -> None:
        """A keeper cannot be forked from here; only the launcher can start one. The others are
        ended at once so that the launcher, if it has restarts left, starts the whole group."""
        if self._keeper_restarts == 0:
            self._give_up("the server ends; torchrun has no restarts left (--max-restarts).")
            return
        if self._keeper_restarts is not None:
            self._keeper_restarts -= 1
        self._tell("the launcher is to start all ranks again; requests wait.")
        for host in self._all_hosts:
            host.drop_keepers(1)
        self._hosts.clear()
        self._enter(GroupState.WAITING_FOR_KEEPERS)

    def end_failing(self) -> None:
        """The server is to end, and if workers are failing right now that is told as the reason."""
        if self.state in (GroupState.FAILING, GroupState.KILLING):
            self._give_up("the server ends; it was told to stop, or its launcher is gone.")

    def _tell(self, consequence: str) -> None:
        logger.error("%s", report(self._failures, consequence))

    def _give_up(self, consequence: str) -> None:
        self._enter(GroupState.OVER)
        self._block = report(self._failures, consequence)
        self._events.on_over(self._block)

    def forgive(self) -> None:
        """What made the workers fail is known and gone; earlier restarts do not count."""
        self._limit.forgive()

    def quit(self, status: int, message: str = "") -> None:
        """End every keeper (and with it its worker) with this exit status."""
        self.state = GroupState.OVER
        for host in self._all_hosts:
            host.quit(status, message or self._block)

    # ------------------------------------------------------------ small things

    def _enter(self, state: GroupState) -> None:
        self.state = state
        self._since = time.monotonic()

    def _silence_of(self, rank: int) -> float:
        """Seconds since this rank last showed itself; 0 when it never did."""
        host = self._hosts.get(rank)
        age = host.beat(rank).age_s if host is not None else math.inf
        return age if age < math.inf else 0.0

    def _progress_of(self, rank: int) -> tuple[str, int]:
        host = self._hosts.get(rank)
        if host is None or self.generation is None:
            return "start", 0
        beat = host.beat(rank)
        return beat.phase.name.lower(), beat.step
