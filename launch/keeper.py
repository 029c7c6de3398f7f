"""A keeper: the small process torchrun starts per rank. It holds one worker's life in its hand.

It connects to the coordinator, then does what that says: fork a worker, kill it, quit. It stays
single-threaded and never touches a GPU, so that a fork gives a sound worker at any time. It watches
four things in one poll: the coordinator's socket, its worker (pidfd), the processes it must not
outlive (pidfd), and signals (a pipe).

Whatever ends a keeper ends its worker first. It knows nothing of plans, requests or the torch
store.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ProtocolError, ServerUnavailableError, TPRuntimeError
from tp_runtime.launch import exit_status
from tp_runtime.launch.coordinator_return import CoordinatorReturn
from tp_runtime.launch.keeper_signals import KeeperSignals
from tp_runtime.launch.parent_death import open_pidfd, send_signal
from tp_runtime.launch.rank_environment import RankPlace
from tp_runtime.launch.worker_child import (
    WORKER_DESCRIPTORS,
    WorkerMain,
    fork_hazard,
    fork_worker,
)
from tp_runtime.messages import (
    PROTOCOL_VERSION,
    ForkWorker,
    KeeperCommand,
    KeeperHello,
    KeeperMessage,
    KillWorker,
    Pulse,
    Quit,
    WorkerExited,
    WorkerForked,
)
from tp_runtime.run_folder import ProcessId
from tp_runtime.transport.fd_socket import FdSocket, close_all

logger = logging.getLogger(__name__)

REAP_S = 1.0
"""A killed worker is gone in milliseconds; one stuck in the kernel is left to the kernel."""
INTERRUPT_S = 1.5
"""After SIGINT everything must be gone in two seconds, whether the coordinator answers or not."""
DRAIN_MARGIN_S = 3.0
"""How much longer than the coordinator's own drain deadline a keeper waits for its word."""
SILENCE_MARGIN_S = 5.0
"""A coordinator that says nothing for the step deadline and this long is stopped or stuck; it may
itself wait for as long as the step deadline."""
_TURN_MS = 200
_RETRY_MS = 20


class Keeper:
    """See the module's docstring. `run` returns the exit status for the process.

    `relay_signals`: a signal is a person's wish for the server to end, and goes to the coordinator.
    Without it (a launcher of ours handles signals itself) only torch's elastic agent sends them,
    and means this process. `every_turn` is called a few times a second, for showing progress;
    `close_in_child` in each forked worker, for what it must not hold. `comes_back`: what to do when
    the coordinator dies; without it this keeper ends too."""

    def __init__(
        self,
        config: EngineConfig,
        place: RankPlace,
        coordinator: FdSocket[KeeperCommand],
        worker_main: WorkerMain,
        threads: int,
        signals: KeeperSignals,
        outlived_by: Sequence[ProcessId],
        relay_signals: bool = True,
        every_turn: Callable[[], None] = lambda: None,
        close_in_child: Callable[[], None] = lambda: None,
        comes_back: CoordinatorReturn | None = None,
    ) -> None:
        self._config = config
        self._place = place
        self._coordinator: FdSocket[KeeperCommand] | None = coordinator
        self._coordinator_process: ProcessId | None = None
        self._comes_back = comes_back
        self._silence_s: float | None = None
        """Since the coordinator's last word, this process's own stops not counted; None: it has
        not begun to show that it lives."""
        self._worker_main = worker_main
        self._threads = threads
        self._signals = signals
        self._signal_pipe = signals.collect()
        self._relay_signals = relay_signals
        self._every_turn = every_turn
        self._also_close_in_child = close_in_child
        self._status: int | None = None
        self._stop_by = float("inf")
        self._generation = 0
        self._worker: int | None = None
        self._worker_pidfd = -1
        self._parents = [open_pidfd(process) for process in outlived_by]
        self.message = ""
        """What is to be told at the end, for the terminal."""
        self.gave_up_waiting = False
        """A signal asked for the end and the coordinator did not bring it about."""

    def run(self) -> int:
        """Serve the coordinator until something ends this keeper; the worker is gone then."""
        gc.freeze()  # what is imported by now stays; collecting it would copy pages after a fork
        try:
            self._say_hello()
            while self._status is None:
                self._turn()
            return self._status
        finally:
            self._kill_worker()
            self._reap_worker(REAP_S)

    def _say_hello(self) -> None:
        place = self._place
        if self._coordinator is not None:
            with contextlib.suppress(ProcessLookupError):
                self._coordinator_process = ProcessId.of(self._coordinator.peer_pid())
        self._tell(
            KeeperHello(
                version=PROTOCOL_VERSION,
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=place.world_size,
                pid=os.getpid(),
                host=socket.gethostname(),
            )
        )

    # ------------------------------------------------------------ the loop

    def _turn(self) -> None:
        poll = select.poll()
        coordinator = -1 if self._coordinator is None else self._coordinator.fileno()
        watched = [self._signal_pipe.fileno(), *self._parents]
        if coordinator >= 0:
            watched.append(coordinator)
        if self._worker is not None:
            watched.append(self._worker_pidfd)
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(_RETRY_MS if coordinator < 0 else _TURN_MS)}
        if self._worker is not None and self._worker_pidfd in ready:
            self._reap_worker(0.0)
        if self._signal_pipe.fileno() in ready:
            self._on_signals()
        if coordinator in ready and self._status is None:
            self._on_command()
        elif coordinator >= 0:
            self._bear_silence(_TURN_MS / 1000)
        if ready.intersection(self._parents):
            self._status = exit_status.LAUNCHER_LOST
        if time.monotonic() >= self._stop_by and self._status is None:
            self.gave_up_waiting, self._status = True, exit_status.OK
        if self._coordinator is None and self._status is None:
            self._find_coordinator()
        self._every_turn()

    def _on_command(self) -> None:
        if self._coordinator is None:
            return
        try:
            received = self._coordinator.receive()
        except ProtocolError as error:
            # No message, as that would end the server: the launcher may start this rank again.
            logger.error("tp_runtime: The keeper of rank %d ends: %s", self._place.rank, error)
            self._status = exit_status.FAILED
            return
        if received is None:
            self._lose_coordinator()
            return
        command, fds = received
        self._silence_s = 0.0
        if isinstance(command, ForkWorker):
            self._fork(command, fds)
            return
        close_all(fds)
        if isinstance(command, Pulse):
            return
        if isinstance(command, KillWorker):
            if command.generation == self._generation:
                self._kill_worker()
        elif isinstance(command, Quit):
            self.message, self._status = command.message, command.status

    def _lose_coordinator(self) -> None:
        """It ended without Quit. Its workers are of no use to the next one."""
        if self._coordinator is not None:
            self._coordinator.close()
        self._coordinator, self._silence_s = None, None
        self._kill_worker()
        self._reap_worker(REAP_S)
        if self._comes_back is None:
            self._status = exit_status.COORDINATOR_LOST
        elif not self._comes_back.lost(self._coordinator_process):
            self._status = exit_status.FAILED  # it has given this rank up, and has said so

    def _find_coordinator(self) -> None:
        if self._comes_back is None:
            return
        try:
            self._coordinator = self._comes_back.attempt()
        except TPRuntimeError as error:
            self.message, self._status = str(error), exit_status.FAILED
            return
        self._say_hello()

    def _bear_silence(self, seconds: float) -> None:
        """Kills a coordinator that is stopped or stuck, if this keeper is to start the next."""
        if self._silence_s is None or self._comes_back is None or not self._comes_back.starts:
            return
        self._silence_s += seconds
        if self._silence_s > self._config.step_deadline_s + SILENCE_MARGIN_S:
            self._silence_s = None
            self._signal_coordinator(signal.SIGKILL)

    def _signal_coordinator(self, signum: int) -> None:
        if self._coordinator is not None and self._coordinator_process is not None:
            with contextlib.suppress(ProcessLookupError):
                send_signal(self._coordinator_process, signum)

    def _on_signals(self) -> None:
        """SIGINT: stop now, SIGTERM: drain. Both through the coordinator, who tells all keepers;
        a second one that is no echo of the first stops this keeper at once."""
        for signum in self._signal_pipe.take():
            if not self._relay_signals:
                self._status = exit_status.of_signal(signum)
                return
            if self._signals.is_second_wish():
                self.gave_up_waiting, self._status = True, exit_status.of_signal(signum)
                return
            wait = INTERRUPT_S
            if signum == signal.SIGTERM:
                wait = self._config.drain_timeout_s + DRAIN_MARGIN_S
            self._stop_by = min(self._stop_by, time.monotonic() + wait)
            if self._coordinator is None:
                self.gave_up_waiting, self._status = True, exit_status.OK
                return
            self._signal_coordinator(signum)

    # ------------------------------------------------------------ the worker

    def _fork(self, command: ForkWorker, fds: list[int]) -> None:
        self._kill_worker()
        self._reap_worker(REAP_S)
        problem = fork_hazard()
        if self._worker is not None:
            problem = f"its killed worker {self._worker} does not end; it is stuck in the kernel"
        if problem is None and len(fds) != WORKER_DESCRIPTORS:
            problem = f"it was given {len(fds)} descriptors instead of {WORKER_DESCRIPTORS}"
        if problem is not None:
            self.message = f"The keeper of rank {self._place.rank} cannot fork: {problem}."
            self._status = exit_status.NOT_FORKABLE
            close_all(fds)
            return
        self._generation = command.generation
        self._worker = fork_worker(
            self._worker_main,
            self._config,
            self._place,
            command.generation,
            fds,
            self._threads,
            self._close_in_child,
        )
        close_all(fds)
        self._worker_pidfd = os.pidfd_open(self._worker)
        self._tell(WorkerForked(command.generation, self._worker))

    def _close_in_child(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        self._signal_pipe.close()
        close_all(self._parents)
        self._also_close_in_child()

    def _kill_worker(self) -> None:
        if self._worker is not None:
            os.kill(self._worker, signal.SIGKILL)  # not reaped yet, so the pid is still its own

    def _reap_worker(self, timeout_s: float) -> None:
        if self._worker is None:
            return
        poll = select.poll()
        poll.register(self._worker_pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return
        pid, status = os.waitpid(self._worker, 0)
        os.close(self._worker_pidfd)
        self._worker, self._worker_pidfd = None, -1
        self._tell(WorkerExited(self._generation, pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: KeeperMessage) -> None:
        if self._coordinator is not None:
            with contextlib.suppress(ServerUnavailableError):
                self._coordinator.send(message)  # its end is seen at the next turn
