"""The coordinator's main thread: requests in, plans out, answers in, updates out.

One loop over one epoll: the inbox (requests, cancels), the answer ring, keepers and workers, the
launcher's pidfd, signals. After every turn the scheduler forms plans until its window is full.
Text and client sockets live on other threads; they are reached through `Inbox` and `Frontend`.
"""

from __future__ import annotations

import logging
import signal
import time

import msgspec

from tp_runtime.coordinator.activity import ActivityLog
from tp_runtime.coordinator.event_loop import EventLoop
from tp_runtime.coordinator.failure import Failure, first_cause
from tp_runtime.coordinator.frontend import Frontend
from tp_runtime.coordinator.graph_recording import GraphRecording
from tp_runtime.coordinator.inbox import Inbox
from tp_runtime.coordinator.limits import limits_of
from tp_runtime.coordinator.load_log import LoadLog
from tp_runtime.coordinator.metrics import Metrics
from tp_runtime.coordinator.pace import StepPace
from tp_runtime.coordinator.poison import Quarantine
from tp_runtime.coordinator.recovery_clock import in_words
from tp_runtime.coordinator.request_table import RequestTable
from tp_runtime.coordinator.scheduler import WINDOW, Scheduler
from tp_runtime.coordinator.sequence import SequenceUpdate, SteadyTokens
from tp_runtime.coordinator.server_state import ServerState
from tp_runtime.coordinator.step_times import StepTimes
from tp_runtime.coordinator.trace_file import TraceFile
from tp_runtime.coordinator.worker_group import CacheAgreement, Doors, GroupState, WorkerGroup
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import (
    ProtocolError,
    ServerUnavailableError,
    TPRuntimeError,
    WorkerFailedError,
    error_from_code,
)
from tp_runtime.messages import Answer, StepPlan, Stop, encode
from tp_runtime.model_config import ModelConfig
from tp_runtime.run_folder import RunFolder
from tp_runtime.transport.ring import RingReader
from tp_runtime.transport.signal_pipe import SignalPipe

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""How often deadlines are looked at."""
SPARE_S = 0.001
"""When nothing has happened for so long there is time for what can wait, 0.1 ms at once. Steps of
256 rows on a GPU take longer than this; only the null workers of the benchmark do not."""
ACTIVITY_S = 1.0
"""How often the ranks' states are collected for the status page."""
STOP_S = 1.0
"""How long workers may take to end in order before their keepers kill them."""
LAST_SPANS_S = 0.5
"""How long the last part of the trace of other hosts is waited for."""
FLUSH_S = 1.0
"""How long the last messages to clients may take at the end."""

_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def _read_all(ring: RingReader) -> tuple[list[Answer], str]:
    """Every answer that is there, and what is wrong with the one after them."""
    answers: list[Answer] = []
    try:
        while (message := ring.try_read()) is not None:
            answers.append(_decode_answer(message))
    except (ProtocolError, msgspec.DecodeError) as error:
        return answers, str(error)
    return answers, ""


class Engine:
    """`run` returns the exit status of the coordinator. Implements `GroupEvents`."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        inbox: Inbox,
        frontend: Frontend,
        state: ServerState,
        doors: Doors,
        folder: RunFolder,
        launcher_pidfd: int,
    ) -> None:
        self._config = config
        self._relays = doors.relays
        self._model = model
        self._inbox = inbox
        self._frontend = frontend
        self._state = state
        self._folder = folder
        self._loop = EventLoop()
        self._signals = SignalPipe({signal.SIGTERM, signal.SIGINT})
        self._failures: list[Failure] = []
        self._trace = TraceFile(config.trace, config.run_ahead) if config.trace else None
        self._log = None if folder.private else LoadLog()
        self.metrics = Metrics()
        self._activity = ActivityLog()
        self._next_activity = 0.0
        self._times = StepTimes(self.metrics, self._activity, self._trace)
        self._pace = StepPace()
        self._recording = GraphRecording()
        self._fresh: list[SteadyTokens | list[SequenceUpdate]] = []
        """Of answered steps, not yet handed over."""
        self._draining_since: float | None = None
        self._status: int | None = None
        self.scheduler: Scheduler | None = None
        self.requests = RequestTable(frontend.texts, config.max_num_queued_requests)
        self._quarantine = Quarantine(self.requests, config.run_ahead, config.restart_window_s)
        self.group = WorkerGroup(config, doors, self._loop, self)
        self._loop.watch(inbox.fileno(), self._from_inbox)
        self._loop.watch(launcher_pidfd, self._launcher_gone)
        self._loop.watch(self._signals.fileno(), self._on_signals)
        self._say("starting", f"waiting for {self.group.size} rank processes (they import torch)")

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        """Until stopped, or given up, or the launcher is gone."""
        next_tick = time.monotonic()
        try:
            while self._status is None:
                self._publish()
                self._hand_over()
                self._wait()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._tick(now)
            return self._status
        finally:
            self._write_trace()

    def _wait(self) -> None:
        """For something to happen. What can wait for time to spare is done when nothing did for a
        moment, a little at a time."""
        scheduler = self.scheduler
        if scheduler is None or not scheduler.has_spare_work:
            self._loop.turn(TICK_S)
        elif not self._loop.turn(SPARE_S):
            scheduler.do_spare_work()

    def _write_trace(self) -> None:
        if self._trace is not None:
            relays = self._relays
            if relays is not None:
                relays.wait_for_last_spans(LAST_SPANS_S)
            try:
                self._trace.write(relays.spans if relays is not None else None)
            except OSError as error:
                logger.error("The trace could not be written to %s: %s", self._config.trace, error)

    def _tick(self, now: float) -> None:
        self._hand_over()
        self.group.tick()
        self.requests.expire(now)
        if now >= self._next_activity:
            self._next_activity = now + ACTIVITY_S
            self._state.change(activity=self._activity.snapshot(self.group.rank_statuses()))
        if self.scheduler is not None:
            self._quarantine.progress(self.scheduler)
            self._recovered_idle()
            stats = self.scheduler.stats()
            group = self.group
            left = self._recording.left + self.scheduler.in_flight.num_recording
            self._state.take_stats(stats, group.restarts, left, self.metrics, group.recovery)
            if self._log is not None:
                self._log.turn(now, stats)
        waited = self._times.oldest_age(now)
        if waited > self._config.step_deadline_s:
            self.group.fail_hung(self.group.slowest_rank(), waited)
        if self._draining_since is not None and self._drained(now):
            self._stop_workers()

    # ------------------------------------------------------------ clients

    def _from_inbox(self) -> None:
        for item in self._inbox.drain():
            updates = self.requests.take(item)
            if updates:
                self._fresh.append(updates)

    # ------------------------------------------------------------ steps

    def _publish(self) -> None:
        scheduler, generation = self.scheduler, self.group.generation
        if scheduler is None or generation is None or self.group.state is not GroupState.READY:
            return
        started = time.monotonic_ns()
        while (plan := self._next_plan(scheduler)) is not None:
            planned = time.monotonic_ns()
            message = encode(plan)
            try:
                generation.plans.write(message, timeout_s=self._config.step_deadline_s)
            except WorkerFailedError:
                self.group.fail_hung(self.group.slowest_rank(), self._config.step_deadline_s)
                return
            published = time.monotonic_ns()
            self._times.published(plan.step, len(message), started, planned, published)
            started = published

    def _next_plan(self, scheduler: Scheduler) -> StepPlan | None:
        # A drain and a suspect's replay are no time for it.
        usual = self._draining_since is None and self._quarantine.alone is None
        due = usual and self._recording.due(scheduler.has_work, scheduler.is_idle)
        plan = scheduler.plan(due)
        if plan is not None and plan.records_graph:
            self._recording.asked()
        return plan

    def _from_answers(self) -> None:
        scheduler, generation = self.scheduler, self.group.generation
        if scheduler is None or generation is None:
            return
        answers, broken = _read_all(generation.answers)
        received = started = time.monotonic_ns()
        records = scheduler.in_flight.oldest_steps(len(answers))
        steady, busy = all(r.is_steady for r in records), len(scheduler.in_flight) > len(answers)
        self._pace.answered(len(answers), steady, busy, received)
        scheduler.steps_ahead = self._pace.steps_ahead(WINDOW, self._config.run_ahead)
        try:
            for piece in scheduler.commit_all(answers):
                number = piece.num_steps if isinstance(piece, SteadyTokens) else 1
                taken = [records.popleft() for _ in range(number)]
                started = self._times.answered(taken, received, started)
                if piece:
                    self._fresh.append(piece)
                    if self.group.recovery.running:
                        self._recovered()
        except WorkerFailedError as error:
            broken = str(error)
        if broken:
            self.group.fail_answer(broken)
            return
        self._quarantine.progress(scheduler)

    def _hand_over(self) -> None:
        """What the last answers brought goes to the text threads, after the plans that waited for
        those answers: from then on the threads compete for the interpreter."""
        if not self._fresh:
            return
        started = time.monotonic_ns()
        fresh, self._fresh = self._fresh, []
        for piece in fresh:
            if isinstance(piece, list):
                self._note_ends(piece)
        self._frontend.texts.steps(fresh)
        if self.scheduler is not None and self.scheduler.masks_wanted:
            wanted, self.scheduler.masks_wanted = self.scheduler.masks_wanted, []
            self._frontend.texts.grammars.advance(wanted)
        self._times.handed_over(started)

    def _note_ends(self, updates: list[SequenceUpdate]) -> None:
        ended = [update for update in updates if update.finish_reason is not None]
        if ended:
            self.requests.ended(ended)
            self.metrics.ended(ended, time.monotonic_ns())

    # ------------------------------------------------------------ GroupEvents

    def on_ready(self, agreement: CacheAgreement) -> None:
        generation = self.group.generation
        if generation is None:
            return
        limits = limits_of(self._config, self._model, agreement)
        self._frontend.texts.check_against(limits)
        if self.scheduler is None:
            self.scheduler = Scheduler(limits, generation.number)
            self.requests.open(self.scheduler)
        else:
            self._fresh.append(self.scheduler.reset(generation.number, limits))
            self._hand_over()
        self._times.forget()
        self._pace.forget()
        self._recording.begin(agreement.graphs_left)
        self.scheduler.steps_ahead = self._config.run_ahead
        self.metrics.interrupted()
        self._activity.ready()
        if self._trace is not None:
            for place in generation.places:
                self._trace.add_rank(
                    generation.number, place.rank, place.pid or 0, generation.heartbeat.fd
                )
        self._loop.watch(generation.answers.doorbell, self._from_answers)
        self._state.change(num_kv_blocks=limits.num_blocks, block_size=limits.block_size)
        self._say("ready" if self._draining_since is None else "draining")
        logger.info(
            "Ready: %d ranks, attention %s, %d KV blocks of %d tokens, %d parameters.",
            self.group.size,
            agreement.attention_backend,
            agreement.num_blocks,
            agreement.block_size,
            agreement.num_parameters,
        )
        self._recovered_idle()

    def _recovered_idle(self) -> None:
        group, scheduler = self.group, self.scheduler
        ready = group.recovery.running and group.state is GroupState.READY
        if ready and scheduler is not None and not scheduler.has_work:
            self._recovered()  # no token is waited for

    def _recovered(self) -> None:
        parts = self.group.recovery.over()
        self._activity.recovered(parts)
        logger.warning("%s", in_words(parts))

    def on_failed(self, failures: list[Failure]) -> None:
        self._failures = failures
        self._activity.failed(failures)
        generation = self.group.generation
        if generation is not None:
            self._loop.unwatch(generation.answers.doorbell)
        self._times.forget()
        self._pace.forget()
        if self.scheduler is not None:
            self._say("recovering", "workers are being replaced")

    def on_all_killed(self, cause: Failure) -> None:
        scheduler = self.scheduler
        if scheduler is None:
            return
        if scheduler.in_flight.num_recording:  # no request is suspected of that
            self._recording.crashed()
            self.group.forgive()
        elif self._quarantine.crashed(scheduler, cause):
            self.group.forgive()

    def on_progress(self, text: str) -> None:
        self._say("starting" if self.scheduler is None else "recovering", text)

    def on_over(self, block: str) -> None:
        code = first_cause(self._failures).code if self._failures else ""
        error = error_from_code(code or WorkerFailedError.code, block)
        self._folder.write_failure(error.code, block)
        self._end(1, error)

    # ------------------------------------------------------------ the end

    def _launcher_gone(self) -> None:
        self._status = 1
        self.group.end_failing()

    def _on_signals(self) -> None:
        for signum in self._signals.take():
            if signum == signal.SIGTERM and self.group.replaces_keepers:
                continue  # an elastic agent ends the ranks that are left; it wants no other end
            if signum == signal.SIGINT or self._draining_since is not None:
                self._end(0, ServerUnavailableError("The server was stopped."))
                return
            self._draining_since = time.monotonic()
            self._frontend.refuse(
                ServerUnavailableError("The server is stopping and takes no new requests.")
            )
            self._say("draining", "running requests may finish")

    def _drained(self, now: float) -> bool:
        since = self._draining_since
        late = since is not None and now - since > self._config.drain_timeout_s
        # Workers that are being replaced meanwhile finish what they had begun.
        return late or self.requests.idle or self.scheduler is None

    def _stop_workers(self) -> None:
        """In order: the workers leave their loop, then the keepers go."""
        self._draining_since = None
        self.group.end_failing()
        if self._status is not None:
            return
        generation, scheduler = self.group.generation, self.scheduler
        ready = self.group.state is GroupState.READY
        if ready and generation is not None and scheduler is not None:
            stop = Stop(generation.number, scheduler.next_step)
            generation.plans.write(encode(stop), timeout_s=STOP_S)
            deadline = time.monotonic() + STOP_S
            self.group.expect_exit()
            while not generation.all_exited and time.monotonic() < deadline:
                self._loop.turn(0.02)
        self._end(0, ServerUnavailableError("The server was stopped before the request ended."))

    def _end(self, status: int, error: TPRuntimeError) -> None:
        """Requests that still run get `error`; what is ready for clients is sent."""
        self._hand_over()
        self._frontend.fail_all(error)
        self._frontend.close(FLUSH_S)
        self.group.quit(status)
        self._status = status

    # ------------------------------------------------------------ small things

    def _say(self, state: str, text: str = "") -> None:
        self._folder.write_status(state, text)
        self._state.change(state=state)
