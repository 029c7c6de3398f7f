"""`tp-runtime serve`: the server that torchrun starts, with torch's elastic agent in this process.

The order matters: settings are checked before anything starts, signals are taken over before
threads exist, torch is imported after both. The agent then starts one keeper per rank and starts
them again when one is lost; everything else is the keepers' and the coordinator's business. A
single rank has no rendezvous and needs no agent.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import TPRuntimeError, WorkerFailedError
from tp_runtime.http.settings import HttpSettings
from tp_runtime.launch import exit_status
from tp_runtime.launch.descendants import kill_processes
from tp_runtime.launch.http_process import HttpProcess
from tp_runtime.launch.parent_death import send_signal, wait_gone
from tp_runtime.launch.preflight import preflight
from tp_runtime.launch.rank_environment import CUDA_UNTOUCHED
from tp_runtime.launch.server_notice import ServerNotice, print_failure
from tp_runtime.launch.stop_request import StopRequest
from tp_runtime.run_folder import ProcessId, RunFolder, list_servers
from tp_runtime.transport.fd_socket import check_path

KEEPER_RESTARTS = 3
"""How often torch's elastic agent replaces the keepers after one was lost."""
FAILURE_GRACE_S = 1.0
"""How long a failed server may take to end by itself."""
READ_S = 0.3
"""Clients on this machine read in the run folder why the server ended; then it is removed."""
_TURN_S = 0.1


@dataclass(frozen=True)
class Owner:
    """The program that started this server for itself, and its end of a pipe that only it holds."""

    process: ProcessId
    pipe: int
    folder: RunFolder


def serve(
    config: EngineConfig, owner: Owner | None = None, http: HttpSettings | None = None
) -> int:
    """Run a server until it is told to stop; returns the exit status.

    `http`: where to serve HTTP; None: not at all. The port is taken before anything starts.
    With an `owner` nothing is printed about failures: the owner reads them from its folder."""
    web = HttpProcess(http) if http is not None else None
    list_servers()  # removes what servers left that were killed
    folder = owner.folder if owner else RunFolder.for_owner(ProcessId.current())
    try:
        check_path(folder.keepers_socket)
        config = preflight(config)
    except TPRuntimeError as error:
        if owner is None:
            raise
        folder.write_failure(error.code, str(error))
        return exit_status.REFUSED
    folder.create(claimed=True)
    try:
        if web is not None:
            web.start(folder)
        stop = StopRequest(folder, config.drain_timeout_s)
        if owner is not None:
            stop.watch_owner(owner.process, owner.pipe)
        _Watch(folder, stop, web).start()
        if config.tensor_parallel_size == 1:
            _run_single_keeper(config, folder)
        else:
            _run_elastic_agent(config, folder)
        _end_coordinator(folder)
        return _result(folder, told_by_owner=owner is not None)
    finally:
        if web is not None:
            web.close()
        if owner is None or not owner.process.alive():
            folder.remove()


class _Watch(threading.Thread):
    """Tells the terminal what the server does, and ends a failed one that does not end itself."""

    def __init__(self, folder: RunFolder, stop: StopRequest, web: HttpProcess | None) -> None:
        super().__init__(name="watch", daemon=True)
        self._folder = folder
        self._stop = stop
        self._web = web
        self._notice = ServerNotice(folder, ready_is_news=not folder.private)

    def run(self) -> None:
        while self._folder.read_failure() is None:
            if not self._stop.requested:
                self._notice.turn(self._what())
                if self._web is not None:
                    self._web.turn()
            time.sleep(_TURN_S)
        time.sleep(FAILURE_GRACE_S)
        kill_processes(self._folder)  # the agent's keepers read the failure and end with 0

    def _what(self) -> str:
        if self._folder.read_coordinator() is None and "torch" in sys.modules:
            return "importing torch in the launcher"
        return "starting the rank processes (they import torch)"


def _keeper_arguments(config: EngineConfig, folder: RunFolder) -> list[str]:
    arguments = ["-m", "tp_runtime.launch.serve", "--run-dir", str(folder.path)]
    return [*arguments, "--engine-config", config.to_json()]


def _run_single_keeper(config: EngineConfig, folder: RunFolder) -> None:
    """One rank meets nobody, so the agent and its rendezvous are not needed, nor torch in this
    process: a server is ready three seconds earlier. Blocks like `_run_elastic_agent`."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, *_keeper_arguments(config, folder)]
    for _ in range(1 + KEEPER_RESTARTS):
        keeper = subprocess.Popen(
            command, env={**os.environ, **place}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        status = keeper.wait()
        if status == exit_status.OK:
            return
    _record_lost_keeper(folder, 0, status)


def _record_lost_keeper(folder: RunFolder, rank: int, status: int) -> None:
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    folder.write_failure(
        WorkerFailedError.code,
        f"The keeper of rank {rank} ended ({how}) and was started again {KEEPER_RESTARTS} times "
        "without success; look above for its own message.",
    )


def _run_elastic_agent(config: EngineConfig, folder: RunFolder) -> None:
    """Blocks until all keepers have ended, restarts included. On the main thread."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault(*CUDA_UNTOUCHED)  # LaunchConfig asks whether there are GPUs
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "2"  # keepers need milliseconds
    # The server's own report is what the user reads; the agent's lines are about its children.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.tensor_parallel_size,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.path / "elastic")),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=KEEPER_RESTARTS,
    )
    try:
        elastic_launch(launch, sys.executable)(*_keeper_arguments(config, folder))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _record_lost_keeper(folder, rank, failure.exitcode)


def _end_coordinator(folder: RunFolder) -> None:
    """It follows its keepers; one that does not is ended here."""
    coordinator = folder.read_coordinator()
    if coordinator is not None and wait_gone([coordinator], FAILURE_GRACE_S):
        send_signal(coordinator, signal.SIGKILL)
        wait_gone([coordinator], FAILURE_GRACE_S)


def _result(folder: RunFolder, told_by_owner: bool) -> int:
    failure = folder.read_failure()
    if failure is None:
        return exit_status.OK
    if not told_by_owner:
        print_failure(failure.message)
        time.sleep(READ_S)
    return exit_status.FAILED
