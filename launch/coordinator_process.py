"""Starting the coordinator, and finding the one that runs.

The first keeper of a host starts it in a session of its own, so that Ctrl-C in a terminal and the
signals of an elastic agent do not reach it: it ends the server in order, or when the process it
watches ends. Keepers that torch's elastic agent starts again find the old one still listening.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ServerUnavailableError, WorkerFailedError
from tp_runtime.launch.network import listening_address
from tp_runtime.launch.rank_environment import RankPlace
from tp_runtime.messages import KeeperCommand
from tp_runtime.run_folder import ProcessId, RunFolder
from tp_runtime.transport.fd_socket import FdSocket

COORDINATOR_MODULE = "tp_runtime.coordinator"
RELAY_MODULE = "tp_runtime.coordinator.relay_process"

GENERATIONS_EACH = 1_000_000
"""Generations of workers are numbered on where a coordinator that died cannot have come, since
workers meet in torchrun's store under that number."""


class CoordinatorProcess:
    """The coordinator, or on another host than rank 0's the relay that stands for it, as the keeper
    sees that started it."""

    def __init__(
        self, config: EngineConfig, folder: RunFolder, watch: ProcessId, place: RankPlace
    ) -> None:
        folder.write_config(config)
        folder.forget_door()
        self.number = folder.count_coordinator()
        """1 for the first one of this folder; relays are counted likewise on their hosts."""
        command = [sys.executable, "-m"]
        command += _coordinator(place) if place.coordinates else _relay(place)
        command += ["--config", config.to_json(), "--run-dir", str(folder.path)]
        command += ["--watch-pid", str(watch.pid)]
        if place.coordinates:
            first = (self.number - 1) * GENERATIONS_EACH + 1
            command += ["--first-generation", str(first)]
        # Its signals wait until it can take them: a Ctrl-C while it is still importing must neither
        # be lost nor show a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        folder.write_coordinator(ProcessId.of(self._process.pid))

    def ended(self) -> int | None:
        """Exit status as from waitpid, None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _coordinator(place: RankPlace) -> list[str]:
    command = [COORDINATOR_MODULE, "--local-ranks", str(place.local_world_size)]
    if place.several_hosts:
        command += ["--relay-interface", listening_address(os.environ["MASTER_ADDR"])]
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    used = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if limit.isdigit() and used.isdigit():
        command += ["--keeper-restarts", str(int(limit) - int(used))]
    return command


def _relay(place: RankPlace) -> list[str]:
    command = [RELAY_MODULE, "--coordinator-host", os.environ["MASTER_ADDR"]]
    command += ["--first-rank", str(place.first_rank)]
    return [*command, "--local-ranks", str(place.local_world_size)]


def is_listening(folder: RunFolder) -> bool:
    """Whether a coordinator takes keepers in this folder now."""
    try:
        FdSocket[KeeperCommand].connect(folder.keepers_socket, KeeperCommand).close()
    except ServerUnavailableError:
        return False
    return True


def connect_to_coordinator(
    folder: RunFolder,
    started: CoordinatorProcess | None,
    timeout_s: float,
    every_turn: Callable[[], None] = lambda: None,
) -> FdSocket[KeeperCommand]:
    """Connect as soon as it listens.

    Raises the recorded failure when there is one, WorkerFailedError when the coordinator started
    here has ended, ServerUnavailableError when nobody listens within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        failure = folder.read_failure()
        if failure is not None:
            raise failure.error()
        if started is not None and (status := started.ended()) is not None:
            raise WorkerFailedError(f"The coordinator ended while it started: {_how(status)}.")
        try:
            return FdSocket[KeeperCommand].connect(folder.keepers_socket, KeeperCommand)
        except ServerUnavailableError:
            if time.monotonic() > deadline:
                raise ServerUnavailableError(
                    f"No coordinator listens at {folder.keepers_socket} after {timeout_s:g} s."
                ) from None
        every_turn()
        time.sleep(0.02)


def shared_config(folder: RunFolder) -> EngineConfig:
    """The config that the first keeper shares; waits for it, as long as a download may take.

    Should the first keeper end instead, its launcher ends this process too. Raises the failure that
    was recorded."""
    while (config := folder.read_config()) is None:
        failure = folder.read_failure()
        if failure is not None:
            raise failure.error()
        time.sleep(0.02)
    return config


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}; its message is above"
    return f"killed by {signal.Signals(-status).name}"


def parent_process() -> ProcessId:
    return ProcessId.of(os.getppid())
