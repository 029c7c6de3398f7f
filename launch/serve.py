"""The torchrun entry: what each rank of a server runs.

    torchrun --nproc-per-node=2 -m tp_runtime.launch.serve MODEL [flags of `tp-runtime serve`]

Each rank becomes a keeper (see launch/keeper.py). The first one of the host checks the settings,
starts the coordinator (on other hosts than rank 0's a relay, see docs/several-hosts.md) and shares
the settings through the run folder; the others find both there, by the pid and start time of the
torchrun that is the parent of all. One server per torchrun.

Signals reach the coordinator through the keepers: TERM lets running requests finish within
--drain-timeout (torchrun's own grace of 30 s is the limit), INT does not wait. The exit status
after a signal is torchrun's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import (
    ConfigError,
    ServerUnavailableError,
    TPRuntimeError,
    WorkerFailedError,
)
from tp_runtime.launch import exit_status
from tp_runtime.launch.coordinator_process import (
    CoordinatorProcess,
    connect_to_coordinator,
    is_listening,
    parent_process,
    shared_config,
)
from tp_runtime.launch.coordinator_return import CoordinatorReturn
from tp_runtime.launch.door_exchange import DoorExchange
from tp_runtime.launch.http_options import http_options, take_http_options
from tp_runtime.launch.http_process import HttpProcess
from tp_runtime.launch.keeper import Keeper
from tp_runtime.launch.keeper_signals import KeeperSignals
from tp_runtime.launch.options import engine_config, engine_options
from tp_runtime.launch.parent_death import die_with_parent
from tp_runtime.launch.preflight import preflight
from tp_runtime.launch.rank_environment import RankPlace, prepare_imports, threads_per_rank
from tp_runtime.launch.server_notice import ServerNotice, print_failure
from tp_runtime.launch.worker_child import WorkerMain, load_worker_main
from tp_runtime.run_folder import ProcessId, RunFolder, list_servers
from tp_runtime.transport.fd_socket import check_path

RETURN_S = 15.0
"""A coordinator that was started again has published by then how other hosts reach it. If its host
is gone, so is torchrun's store, and that is noticed at once."""
PORT_PATIENCE_S = 3.0
"""A first keeper that was started again waits so long for the HTTP port of the one before."""


class RankProcess:
    """One rank's life from the command line to the exit status."""

    def __init__(
        self,
        place: RankPlace,
        folder: RunFolder,
        agent: ProcessId,
        coordinator_elsewhere: bool,
        web: HttpProcess | None = None,
    ) -> None:
        self._place = place
        self._folder = folder
        self._agent = agent
        self._elsewhere = coordinator_elsewhere
        self._may_start = place.local_rank == 0 and not coordinator_elsewhere
        self._tells = place.local_rank == 0 and not folder.claimed
        self._started: CoordinatorProcess | None = None
        self._exchange: DoorExchange | None = None
        self._web = web
        self._signals = KeeperSignals(before_exit=self._abandon)

    def run(self, config: EngineConfig, worker_main: WorkerMain | None = None) -> int:
        """Keep this rank until the server ends; returns the exit status."""
        parent = parent_process()
        threads = threads_per_rank(self._place.local_world_size)
        prepare_imports(os.environ, self._place)
        if not die_with_parent(parent.pid):
            return exit_status.LAUNCHER_LOST
        try:
            keeper = self._become_keeper(config, parent, threads, worker_main)
        except TPRuntimeError as error:
            refused = isinstance(error, ConfigError)
            status = exit_status.REFUSED if refused else exit_status.FAILED
            return self._end(status, error.code, str(error))
        status = keeper.run()
        if self._web is not None:
            self._web.close()
        if keeper.gave_up_waiting:
            self._abandon()
        return self._end(status, WorkerFailedError.code, keeper.message)

    def _become_keeper(
        self,
        config: EngineConfig,
        parent: ProcessId,
        threads: int,
        worker_main: WorkerMain | None,
    ) -> Keeper:
        if self._may_start and not is_listening(self._folder):
            local_ranks = self._place.local_world_size
            checked = config if self._folder.claimed else preflight(config, local_ranks)
            self._started = CoordinatorProcess(checked, self._folder, self._agent, self._place)
        notice = ServerNotice(self._folder, silent=not self._tells)
        shared = shared_config(self._folder)
        if self._web is not None:
            self._web.start(self._folder)
        if worker_main is None:
            worker_main = self._import_worker(config)
        if self._place.several_hosts and self._place.local_rank == 0:
            self._exchange = DoorExchange(self._folder, self._place, shared.start_timeout_s)
        connection = connect_to_coordinator(
            self._folder, self._started, shared.start_timeout_s, lambda: self._turn(notice)
        )
        return Keeper(
            shared,
            self._place,
            connection,
            worker_main,
            threads,
            self._signals,
            sorted({parent, self._agent}, key=lambda process: process.pid),
            relay_signals=not self._folder.claimed,
            every_turn=lambda: self._turn(notice),
            close_in_child=self._forget_web,
            comes_back=self._comes_back(shared),
        )

    def _comes_back(self, config: EngineConfig) -> CoordinatorReturn | None:
        """None: the coordinator is somebody else's. On another host it is a relay that returns."""
        if self._elsewhere:
            return None

        def start() -> CoordinatorProcess:
            before = None if self._place.coordinates else self._started
            if before is not None and before.ended() != exit_status.COORDINATOR_LOST:
                raise ServerUnavailableError("The relay of this host is gone.")
            self._started = CoordinatorProcess(config, self._folder, self._agent, self._place)
            if self._place.several_hosts:
                self._exchange = DoorExchange(
                    self._folder,
                    self._place,
                    RETURN_S,
                    self._started.number,
                    self._forget_web,
                )
            return self._started

        return CoordinatorReturn(
            config, self._folder, start if self._may_start else None, self._started
        )

    def _turn(self, notice: ServerNotice) -> None:
        notice.turn()
        if self._exchange is not None and self._exchange.ended():
            self._exchange = None
        if self._web is not None:
            self._web.turn()

    def _forget_web(self) -> None:
        if self._web is not None:
            self._web.forget()

    def _import_worker(self, config: EngineConfig) -> WorkerMain:
        try:
            return load_worker_main(config.device, config.attention_backend)
        except Exception as error:
            raise WorkerFailedError(
                f"Rank {self._place.rank} could not import the worker "
                f"({type(error).__name__}: {error}); check the installation of torch."
            ) from error

    def _abandon(self) -> None:
        """Ended without the coordinator's word: it has nobody left to serve."""
        if self._started is not None:
            self._started.kill()
        if self._may_start and not self._folder.claimed and not is_listening(self._folder):
            self._folder.remove()

    # ------------------------------------------------------------ the end

    def _end(self, status: int, code: str, message: str) -> int:
        if status == exit_status.COORDINATOR_LOST:
            message = self._coordinator_lost()
        new = bool(status and message) and self._record(code, message)
        failure = self._folder.read_failure()
        cause = failure.message if failure is not None else message
        if status and cause:
            if self._tells or (new and not self._folder.claimed):
                print_failure(cause)
            self._tell_torchrun(cause)
        self._clean_up()
        if self._folder.claimed and failure is not None:
            return exit_status.OK  # see launch/exit_status.py
        return status

    def _coordinator_lost(self) -> str:
        """The rank that started it says how it ended; the others wait for that word."""
        if self._started is not None:
            self._started.wait(1.0)
            return f"The coordinator ended without a word (status {self._started.ended()})."
        deadline = time.monotonic() + 2.0
        while self._folder.read_failure() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return ""

    def _record(self, code: str, message: str) -> bool:
        with contextlib.suppress(OSError):  # the folder may be gone with the server
            return self._folder.write_failure(code, message)
        return False

    def _tell_torchrun(self, message: str) -> None:
        """torchrun prints this in its own summary of failed ranks."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if path:
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            record = {"message": {"message": message, "extraInfo": extra}}
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps(record))

    def _clean_up(self) -> None:
        """The coordinator removes the folder when it ends; this is for when it was killed. It may
        also live on, for the keepers that an elastic agent starts next."""
        if self._folder.claimed or not self._may_start:
            return
        if self._started is None and not is_listening(self._folder):
            time.sleep(0.3)  # the other ranks read here why there will be no coordinator
            self._folder.remove()
        elif self._started is not None and self._started.wait(1.0):
            self._folder.remove()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", required=False)
@engine_options
@http_options
@click.option("--coordinator", default="", help="Run folder of a coordinator that runs already.")
@click.option("--engine-config", default="", hidden=True, help="All settings, as JSON.")
@click.option("--run-dir", default="", hidden=True, help="Run folder made by the launcher.")
@click.option("--agent-pid", type=int, default=0, hidden=True, help="The torchrun above.")
@click.pass_context
def serve_rank(context: click.Context, /, **options: Any) -> int:
    """Run one rank of a server under torchrun: MODEL is a folder or a hub name."""
    place = RankPlace.from_environment()
    agent = ProcessId.of(options.pop("agent_pid") or os.getppid())
    coordinator, run_dir = options.pop("coordinator"), options.pop("run_dir")
    http = take_http_options(options)
    of_a_program = bool(options["engine_config"])
    config = _config(context, options, place)
    if coordinator and not RunFolder(coordinator).path.is_dir():
        raise ConfigError(
            f"--coordinator {coordinator} is not a folder; give the run folder of a coordinator "
            "on this host (the folder of its client.sock)."
        )
    web = None
    if http is not None and place.rank == 0 and not of_a_program:
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        web = HttpProcess(http, PORT_PATIENCE_S if restarted else 0.0)
    folder = RunFolder(coordinator or run_dir) if coordinator or run_dir else None
    if folder is None:
        folder = RunFolder.for_owner(agent)
        if place.local_rank == 0:
            check_path(folder.keepers_socket)
            list_servers()  # removes what servers left that were killed
            folder.create()
    return RankProcess(place, folder, agent, bool(coordinator), web).run(config)


def _config(context: click.Context, options: dict[str, Any], place: RankPlace) -> EngineConfig:
    as_json = options.pop("engine_config")
    if as_json:
        return EngineConfig.from_json(as_json)
    model = options.pop("model")
    if not model:
        raise ConfigError("No model was given; give a folder or a hub name after the module name.")
    given = context.get_parameter_source("tensor_parallel_size")
    asked = options["tensor_parallel_size"]
    if given is not click.core.ParameterSource.DEFAULT and asked != place.world_size:
        raise ConfigError(
            f"--tensor-parallel-size {asked} contradicts torchrun's {place.world_size} ranks; "
            "leave it out, the number of ranks is the tensor-parallel size."
        )
    return engine_config(model, {**options, "tensor_parallel_size": place.world_size})


def main() -> None:
    """Run this rank and end the process with its status; only the first rank tells errors."""
    try:
        status = serve_rank.main(prog_name="tp_runtime.launch.serve", standalone_mode=False)
    except (click.ClickException, TPRuntimeError) as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            message = error.format_message() if isinstance(error, click.ClickException) else error
            print_failure(str(message))
        status = exit_status.REFUSED
        if isinstance(error, TPRuntimeError) and not isinstance(error, ConfigError):
            status = exit_status.FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing to tear down; torch's destructors need not run


if __name__ == "__main__":
    main()
